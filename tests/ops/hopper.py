"""Pytest marks for maxlib's Hopper kernels: `gpu` for the hardware, `no_gpu` for the emulator."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from maxlib.hardware import is_hopper

on_a_gpu = jax.default_backend() == "gpu"
no_gpu = pytest.mark.skipif(on_a_gpu, reason="is for machines without a GPU")


def gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test that runs on a GPU of the Hopper generation."""
    other = on_a_gpu and not is_hopper(jax.devices()[0].device_kind)
    return pytest.mark.gpu(pytest.mark.skipif(other, reason="the kernels are for Hopper")(test))
