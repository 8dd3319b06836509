"""Every kernel that claims to run on the accelerator here, at the sizes of training: 2k to 32k tokens, forward and
backward, against float32, ten runs bitwise alike (of cuDNN and tokamax: ten right ones).
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from maxlib import quantization
from maxlib.quantization import _blocks
from maxlib.quantization._matmul import Quantized
from tests.ops import accelerator_calls as calls
from tests.ops.accelerator_calls import CASES

KERNELS = [(name, kernel) for name, case in CASES.items() for kernel in calls.implementations(case)]
SMALL = calls.Attention(40, heads=4, kv_heads=2, key_dim=16, value_dim=16, cache=20, room=20)
LATENTS = calls.Attention(3, heads=4, kv_heads=1, key_dim=24, value_dim=16, cache=20, latents=True, gradients=False)
DELTA = calls.GatedDelta(300, key_heads=2, heads=4, key_dim=32, value_dim=64)


@functools.cache
def arrays_and_truth(case, dtype):
    arrays = case.arrays(dtype)
    return arrays, calls.truth_of(case, arrays)


@pytest.mark.gpu
@pytest.mark.tpu
@pytest.mark.parametrize(("name", "implementation"), KERNELS, ids=[" ".join(pair) for pair in KERNELS])
def test_kernels_are_right_at_the_sizes_of_training(name, implementation):
    case, dtype = CASES[name], jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    run = calls.bound(case.op, implementation)
    try:
        jax.eval_shape(calls.results_of(case, run), case.arrays(dtype))
    except ValueError as error:
        if "was requested, but it" not in str(error):
            raise
        pytest.skip(str(error))
    calls.check(case, run, *arrays_and_truth(case, dtype), same=(case.op, implementation) not in calls.VARY)


def steeper(x):
    """Returns `x`, and of its gradient 3 % too much."""
    wide = x.astype(jnp.float32)
    return (wide + 0.03 * (wide - jax.lax.stop_gradient(wide))).astype(x.dtype)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SMALL, id="cache"),
        pytest.param(LATENTS, id="values are channels of the keys", marks=pytest.mark.full),
    ],
)
def test_a_kernel_that_sees_another_key_is_wrong(case):
    chunked = calls.bound("attention", "chunked")
    calls.check(case, chunked, *arrays_and_truth(case, jnp.float32))

    def off(q, k, v, *, k_end, **options):
        return chunked(q, k, v, k_end=k_end - 1, **options)

    with pytest.raises(AssertionError, match="is off by"):
        calls.check(case, off, *arrays_and_truth(case, jnp.float32))


@pytest.mark.full
def test_a_gradient_of_a_recurrence_that_is_3_percent_off_is_wrong():
    right = calls.bound("gated_delta_rule", "chunked")
    calls.check(DELTA, right, *arrays_and_truth(DELTA, jnp.bfloat16))
    with pytest.raises(AssertionError, match="d_k is off by 0.03"):
        calls.check(DELTA, lambda **x: right(**x | {"k": steeper(x["k"])}), *arrays_and_truth(DELTA, jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.tpu
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (8192, 2048, 7168), (300, 96, 160)], ids=str)
def test_fp8_blocks_equal_their_values_in_float32(shape):
    """In units for scaled blocks (Blackwell) or in bfloat16 (others): the same products, up to their sum's order."""
    M, I, O = shape
    keys, spec = jax.random.split(jax.random.key(0), 3), "MI,OI->MO"
    x, w, d = (
        jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, ((M, I), (O, I), (M, O)), strict=True)
    )
    format = quantization.TRAINING["fp8_block"]
    run = jax.jit(lambda d, x, w: jax.vjp(lambda x, w: Quantized(format).einsum(spec, x, w), x, w)[1](d))
    line = lambda a, sides: _blocks.quantize(a, "float8_e4m3fn", sides).restored(jnp.float32)
    with jax.default_matmul_precision("float32"):
        want = (
            line(d, (1, 128)) @ line(w, (128, 128)),
            line(d, (128, 1)).T @ line(x, (128, 1)),
        )
    for got, expected in zip(run(d, x, w), want, strict=True):
        assert jnp.linalg.norm(got.astype(jnp.float32) - expected) < 0.003 * jnp.linalg.norm(
            expected
        )  # a bfloat16 result
