"""What holds for every test: eight CPU devices, no network, checked shapes, no silent broadcasting, and compiled
programs that the processes of a run share.
"""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version

# Before jax is imported. A test that starts a process of its own inherits these.
_ON_A_GPU = os.environ.get("MAXLIB_TEST_GPU") == "1"
if not _ON_A_GPU:
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
    if not _ON_A_GPU and _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
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

if _ON_A_GPU and jax.default_backend() != "gpu":
    raise pytest.UsageError(
        f"MAXLIB_TEST_GPU=1 asks for the tests on a GPU, but jax runs on {jax.default_backend()}: install jax[cuda13] on "
        "a machine with an NVIDIA GPU and leave JAX_PLATFORMS out, or leave MAXLIB_TEST_GPU out"
    )
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
