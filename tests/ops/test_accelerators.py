"""Every kernel that claims to run on the accelerator here, at the sizes of training: 2k to 32k tokens, forward and
backward, against float32, ten runs bitwise alike (of cuDNN and tokamax: ten right ones).
"""

import jax
import jax.numpy as jnp
import pytest

from maxlib import quantization
from maxlib.ops._check import compare
from maxlib.ops._check.cases import CASES
from maxlib.ops._check.run import implementations
from maxlib.quantization import _blocks
from maxlib.quantization._matmul import Quantized

KERNELS = [(name, kernel) for name, case in CASES.items() for kernel in implementations(case.op)]


@pytest.mark.gpu
@pytest.mark.tpu
@pytest.mark.parametrize(("name", "implementation"), KERNELS, ids=[" ".join(pair) for pair in KERNELS])
def test_kernels_are_right_at_the_sizes_of_training(name, implementation):
    job = implementation, CASES[name]
    row = compare.prepare(job) or compare.compare(job)
    if row["status"] == "refused":
        pytest.skip(row["why"])
    assert row["status"] == "right", row


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
    for got, one in zip(run(d, x, w), want, strict=True):
        assert jnp.linalg.norm(got.astype(jnp.float32) - one) < 0.003 * jnp.linalg.norm(one)  # a bfloat16 result
