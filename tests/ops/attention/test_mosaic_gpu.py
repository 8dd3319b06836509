"""The Hopper kernels: run by an emulator, lowered for CUDA (both without a GPU), and run where there is one."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from maxlib.kernels.attention.mosaic_gpu import config, memory
from maxlib.kernels.attention.tiles import tiles_of, walk
from maxlib.ops import explain_attention
from maxlib.ops._attention import mosaic_gpu as module
from tests.ops.attention import cases, emulator
from tests.ops.attention.kernels import MASKS, by_name, check, everything, reference, some_masks, values
from tests.ops.hopper import gpu, no_gpu

FACTORS = {
    "heads": [(4, 2), (2, 2), (3, 1)],
    "widths": [(64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (96, 96), (64, 128)],
    "lengths": [(200, 330), (1, 33), (137, 137)],  # multiples of no tile
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "bias": [None],
}
CASES = cases.pairwise(FACTORS)
MAX_QUERIES = [  # every width, and the rest in turn
    cases.Case(*(values[i % len(values)] for values in list(FACTORS.values())[:3]), *rest, None)
    for i, rest in enumerate(
        itertools.islice(itertools.cycle([(None, True), (2.0, False), (2.0, True), (None, False)]), 7)
    )
]
HOPPER = ("gpu", "NVIDIA H200")
mosaic_gpu, mosaic_gpu_mla = by_name(module.mosaic_gpu), by_name(module.mosaic_gpu_mla)


# ------------------------------------------------------------------------------------------------ on a CPU


@pytest.fixture
def emulated(monkeypatch):
    emulator.install(monkeypatch)


def slow_if(slow, *values):
    """The emulator walks every tile in Python."""
    return pytest.param(*values, marks=pytest.mark.full if slow else ())


SHORT = cases.Case((3, 1), (192, 128), (70, 70), 2.0, True, None)  # a few tiles, partial ones among them
TOKEN = cases.Case((2, 2), (80, 80), (1, 33), None, True, None)


@no_gpu
@pytest.mark.parametrize("case", [SHORT, *(slow_if(True, case) for case in (TOKEN, *MAX_QUERIES))], ids=str)
def test_the_kernels_code_equals_the_reference(case, emulated):
    check(mosaic_gpu, case, some_masks(case, 1 if case is SHORT else 2), jnp.float32, 1e-5)


@no_gpu
@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_code_equals_the_reference_pairwise(case, emulated):
    check(mosaic_gpu, case, some_masks(case, 5), jnp.float32, 1e-5)


@no_gpu
@pytest.mark.parametrize("processors", [1, slow_if(True, 2), slow_if(True, 132)], ids="processors={}".format)
def test_keys_are_summed_over_parts_of_their_heads_where_processors_would_be_idle(processors, emulated, monkeypatch):
    """Of all heads together, two of the four heads at a time, and one."""
    monkeypatch.setattr(config, "processors", lambda: processors)
    heads = (2, 1) if processors == 1 else (4, 1)
    case = cases.Case(heads, (64, 96), (40, 150), None, True, None)  # two rows of two blocks of keys
    assert config.key_gradient_parts(4, 4) == {1: 1, 2: 2, 132: 4}[processors]
    check(mosaic_gpu, case, some_masks(case, 1), jnp.float32, 1e-5)


DECODING = [
    cases.Case((8, 2), (64, 64), (3, 1536), 2.0, True, None),  # three parts
    cases.Case((3, 1), (128, 64), (1, 330), None, False, None),  # too short: one
    cases.Case((4, 1), (64, 80), (2, 1611), None, True, None),  # three parts of 13 blocks
]


@no_gpu
@pytest.mark.parametrize("case", [DECODING[0], *(slow_if(True, case) for case in DECODING[1:])], ids=str)
def test_decoding_equals_the_reference(case, emulated):
    assert config.decode_parts(4, 1536) == 3
    check(mosaic_gpu, case, some_masks(case, 1), jnp.float32, 1e-5, results=values)


@no_gpu
def test_a_cache_of_which_little_is_filled(emulated):
    """Fewer blocks than parts, none at all, and one more than there are parts."""
    case = cases.Case((2, 1), (64, 64), (1, 2560), None, True, None)
    assert config.decode_parts(2, 2560) == 5
    equal_with_a_cache(case, (0, 1, 129, 700), *(values(run, case) for run in (mosaic_gpu, reference)))


def equal_with_a_cache(case, lengths, *runs):
    """Results where rows have these numbers of tokens."""
    inputs, start = cases.arrays(case, jnp.float32), np.zeros((2, 1), np.int32)
    for filled in lengths:
        got, want = (run(inputs, start, start + filled) for run in runs)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], atol=1e-5, err_msg=f"{name} {filled}")


LATENTS = [  # rows of one tile and of two, several queries among them; empty keys, few and many
    cases.Case((5, 1), (144, 128), (1, 330), None, False, None),
    cases.Case((40, 1), (320, 256), (2, 1536), 2.0, True, None),
    cases.Case((16, 1), (576, 512), (3, 1611), None, True, None),
]


def check_latents(case, masks, dtype, tol, results=values):
    ours, truth = (with_shared_values(run, case.widths[1]) for run in (mosaic_gpu_mla, reference))
    check(ours, case, masks, dtype, tol, results=results, truth=truth)


def with_shared_values(run, width):
    """The values are channels of the keys."""
    return lambda q, k, v, **options: run(q, k, k[..., :width], **options)


@no_gpu
@pytest.mark.parametrize("case", [LATENTS[0], *(slow_if(True, case) for case in LATENTS[1:])], ids=str)
def test_decoding_latents_equals_the_reference(case, emulated, monkeypatch):
    monkeypatch.setattr(config, "processors", lambda: 12)
    check_latents(case, some_masks(case, 2), jnp.float32, 1e-5)


@no_gpu
def test_a_cache_of_latents_of_which_little_is_filled(emulated):
    case = cases.Case((3, 1), (144, 128), (1, 2560), None, False, None)
    assert config.latent_parts(2, 2560) == 5
    equal_with_a_cache(
        case, (0, 1, 129), *(values(with_shared_values(run, 128), case) for run in (mosaic_gpu_mla, reference))
    )


@no_gpu
def test_gradients_of_latents_are_those_of_keys_and_values(emulated):
    case = LATENTS[0]
    check_latents(case, some_masks(case, 1), jnp.float32, 1e-5, results=everything)


@no_gpu
@pytest.mark.full
def test_other_tiles_than_its_own(emulated):
    """One warpgroup, three stages, and kernels of their own for dk and dv."""
    tiles = config.Tiles(1, 64, 3)
    run = functools.partial(mosaic_gpu, tiles=config.HopperAttentionTiles(tiles, tiles, tiles, tiles, tiles))
    case = cases.Case((2, 1), (64, 64), (150, 200), None, True, None)
    check(run, case, some_masks(case, 1), jnp.float32, 1e-5)


@no_gpu
@pytest.mark.full
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_any_scale(scale, emulated):
    check(mosaic_gpu, cases.Case((2, 1), (64, 64), (60, 60), None, False, None), MASKS[3:4], jnp.float32, 1e-5, scale)


# ------------------------------------------------------------------------------------------------ compiled for CUDA

CUSTOM_CALL = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


def lower(case, dtype=jnp.bfloat16):
    """Everything that the compiler for GPUs does before it needs CUDA: layouts, shared memory, instructions."""
    inputs = jax.eval_shape(lambda: cases.arrays(case, dtype))
    bounds = [jax.ShapeDtypeStruct((2, case.lengths[0]), jnp.int32)] * 2
    return export.export(everything(mosaic_gpu, case), platforms=["cuda"], disabled_checks=[CUSTOM_CALL])(
        inputs, *bounds
    )


LOWERED = list(itertools.product(FACTORS["widths"], [None, 30.0], [jnp.bfloat16, jnp.float16]))
BY_DEFAULT = [((256, 256), 30.0, jnp.bfloat16)]  # the widest, with the most kernels


@no_gpu
@pytest.mark.parametrize(
    ("widths", "softcap", "dtype"), [slow_if(case not in BY_DEFAULT, *case) for case in LOWERED], ids=str
)
def test_every_kernel_lowers(widths, softcap, dtype):
    text = lower(cases.Case((8, 2), widths, (1001, 777), softcap, True, None), dtype).mlir_module()
    sizes = *widths, softcap is not None
    assert text.count("@mosaic_gpu_v2(") == 2 + len(config.key_gradient_tiles(*sizes))


@no_gpu
@pytest.mark.parametrize("widths", [slow_if(w != (256, 256), w) for w in [(80, 80), (192, 128), (256, 256)]], ids=str)
def test_decoding_lowers(widths):
    case = cases.Case((8, 2), widths, (4, 4096), None, True, None)
    inputs = jax.eval_shape(lambda: cases.arrays(case, jnp.bfloat16))
    bounds = [jax.ShapeDtypeStruct((2, 4), jnp.int32)] * 2
    lowered = export.export(values(mosaic_gpu, case), platforms=["cuda"], disabled_checks=[CUSTOM_CALL])(
        inputs, *bounds
    )
    assert lowered.mlir_module().count("@mosaic_gpu_v2(") == 1


@no_gpu
@pytest.mark.parametrize("widths", [(576, 512), slow_if(True, (320, 256)), slow_if(True, (144, 128))], ids=str)
def test_decoding_latents_lowers(widths):
    shapes = {"q": (2, 2, 128, widths[0]), "k": (2, 4096, 1, widths[0]), "v": (2, 4096, 1, widths[1])}
    inputs = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    bounds = {name: jax.ShapeDtypeStruct((2, 2), jnp.int32) for name in ("k_start", "k_end")}
    run = jax.jit(functools.partial(mosaic_gpu_mla, scale=0.1))
    lowered = export.export(run, platforms=["cuda"], disabled_checks=[CUSTOM_CALL])(**inputs, **bounds)
    assert lowered.mlir_module().count("@mosaic_gpu_v2(") == 1


# ------------------------------------------------------------------------------------------------ dispatch and tiles


def explain(device=HOPPER, widths=(128, 128), dtype=jnp.bfloat16, **options):
    q, k, v = (jax.ShapeDtypeStruct((2, 300, 4, width), dtype) for width in (widths[0], *widths))
    return explain_attention(q, k, v, device=device, **options)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(device=("gpu", "NVIDIA A100-SXM4-80GB")), "is for NVIDIA's Hopper .* not for NVIDIA A100-SXM4-80GB"),
        (dict(device=("gpu", "NVIDIA B200")), "is for NVIDIA's Hopper"),
        (dict(device=("tpu", "TPU v5p")), "runs on gpu, not on tpu"),
        (dict(dtype=jnp.float32), "takes queries in bfloat16 or float16, not in float32"),
        (dict(widths=(72, 64)), "width is a multiple of 16, at most 256, not Hk=72"),
        (dict(widths=(64, 512)), "width is a multiple of 16, at most 256, not Hv=512"),
        (dict(bias=jax.ShapeDtypeStruct((1, 1, 300, 300), jnp.bfloat16)), "lacks bias"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_they_cannot_run_is_explained(change, reason):
    answer = explain(**change)
    assert answer.chosen != "mosaic_gpu"
    assert re.search(reason, answer.refused["mosaic_gpu"])


TILES, WALK = jax.jit(tiles_of, static_argnums=(2, 3, 4)), jax.jit(walk)


@pytest.mark.parametrize("mask", cases.MASKS)
def test_visited_and_full_tiles_are_those_of_the_mask(mask, emulated):
    start, end = (np.asarray(x) for x in cases.bounds(mask, "padded", (96, 96)))
    keys = np.arange(96)
    seen = (start[..., None] <= keys) & (keys < end[..., None])
    blocks = seen.reshape(2, 6, 16, 4, 24)
    visited, full = TILES(start, end, 96, 16, 24)
    assert not (blocks.any((2, 4)) & ~np.asarray(visited)).any()
    np.testing.assert_array_equal(full, blocks.all((2, 4)))
    for rows, full_rows in ((visited, full), (visited.swapaxes(1, 2), full.swapaxes(1, 2))):
        walks = np.asarray(WALK(rows, full_rows)).reshape(-1, 4)
        rows, full_rows = (np.asarray(x).reshape(-1, x.shape[2]) for x in (rows, full_rows))
        for steps, row, full_row in zip(walks, rows, full_rows, strict=True):
            order = [int(memory.column(step, steps[0], steps[2], steps[3])) for step in range(steps[1])]
            assert sorted(order) == list(range(steps[0], steps[0] + steps[1]))
            assert set(np.flatnonzero(row)) <= set(order)
            assert all(full_row[column] for column in order[: steps[3]])


@pytest.mark.parametrize("widths", [(64, 64), (256, 256)], ids=str)
def test_a_window_costs_what_it_covers(widths):
    """The number of visited tiles follows the window, in both passes."""
    T, window, sizes = 8192, 1024, (*widths, False)
    end = np.arange(1, T + 1, dtype=np.int32)[None]
    start = np.maximum(end - window, 0)
    (keys, *_), rows = config.key_gradient_tiles(*sizes).values(), config.forward_tiles(*widths)
    for block_q, block_k in ((rows.rows, rows.columns), (keys.columns, keys.rows)):
        pad = ((0, 0), (0, -T % block_q))
        visited, _ = TILES(*(np.pad(x, pad, mode="edge") for x in (start, end)), T, block_q, block_k)
        assert np.sum(visited) * block_q * block_k < 1.4 * window * T


@no_gpu
@pytest.mark.full
@pytest.mark.parametrize("check_vma", [False, True])
def test_shards_of_a_batch_lower(check_vma):
    """Keys that every device has, whose gradients are sums over devices, and queries that are split."""
    mesh, split = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P("data")
    case = cases.Case((4, 2), (64, 64), (300, 300), None, True, None)
    inputs, (start, end) = cases.arrays(case, jnp.bfloat16, batch=8), cases.bounds("causal", "one", case.lengths)
    start, end = (jnp.tile(x, (4, 1)) for x in (start, end))

    def both(q, k, v, sinks, start, end, d):
        run = lambda q, k, v, sinks: mosaic_gpu(q, k, v, k_start=start, k_end=end, scale=0.1, sinks=sinks)[0]
        out, pull = jax.vjp(run, q, k, v, sinks)
        return out, *pull(d)

    options = {"in_specs": (*[split] * 3, P(), *[split] * 3), "out_specs": (*[split] * 4, P()), "check_vma": check_vma}
    arrays = (*(inputs[name] for name in ("q", "k", "v", "sinks")), start, end, inputs["d_out"])
    check = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    run = jax.jit(jax.shard_map(both, mesh=mesh, **options))
    text = export.export(run, platforms=["cuda"], disabled_checks=[check])(*arrays).mlir_module()
    assert text.count("@mosaic_gpu_v2(") == 3


# ------------------------------------------------------------------------------------------------ on a GPU


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_the_kernels_equal_the_reference(case, dtype):
    check(mosaic_gpu, case, some_masks(case, 3), dtype, 4 * jnp.finfo(dtype).eps)


@gpu
@pytest.mark.parametrize("case", DECODING, ids=str)
def test_on_a_gpu_decoding_equals_the_reference(case):
    check(mosaic_gpu, case, MASKS, jnp.bfloat16, 4 * jnp.finfo(jnp.bfloat16).eps, results=values)


@gpu
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_on_a_gpu_decoding_latents_equals_the_reference(case):
    check_latents(case, MASKS, jnp.bfloat16, 4 * jnp.finfo(jnp.bfloat16).eps)


@gpu
def test_on_a_gpu_gradients_are_the_same_in_every_run():
    case = cases.Case((8, 2), (128, 128), (1000, 1000), None, True, None)
    inputs, run = cases.arrays(case, jnp.bfloat16), everything(mosaic_gpu, case)
    bounds = cases.bounds("causal", "padded", case.lengths)
    first = jax.device_get(run(inputs, *bounds))
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run(inputs, *bounds)), first)
