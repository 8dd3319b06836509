"""JAX's grouped matmul kernels for NVIDIA GPUs: what they are given, lowered for CUDA without a GPU, and run on one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu, ragged_dot_mgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from maxlib import nn, ops
from maxlib.hardware import is_blackwell, is_hopper
from maxlib.ops._grouped_matmul import api
from maxlib.ops._grouped_matmul import jax_mosaic_gpu as module
from maxlib.ops._grouped_matmul.jax_mosaic_gpu import jax_mosaic_gpu, tiles_for
from maxlib.ops._grouped_matmul.ragged_tiles import RaggedBlackwellTiles, RaggedTile, hopper_tiles
from tests.ops.hopper import no_gpu, on_a_gpu
from tests.ops.test_grouped_matmul import arrays, close, loop

COUNTS = {
    "uneven": [101, 0, 77, 130],
    "rows left over": [1, 139, 3, 0],
    "one expert": [0, 308, 0, 0],
    "less than a tile each": [7, 8, 9, 1],
    "whole tiles": [128, 0, 64, 116],
    "empty in front, between and behind": [0, 64, 0, 0],
    "nothing": [0, 0, 0, 0],
}
FIRST = "uneven", "rows left over", "empty in front, between and behind"
M, I, O = 308, 192, 320  # whole steps and, of O, no whole tile
HOPPER_TILES = hopper_tiles(M, 4)
HOPPER_OPTIONS = {"block_n", "block_k", "grid_block_n", "max_concurrent_steps"}
EVERY = [pytest.param(HOPPER_TILES, id="hopper"), pytest.param(RaggedBlackwellTiles(), id="blackwell")]


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch):
    """tests/ops/test_tokamax_triton.py has the kernels in Triton."""
    monkeypatch.setattr(module, "has_triton", lambda: False)


@functools.partial(jax.jit, static_argnames=("weight_order", "tiles"))
def both(rows, weights, counts, d_out, weight_order="EOI", tiles=None):
    run = lambda rows, weights: jax_mosaic_gpu(rows, weights, counts, weight_order, tiles=tiles)
    out, pull = jax.vjp(run, rows, weights)
    return out, *pull(d_out)


@pytest.fixture
def emulated(monkeypatch):
    """Computes in XLA what JAX's kernels promise of the arrays and tiles they are given."""

    def hopper(rows, weights, *, group_sizes, block_m, transpose_rhs, **tiles):
        assert len(rows) % block_m == 0 and tiles.keys() == HOPPER_OPTIONS
        return multiplied(rows, weights.swapaxes(1, 2) if transpose_rhs else weights, group_sizes)

    def blackwell(rows, weights, counts, config):
        assert len(rows) % (2 * config.tile_m) == weights.shape[2] % (2 * config.tile_n) == 0
        return multiplied(rows, weights, counts)

    def multiplied(rows, weights, counts):
        return jax.lax.ragged_dot(rows, weights, counts, precision="highest").astype(rows.dtype)

    monkeypatch.setattr(ragged_dot_mgpu, "ragged_dot", hopper)
    monkeypatch.setattr(blackwell_ragged_dot_mgpu, "ragged_dot_kernel", blackwell)
    both.clear_cache()
    yield
    both.clear_cache()


def checked(counts, weight_order="EOI", tiles=None, sizes=(M, I, O)):
    rows, weights, d_out = arrays(*sizes, 4)
    spoiled, d_spoiled = (x.at[sum(counts) :].set(jnp.nan) for x in (rows, d_out))  # those of no expert
    turn = (lambda w: w) if weight_order == "EOI" else (lambda w: w.swapaxes(1, 2))
    got = both(spoiled, turn(weights), jnp.array(counts), d_spoiled, weight_order, tiles)
    out, d_rows, d_weights = loop(rows, weights, counts, d_out)
    close(got, (out, d_rows, turn(d_weights)))


@no_gpu
@pytest.mark.parametrize(
    "counts",
    [pytest.param(x, id=name, marks=() if name in FIRST else pytest.mark.full) for name, x in COUNTS.items()],
)
@pytest.mark.parametrize("tiles", EVERY)
def test_equal_a_loop_over_experts(counts, tiles, emulated):
    checked(counts, tiles=tiles)


@no_gpu
@pytest.mark.parametrize("tiles", EVERY)
def test_matrices_may_lie_the_other_way(tiles, emulated):
    checked(COUNTS["uneven"], "EIO", tiles)


@no_gpu
@pytest.mark.parametrize("tiles", EVERY)
def test_the_gradient_of_float32_weights_is_not_rounded(tiles, emulated):
    rows, weights, d_out = arrays(M, I, O, 4, jnp.bfloat16)
    counts = COUNTS["uneven"]
    got = both(rows, weights.astype(jnp.float32), jnp.array(counts), d_out, tiles=tiles)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    close(got[2:], loop(rows, weights, counts, d_out)[2:])


@no_gpu
def test_no_rows_at_all():
    rows, weights, d_out = arrays(0, 64, 128, 2)
    out, d_rows, d_weights = both(rows, weights, jnp.array([0, 0]), d_out)
    assert out.shape == (0, 128) and d_rows.shape == (0, 64)
    np.testing.assert_array_equal(d_weights, np.zeros((2, 128, 64)))


CHECK = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


