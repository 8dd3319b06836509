"""Which device the tests run on: a requested one is used, a missing one is an error, and the report names it."""

import subprocess
import sys

import pytest

from tests import accelerators


@pytest.mark.parametrize(
    ("arguments", "variable", "platform"),
    [
        ([], None, "cpu"),
        (["-m", "gpu"], None, "gpu"),
        (["-q", "-mtpu", "tests/ops"], None, "tpu"),
        (["-m", "not gpu"], None, "cpu"),
        (["-m", "full"], "tpu", "tpu"),
        (["-m", "gpu"], "cpu", "cpu"),
    ],
    ids=str,
)
def test_the_platform_is_the_one_that_is_asked_for(arguments, variable, platform, monkeypatch):
    monkeypatch.delenv(accelerators.VARIABLE)
    if variable is not None:
        monkeypatch.setenv(accelerators.VARIABLE, variable)
    assert accelerators.asked(arguments) == platform


def test_a_platform_that_does_not_exist(monkeypatch):
    monkeypatch.setenv(accelerators.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="must be cpu, gpu or tpu, got 'cuda'"):
        accelerators.asked([])


def test_marked_tests_run_on_their_platform_only():
    assert accelerators.refused(["full"], "gpu") is None and accelerators.refused(["gpu", "tpu"], "tpu") is None
    assert accelerators.refused(["gpu", "tpu"], "cpu") == "needs a gpu or tpu: MAXLIB_TEST_PLATFORM=gpu"
    assert accelerators.absent("gpu", "gpu") is None and accelerators.absent("cpu", "gpu") is None


@pytest.mark.full
def test_asked_for_in_vain_is_an_error():
    """On a machine without a GPU `pytest -m gpu` must not say that all passed."""
    if accelerators.PLATFORM != "cpu":
        pytest.skip("there is an accelerator")
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/ops/test_accelerators.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "are to run on a gpu, but jax runs on cpu" in done.stderr
