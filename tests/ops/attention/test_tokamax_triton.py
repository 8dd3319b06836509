"""tokamax's attention in Triton: run by Pallas's interpreter, compiled for GPUs without one, and run on one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from maxlib import ops
from maxlib.hardware import is_ampere_or_later
from maxlib.ops._attention import table, tokamax_triton
from maxlib.ops._attention.tokamax_triton import TritonAttentionTile, TritonAttentionTiles, triton_tiles
from maxlib.plan._targets import has_gpu_compiler
from tests.ops.attention import cases, triton_interpreter
from tests.ops.attention.kernels import by_name, compiled, reference, some_masks
from tests.ops.described import compile_for
from tests.ops.hopper import no_gpu, on_a_gpu

needs_tokamax = pytest.mark.skipif(not tokamax_triton.has_triton_attention(), reason="needs tokamax 0.0.17")
A100, B200 = "NVIDIA A100-SXM4-80GB", "NVIDIA B200"
SMALL = TritonAttentionTiles(TritonAttentionTile(32, 16, 4), TritonAttentionTile(64, 32, 4))
FACTORS = cases.FACTORS | {"bias": [None], "widths": [(8, 8), (24, 16), (16, 24)]}
PACKED = ops.StaticMask("causal", segmented=True, aligned=True)


@pytest.fixture
def interpreted(monkeypatch):
    triton_interpreter.install(monkeypatch)


def results(run, case, mask, documents, dtype, scale=0.3, **options):
    """Output and gradients of q, k, v and sinks, as float64."""
    arrays = {name: x for name, x in cases.arrays(case, dtype).items() if x is not None}
    bounds = dict(zip(("k_start", "k_end"), cases.bounds(mask, documents, case.lengths), strict=True))
    call = lambda inputs: run(**inputs, **bounds, scale=scale, softcap=case.softcap, **options)[0]
    inputs = {name: arrays[name] for name in ("q", "k", "v", "sinks") if name in arrays}

    def both(inputs, d_out):
        out, pull = jax.vjp(call, inputs)
        return {"out": out} | {f"d_{name}": x for name, x in pull(d_out)[0].items()}

    outputs = compiled(both)(inputs, arrays["d_out"])
    return {name: np.asarray(x).astype(np.float64) for name, x in outputs.items()}


def compare(case, mask, documents, dtype=jnp.float32, tol=1e-5, scale=0.3, **options):
    """Compares with the definition in float64, as norms of whole arrays; rows without a key must be zero."""
    got = results(by_name(tokamax_triton.tokamax_triton), case, mask, documents, dtype, scale, **options)
    with jax.enable_x64(True):
        want = results(reference, case, mask, documents, jnp.float64, scale)
    for name, x in want.items():
        error = np.linalg.norm(got[name] - x) / max(np.linalg.norm(x), 1e-3)
        assert error < tol, (name, error)
    start, end = cases.bounds(mask, documents, case.lengths)
    empty = np.asarray(start >= jnp.minimum(end, case.lengths[1]))
    for name in ("out", "d_q"):
        np.testing.assert_array_equal(got[name][empty], 0)


def with_names(static):
    """Two whole tiles of padding, so that the kernels get a mask by name."""
    return {"mask_hint": ops.MaskHint(dataclasses.replace(static, aligned=True)), "tiles": SMALL}


CASES = {
    "packed documents": (cases.Case((4, 2), (24, 16), (37, 37), None, False, None), "causal", "packed"),
    "rows without keys": (cases.Case((3, 1), (16, 24), (37, 37), None, True, None), "both sides", "padded"),
    "a cache and a soft-cap": (cases.Case((4, 2), (24, 16), (18, 35), 2.0, False, None), "window", "packed"),
}
MORE = [
    pytest.param(case, *mask, id=f"{case} {mask}", marks=pytest.mark.full)
    for case in cases.pairwise(FACTORS)
    for mask in some_masks(case, 2)
]


@needs_tokamax
@no_gpu
@pytest.mark.parametrize(
    ("case", "mask", "documents"), [*(pytest.param(*parameters, id=name) for name, parameters in CASES.items()), *MORE]
)
def test_equals_the_definition(case, mask, documents, interpreted):
    """Soft-caps, sinks, grouped heads, unequal widths, lengths that are multiples of no tile, queries after a cache."""
    compare(case, mask, documents, tiles=SMALL)


@needs_tokamax
@no_gpu
@pytest.mark.parametrize("kind", ["causal", pytest.param("full", marks=pytest.mark.full)])
@pytest.mark.parametrize("documents", ["packed", pytest.param("one", marks=pytest.mark.full)])
def test_named_masks_are_their_intervals(kind, documents, interpreted):
    case = cases.Case((2, 1), (16, 16), (256, 256), None, True, None)
    compare(case, kind, documents, **with_names(ops.StaticMask(kind, segmented=documents == "packed")))


def shapes(width=128, T=512, heads=8, dtype=jnp.bfloat16):
    array = lambda heads, width: jax.ShapeDtypeStruct((2, T, heads, width), dtype)
    ends = jax.ShapeDtypeStruct((2, T), jnp.int32)
    return array(heads, width), array(2, width), array(2, min(width, 128) if width == 192 else width), ends, ends


def both(q, k, v, start, end, **options):
    run = lambda *x: ops.attention(*x, k_start=start, k_end=end, **options)
    out, pull = jax.vjp(run, q, k, v)
    return out, *pull(out)


def kernels(run, kind, *arrays, axes=(1,), **mesh) -> int:
    """The number of calls of Triton's kernels in a program for a GPU."""
    place = AbstractMesh(
        axes, ("data",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(kind, None, "gpu")
    )
    run = jax.shard_map(run, mesh=place, **mesh) if mesh else run
    # tokamax's own code broadcasts, and `jax.vmap` traces it again.
    with jax.sharding.use_abstract_mesh(place), jax.numpy_rank_promotion("allow"):
        return jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text().count("__gpu$xla.gpu.triton(")


@needs_tokamax
@no_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_on_ampere_both_passes_are_kernels(dtype):
    assert kernels(both, A100, *shapes(dtype=dtype)) == 2
    assert kernels(functools.partial(both, softcap=30.0), A100, *shapes(dtype=dtype)) == 1  # gradients in XLA
    assert kernels(jax.vmap(both), A100, *(jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes())) == 2
    assert kernels(both, B200, *shapes(256)) == 2  # what tokamax's kernels for Blackwell do not take


@needs_tokamax
@no_gpu
def test_shards_of_the_batch():
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    assert kernels(both, A100, *shapes(), axes=(2,), check_vma=False, **specs) == 2
    assert kernels(both, A100, *shapes(), axes=(2,), check_vma=True, **specs) == 0  # chunked
    with pytest.raises(ValueError, match="pass check_vma=False to jax.shard_map"):
        named = functools.partial(both, implementation="tokamax_triton")
        kernels(named, A100, *shapes(), axes=(2,), check_vma=True, **specs)


@needs_tokamax
@no_gpu
@pytest.mark.skipif(not has_gpu_compiler(), reason="needs jax's plugin for CUDA")
@pytest.mark.parametrize("gpu", ["A100", "L40", "B200"])  # on Hopper they run by name, and heads of 256 spill
@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_they_compile_without_spills(gpu, width):
    """To machine code, in shared memory; a kernel that stores registers in memory does not compile."""
    for hint in (None, PACKED):
        compile_for(gpu, functools.partial(both, implementation="tokamax_triton", mask_hint=hint), *shapes(width))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(table, "is_installed", lambda least=(): True)
    monkeypatch.setattr(table, "has_triton_attention", lambda: True)


def explained(kind, width=128, **options):
    q, k, v, start, end = shapes(width, dtype=options.pop("dtype", jnp.bfloat16))
    return ops.explain_attention(q, k, v, k_start=start, k_end=end, device=("gpu", kind), **options)


@pytest.mark.parametrize(
    ("kind", "width", "chosen"),
    [
        (A100, 128, "tokamax_triton"),
        (A100, 256, "tokamax_triton"),
        ("NVIDIA L40S", 128, "tokamax_triton"),
        ("NVIDIA GeForce RTX 4090", 64, "tokamax_triton"),
        (B200, 192, "tokamax"),
        ("NVIDIA GB300", 128, "tokamax"),
        (B200, 256, "tokamax_triton"),
        (A100, 512, "chunked"),
        ("NVIDIA H100 80GB HBM3", 256, "mosaic_gpu"),
        ("Tesla T4", 128, "chunked"),
    ],
)
def test_gpus_without_maxlibs_kernels_get_them(kind, width, chosen, installed):
    assert explained(kind, width).chosen == chosen


def test_sinks_in_packed_rows_are_theirs(installed):
    sinks = jax.ShapeDtypeStruct((8,), jnp.float32)
    for kind in (A100, B200):
        assert explained(kind, mask_hint=PACKED, sinks=sinks).chosen == "tokamax_triton"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(dtype=jnp.float32), "bfloat16 or float16, not in float32"),
        (dict(width=512), "at most 256, what fits into registers, not 512"),
        (dict(bias=jax.ShapeDtypeStruct((1, 1, 512, 512), jnp.bfloat16)), "lacks bias"),
        (dict(return_lse=True), "lacks lse"),
        (dict(kind="Tesla T4"), "since Ampere, not for Tesla T4"),
    ],
    ids=str,
)
def test_what_they_cannot_run_is_explained(options, reason, installed):
    assert reason in explained(**{"kind": A100} | options).refused["tokamax_triton"]


