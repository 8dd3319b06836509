"""Every kernel that claims to run on the accelerator here, at the sizes of training: 2k to 32k tokens, forward and
backward, against float32, ten runs bitwise alike (of cuDNN and tokamax: ten right ones). On a CPU the same code
compares `chunked` at small sizes.
"""

import jax
import jax.numpy as jnp
import pytest

from maxlib import quantization
from maxlib.ops._check import worker
from maxlib.ops._check.cases import CASES, Attention
from maxlib.quantization import _blocks
from maxlib.quantization._matmul import Quantized

WIDENS = {"ragged_dot"}  # on GPUs XLA multiplies every row with every expert, which does not fit
KERNELS = [(name, one) for name, case in CASES.items() for one in worker.names(case.op)]


def compare(case, implementation, dtype):
    given = case.arrays(dtype)
    run, how = worker._runner(case, implementation, given)
    return (
        {"status": "refused", "why": how}
        if run is None
        else worker._compared(
            case,
            run,
            given,
            worker._truth(case, given),
            worker.REPEATS,
            same=(case.op, implementation) not in worker.VARY,
        )
    )


@pytest.mark.gpu
@pytest.mark.tpu
@pytest.mark.parametrize(("name", "implementation"), KERNELS, ids=[" ".join(one) for one in KERNELS])
def test_kernels_are_right_at_the_sizes_of_training(name, implementation):
    if implementation in WIDENS and jax.default_backend() == "gpu":
        pytest.skip(f"{implementation} does not fit at this size")
    found = compare(CASES[name], implementation, jnp.bfloat16)
    if found["status"] == "refused":
        pytest.skip(found["why"])
    assert found["status"] == "right", found


@pytest.mark.parametrize("name", ["window", "eight documents"])
def test_the_comparison_finds_a_kernel_that_is_wrong(name, monkeypatch):
    case = CASES[name].small()
    assert isinstance(case, Attention) and compare(case, "chunked", jnp.float32)["status"] == "right"
    right = worker.bound
    scaled = lambda op, one: lambda *args, **more: right(op, one)(*args, **more) * (1.001 if one == "chunked" else 1)
    monkeypatch.setattr(worker, "bound", scaled)
    assert compare(case, "chunked", jnp.float32)["status"] == "wrong"


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
