"""Set up every test: eight CPU devices, no network, shapes checked at run time, no silent broadcasting; a run ends with
its wall time and its processor time.
"""

import atexit
import gc
import os
import shutil
import tempfile
from importlib.metadata import version

from tests import accelerators

# Set before jax is imported. Processes that a test starts inherit these.
_ON_A_CPU = accelerators.PLATFORM == "cpu"
if _ON_A_CPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests spend most of their time compiling programs that run once. Level 0 skips LLVM's optimizations, not XLA's. The
# older fusion emitters and one module per program compile in a third of the time and give the same results.
# Newer compilers have one kind of emitter, and abort on unknown flags.
_EMITTERS = ("--xla_cpu_use_fusion_emitters=false",) if version("jaxlib").startswith("0.10.") else ()
for _flag in (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *_EMITTERS,
):
    if _ON_A_CPU and _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
# XLA's CPU client has as many threads as there are devices or cores. A collective needs one thread per device, and
# deadlocks if another task holds one of them.
os.environ.setdefault("NPROC", "16")
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # lines of Python that only profiles show
# Programs that processes started by tests share. In pytest's own few come twice, and hashing them all costs more.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="maxlib-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

gc.disable()  # until the tests are collected: what imports make stays

import functools  # noqa: E402
import importlib.util  # noqa: E402
import multiprocessing  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

from tests import typecheck  # noqa: E402

typecheck.install("maxlib")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", "maxlib-tests-" not in os.environ["JAX_COMPILATION_CACHE_DIR"])
# A fifth of what a small program takes to compile is a new context of MLIR, which all programs can share.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)
jax.config.update("jax_num_cpu_devices", 8)  # so that programs of the documentation may set it
_STARTED = time.monotonic()


@pytest.fixture(autouse=True, scope="module")
def _clear_compiled_programs():
    """Clear compiled programs: thousands in one process exceed Linux's limit of 65,530 memory maps and crash the
    compiler.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 50_000:
        jax.clear_caches()
        gc.collect()


def pytest_configure() -> None:
    if message := accelerators.absent(accelerators.PLATFORM, jax.default_backend()):
        raise pytest.UsageError(message)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests for another platform."""
    for item in items:
        marks = [mark.name for mark in item.iter_markers()]
        if reason := accelerators.refused(marks, accelerators.PLATFORM):
            item.add_marker(pytest.mark.skip(reason=reason))


_RAN = accelerators.Ran(accelerators.PLATFORM)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _ON_A_CPU:
        _RAN.add(report)


def _exit_at_once() -> None:
    """End a worker, whose thousands of compiled programs would be taken apart one by one for seconds."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if accelerator tests were requested and none with that mark ran."""
    worker = hasattr(session.config, "workerinput")
    gc.freeze()  # pytest would collect all that the tests left
    if worker:
        atexit.register(_exit_at_once)
    if not (_ON_A_CPU or worker or _RAN.counts or session.config.option.collectonly or session.exitstatus):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how long the run took, and for how long it kept a processor busy, its workers and their children included."""
    processor = sum(os.times()[:4])
    terminalreporter.line(f"{time.monotonic() - _STARTED:.0f} s wall time, {processor:.0f} s processor time")
    if not _ON_A_CPU:
        terminalreporter.section(f"on the {accelerators.PLATFORM}")
        for line in _RAN.lines(jax.devices()[0].device_kind):
            terminalreporter.line(line)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exempt everything imported so far from garbage collection, and collect the rest seldom."""
    collected = yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 20, 20)
    return collected


def pytest_report_header() -> list[str]:
    torch = (
        "here"
        if importlib.util.find_spec("torch")
        else "not installed: live tests against transformers are skipped (docs/contributing.md)"
    )
    return [f"jax {jax.__version__} on {jax.device_count()} {jax.default_backend()} devices; torch {torch}"]
