"""The grouped matmul for Hopper: run by the emulator, lowered for CUDA (both without a GPU), and run where there is
one.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from maxlib import ops
from maxlib.kernels.grouped_matmul import rows as row_tables
from maxlib.kernels.grouped_matmul.mosaic_gpu import by_experts, by_rows, config, mosaic_gpu
from tests.ops.attention import emulator
from tests.ops.hopper import gpu, no_gpu
from tests.ops.test_grouped_matmul import arrays, close, loop

COUNTS = {
    "uneven": [101, 0, 77, 130],
    "rows left over": [1, 139, 3, 0],
    "one expert": [0, 308, 0, 0],
    "less than a tile each": [7, 8, 9, 1],
    "nothing": [0, 0, 0, 0],
}
M, I, O = 308, 128, 192  # neither a multiple of the tiles, nor of one another


def both(rows, weights, counts, d_out, weight_order="EOI", tiles=None):
    run = lambda rows, weights: mosaic_gpu(rows, weights, counts, weight_order, tiles=tiles)
    out, pull = jax.vjp(run, rows, weights)
    return out, *pull(d_out)


@pytest.fixture
def emulated(monkeypatch):
    """Two processors, so that each has several tiles."""
    emulator.install(monkeypatch, by_rows, by_experts)
    monkeypatch.setattr(by_rows, "processors", lambda: 2)


@no_gpu
@pytest.mark.full
@pytest.mark.parametrize("counts_of", [COUNTS], ids=len)
def test_the_kernels_code_equals_a_loop_over_experts(emulated, counts_of):
    """Others come in other tests here."""
    rows, weights, d_out = arrays(M, I, O, 4)
    run = jax.jit(both)
    for counts in map(COUNTS.get, counts_of):
        spoiled, d_spoiled = (x.at[sum(counts) :].set(jnp.nan) for x in (rows, d_out))  # those of no expert
        close(run(spoiled, weights, jnp.array(counts), d_spoiled), loop(rows, weights, counts, d_out))


@no_gpu
@pytest.mark.full
def test_matrices_may_lie_the_other_way(emulated):
    rows, weights, d_out = arrays(M, I, O, 4)
    counts = COUNTS["rows left over"]
    got = jax.jit(both, static_argnums=4)(rows, weights.swapaxes(1, 2), jnp.array(counts), d_out, "EIO")
    out, d_rows, d_weights = loop(rows, weights, counts, d_out)
    close(got, (out, d_rows, d_weights.swapaxes(1, 2)))


@no_gpu
def test_the_gradient_of_the_weights_is_not_rounded(emulated):
    rows, weights, d_out = arrays(M, I, O, 4, jnp.bfloat16)
    counts = COUNTS["uneven"]
    got = jax.jit(both)(rows, weights.astype(jnp.float32), jnp.array(counts), d_out)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    close(got[2:], loop(rows, weights, counts, d_out)[2:])


@no_gpu
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.full)], ids=["bfloat16", "float32"]
)
def test_every_kernel_lowers(dtype):
    assert kernels(both, *shapes(dtype)) == 3


def shapes(dtype=jnp.bfloat16, lead=()):
    """Shapes other than those above, whose traces are the emulator's."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct((*lead, *shape), dtype)
    rows = 1000
    return array(jnp.bfloat16, rows, I), array(dtype, 4, O, I), array(jnp.int32, 4), array(jnp.bfloat16, rows, O)


def kernels(function, *inputs) -> int:
    """Returns the number of kernels in a program for CUDA."""
    check = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    text = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[check])(*inputs).mlir_module()
    return text.count("@mosaic_gpu_v2(")


@no_gpu
@pytest.mark.full
def test_stages_of_a_pipeline_lower():
    assert kernels(jax.vmap(both), *shapes(lead=(2,))) >= 3


@no_gpu
@pytest.mark.parametrize("check_vma", [pytest.param(False, marks=pytest.mark.full), True])
def test_shards_of_rows_lower(check_vma):
    mesh, split = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P("data")
    options = {"in_specs": (split, P(), P(), split), "out_specs": (split, split, P()), "check_vma": check_vma}
    assert kernels(jax.shard_map(both, mesh=mesh, **options), *shapes()) == 3


def test_tiles_are_wide_where_little_is_wasted():
    assert config.row_tiles(4096, 1) == config.row_tiles(2880, 1) == config.Tiles(columns=256, stages=3)
    assert config.row_tiles(4096, 2) == config.row_tiles(384, 1) == config.Tiles(columns=128, stages=4)


TILES = jax.jit(row_tables.tiles, static_argnums=(1, 2))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_tiles_cover_every_row_of_an_expert_once(counts):
    owner = np.full(M, -1)
    table, (used,) = TILES(np.array(counts), M, 128)
    for expert, begin, first, last in np.asarray(table)[:used]:
        assert begin % 8 == 0
        assert begin <= first < last <= begin + 128
        assert (owner[first:last] == -1).all()
        owner[first:last] = expert
    np.testing.assert_array_equal(owner[: sum(counts)], np.repeat(np.arange(4), counts))
    assert (owner[sum(counts) :] == 4).all()  # rows of no expert have tiles of zeros


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(device=("gpu", "NVIDIA B200")), "is for NVIDIA's Hopper .* not for NVIDIA B200"),
        (dict(dtype=jnp.float32), "takes rows in bfloat16 or float16, not in float32"),
        (dict(out_dtype=jnp.float32), "only returns the dtype of its rows"),
        (dict(width=72), "multiples of 64, not I=72"),
    ],
    ids=str,
)
def test_what_they_cannot_run_is_explained(change, reason):
    options = dict(device=("gpu", "NVIDIA H200"), dtype=jnp.bfloat16, out_dtype=None, width=64) | change
    rows, weights = jnp.ones((8, options["width"]), options["dtype"]), jnp.ones((2, 64, options["width"]))
    choice = ops.explain_grouped_matmul(rows, weights, out_dtype=options["out_dtype"], device=options["device"])
    assert re.search(reason, choice.refused["mosaic_gpu"])


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_on_a_gpu_the_kernels_equal_a_loop(dtype):
    rows, weights, d_out = arrays(M, I, O, 4, dtype)
    for counts in COUNTS.values():
        got = jax.jit(both)(rows, weights, jnp.array(counts), d_out)
        close(got, loop(rows, weights, counts, d_out), 4 * float(jnp.finfo(dtype).eps))
