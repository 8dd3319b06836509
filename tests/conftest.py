"""What holds for every test: eight CPU devices, no network, checked shapes, no silent broadcasting, and compiled
programs that the processes of a run share.
"""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version

from tests import accelerators

# Before jax is imported. A test that starts a process of its own inherits these.
_ON_A_CPU = accelerators.PLATFORM == "cpu"
if _ON_A_CPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the tests' time is compiling what runs once. Level 0 skips LLVM's optimizations, not XLA's; the older emitters
# of fusions and a single module per program take a third of the time to compile and compute the same.
# Newer compilers have one kind of emitter, and end the process at a flag that they do not know.
_EMITTERS = ("--xla_cpu_use_fusion_emitters=false",) if version("jaxlib").startswith("0.10.") else ()
for _flag in (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *_EMITTERS,
):
    if _ON_A_CPU and _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
# XLA's CPU client runs programs on as many threads as there are devices or cores. A collective takes one for each
# device, and waits for ever if another task holds one of them.
os.environ.setdefault("NPROC", "16")
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "agg")
# Workers, and processes that tests start, inherit the first process's directory.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="maxlib-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import gc  # noqa: E402
import importlib.util  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

from tests import typecheck  # noqa: E402

typecheck.install("maxlib")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_go():
    """Thousands of them in one process take more memory maps than Linux allows (65,530), which crashes the compiler."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()


def pytest_configure() -> None:
    if message := accelerators.absent(accelerators.PLATFORM, jax.default_backend()):
        raise pytest.UsageError(message)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is for another platform."""
    for item in items:
        marks = [mark.name for mark in item.iter_markers()]
        if reason := accelerators.refused(marks, accelerators.PLATFORM):
            item.add_marker(pytest.mark.skip(reason=reason))


_RAN = accelerators.Ran(accelerators.PLATFORM)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _ON_A_CPU:
        _RAN.add(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails where tests on an accelerator were asked for and none of its mark ran."""
    worker = hasattr(session.config, "workerinput")
    if not (_ON_A_CPU or worker or _RAN.counts or session.config.option.collectonly or session.exitstatus):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    if not _ON_A_CPU:
        terminalreporter.section(f"on the {accelerators.PLATFORM}")
        for line in _RAN.lines(jax.devices()[0].device_kind):
            terminalreporter.line(line)


def pytest_collection_finish() -> None:
    """What is imported by now stays: collections of garbage need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    torch = (
        "here"
        if importlib.util.find_spec("torch")
        else "absent: live parity with transformers is skipped (docs/contributing.md)"
    )
    return [f"jax {jax.__version__} on {jax.device_count()} {jax.default_backend()} devices; torch {torch}"]