def kernels(function, *given) -> int:
    """Returns the number of kernels in a program for CUDA."""
    text = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[CHECK])(*given).mlir_module()
    assert "ragged_dot" not in re.sub(r'loc\(.*|"[^"]*"', "", text)
    return text.count("@mosaic_gpu_v2(")


def given(dtype=jnp.bfloat16, lead=(), weight_order="EOI"):
    array = lambda dtype, *shape: jax.ShapeDtypeStruct((*lead, *shape), dtype)
    sizes = {"E": 4, "O": O, "I": I}
    weights = array(dtype, *(sizes[axis] for axis in weight_order))
    return array(dtype, 1000, I), weights, array(jnp.int32, 4), array(dtype, 1000, O)


@no_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize("weight_order", ["EOI", "EIO"])
@pytest.mark.parametrize("tiles", EVERY)
def test_every_kernel_lowers(dtype, weight_order, tiles):
    run = functools.partial(both.__wrapped__, weight_order=weight_order, tiles=tiles)
    assert kernels(run, *given(dtype, weight_order=weight_order)) == 2


@no_gpu
def test_stages_of_a_pipeline_run_one_by_one():
    assert kernels(jax.vmap(both.__wrapped__), *given(lead=(2,))) == 4


@no_gpu
@pytest.mark.parametrize("check_vma", [False, True])
def test_shards_of_experts(check_vma):
    mesh, split = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P("data")
    options = {"in_specs": (split, P(), P(), split), "out_specs": (split, split, P()), "check_vma": check_vma}
    assert kernels(jax.shard_map(both.__wrapped__, mesh=mesh, **options), *given()) == 2


HOPPER, BLACKWELL = ("gpu", "NVIDIA H100 80GB HBM3"), ("gpu", "NVIDIA B200")


@no_gpu
@pytest.mark.parametrize("device", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_experts_get_kernels_by_default(device, monkeypatch):
    monkeypatch.setattr(api, "current_device", lambda: device)
    run = lambda rows, weights, counts, d_out: jax.vjp(
        lambda rows, weights: ops.grouped_matmul(rows, weights, counts), rows, weights
    )[1](d_out)
    # Gradients of the rows and of the weights: on Hopper in maxlib's kernels, on Blackwell the first in JAX's.
    assert kernels(run, *given()) == (2 if device is HOPPER else 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(device=("gpu", "NVIDIA A100-SXM4-80GB")), "is for NVIDIA's Hopper .* not for NVIDIA A100"),
        (dict(device=("gpu", "NVIDIA B300")), "is for NVIDIA's Hopper .* not for NVIDIA B300"),
        (dict(device=("cpu", "cpu")), "runs on gpu, not on cpu"),
        (dict(dtype=jnp.float32), "takes rows in bfloat16 or float16, not in float32"),
        (dict(out_dtype=jnp.float32), "only returns the dtype of its rows"),
        (dict(width=72), "multiples of 64, not I=72"),
    ],
    ids=str,
)
def test_what_they_cannot_run_is_explained(change, reason):
    options = dict(device=HOPPER, dtype=jnp.bfloat16, out_dtype=None, width=64) | change
    shapes = (8, options["width"]), (2, 64, options["width"])
    rows, weights = (jax.ShapeDtypeStruct(shape, options["dtype"]) for shape in shapes)
    found = ops.explain_grouped_matmul(rows, weights, out_dtype=options["out_dtype"], device=options["device"])
    assert re.search(reason, found.refused["jax_mosaic_gpu"])


def test_quantized_weights_are_restored_expert_by_expert():
    sizes = {"outputs": (0, 1), "group": None, "axes": ("expert", "out", "in")}
    weights = nn.quantized.QuantizedWeight(jnp.ones((2, 64, I), jnp.bfloat16), qtype="int8", **sizes)
    found = ops.explain_grouped_matmul(given()[0], weights, device=HOPPER)
    assert "for all experts at once" in found.refused["jax_mosaic_gpu"] and found.chosen == "tiled"


def test_a_mesh_must_not_have_the_kernels_axes():
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    rows, weights = given()[:2]
    with jax.sharding.use_abstract_mesh(mesh):
        found = ops.explain_grouped_matmul(rows, weights, device=BLACKWELL)
        assert "the mesh must not have: x" in found.refused["jax_mosaic_gpu"]


def test_few_rows_get_small_tiles():
    assert hopper_tiles(32768, 128).forward.rows == 128 and hopper_tiles(8192, 128).d_rows.rows == 64


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: RaggedTile(rows=192), "at most 128 x 192"),
        (lambda: RaggedTile(columns=256), "at most 128 x 192"),
        (lambda: RaggedTile(stages=8), "must fit in 232,448 bytes"),
        (lambda: RaggedTile(stages=1), "stages must be a whole number of at least 2"),
        (lambda: RaggedBlackwellTiles(stages=7), "at most 6"),
    ],
)
def test_tiles_that_do_not_fit_are_errors(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.gpu
@pytest.mark.skipif(
    on_a_gpu and not (is_hopper(kind := jax.devices()[0].device_kind) or is_blackwell(kind)),
    reason="the kernels are for Hopper and Blackwell",
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_on_a_gpu_they_equal_a_loop(dtype, counts):
    rows, weights, d_out = arrays(M, I, O, 4, dtype)
    tiles = tiles_for(jax.devices()[0].device_kind, M, 4)
    got = both(rows, weights, jnp.array(counts), d_out, tiles=tiles)
    close(got, loop(rows, weights, counts, d_out), 4 * float(jnp.finfo(dtype).eps))