def test_where_tokamax_is_not_installed_the_reason_says_how(monkeypatch):
    monkeypatch.setattr(table, "is_installed", lambda least=(): not least)
    monkeypatch.setattr(table, "has_triton_attention", lambda: False)
    for kind, name in ((A100, "tokamax_triton"), (B200, "tokamax")):
        choice = explained(kind)
        assert choice.chosen == "chunked"
        assert "needs tokamax 0.0.17: pip install 'maxlib[cuda]' on Python 3.12 or later" in choice.refused[name]


def test_tiles_fit_the_devices():
    assert triton_tiles(256, 256, A100).forward.streams == 2 * triton_tiles(256, 256, "NVIDIA L40S").forward.streams
    with pytest.raises(ValueError, match="must be powers of two, got 48"):
        TritonAttentionTile(stays=48)
    with pytest.raises(ValueError, match="streams must be a multiple of 32"):
        TritonAttentionTiles(backward=TritonAttentionTile(32, 16))


@pytest.mark.gpu
@needs_tokamax
@pytest.mark.skipif(on_a_gpu and not is_ampere_or_later(jax.devices()[0].device_kind), reason="needs Ampere or later")
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize(("mask", "documents"), [("causal", "packed"), ("both sides", "padded")])
def test_on_a_gpu_they_equal_the_definition(widths, softcap, mask, documents):
    case = cases.Case((4, 2), widths, (300, 300), softcap, True, None)
    tiles = triton_tiles(max(widths), min(widths), jax.devices()[0].device_kind)
    # With the scale of models: sharper weights make up to 0.0215 by rounding alone, in the interpreter.
    compare(case, mask, documents, jnp.bfloat16, 0.02, widths[0] ** -0.5, tiles=tiles)
