"""JAX's splash attention under maxlib's masks: run by Pallas's interpreter, and lowered for TPUs (both without one)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from maxlib import nn, ops, sharding
from maxlib.ops._attention import splash
from maxlib.ops._attention.table import ATTENTION, FEATURES
from maxlib.ops._dispatch import Kernel
from tests.ops.attention import cases
from tests.ops.attention.kernels import by_name, check, reference

# Many blocks in a small test, and partial ones at every edge. Fused: a block computed at once, and in two halves.
SMALL = splash.SplashTiles(*[splash.SplashBlock(128, 128, 128)] * 3)
FUSED = splash.SplashTiles(splash.SplashBlock(128, 128, 128), None, splash.SplashBlock(128, 128, 128))
HALVES = splash.SplashTiles(splash.SplashBlock(128, 256, 128), None, splash.SplashBlock(128, 256, 128))
KNOWN = [name for name, mask in cases.MASKS.items() if mask.static is not None and name != "both sides"]
CASES = [
    cases.Case((4, 2), (64, 64), (200, 330), 2.0, True, None),
    cases.Case((3, 1), (80, 80), (137, 137), None, False, None),
    cases.Case((2, 2), (192, 128), (1, 33), None, True, None),
]


def known(mask: str, documents: str, T: int, S: int) -> ops.MaskHint:
    """Returns `nn.Context.mask_hint` for these tokens."""
    spec, rows = cases.MASKS[mask], T == S and documents != "padded"
    segmented = spec.static.segmented or documents != "one"
    ids = [spec.segments(cases.tokens(documents, length, S)) for length in (T, S)]
    static = ops.StaticMask(spec.static.kind, spec.static.window, segmented, aligned=rows)
    return ops.MaskHint(static, tuple(ids) if segmented else None)


def test_all_masks_but_two_are_known():
    assert KNOWN == ["full", "causal", "window", "chunk", "prefix", "blocks"]
    assert cases.MASKS["spans"].static is None and (ops.Prefix(3) | ops.BidirectionalBlocks()).static is None


# By default each kernel once.
SOME = [(CASES[0], SMALL, "packed", ("window",)), (CASES[1], FUSED, "padded", ("chunk",))]
PRODUCT = [
    pytest.param(case, tiles, documents, tuple(KNOWN), marks=pytest.mark.full)
    for case, *kernels in zip(CASES, [SMALL] * 3, (HALVES, FUSED, FUSED), strict=True)
    for tiles in kernels
    for documents in cases.DOCUMENTS
]


@pytest.mark.parametrize(("case", "tiles", "documents", "masks"), [*SOME, *PRODUCT], ids=str)
def test_the_kernels_equal_the_reference(case, tiles, documents, masks):
    for mask in masks:
        about = known(mask, documents, *case.lengths)
        run = functools.partial(by_name(splash.splash), mask_hint=about, tiles=tiles, interpret=True)
        check(run, case, [(mask, documents)], jnp.float32, 1e-5)


@pytest.mark.parametrize(
    ("name", "gradients"),
    [("window", False), *(pytest.param(name, True, marks=pytest.mark.full) for name in ("window", "causal"))],
)
def test_in_a_ring_the_parts_of_the_keys_are_masked_too(name, gradients, monkeypatch):
    """Two devices with two pieces each, in zigzag order, and packed documents: bounds lie outside of a piece's keys."""
    run = functools.partial(splash.splash, tiles=SMALL, interpret=True)
    small = Kernel("small", run, "for tests", features=frozenset(FEATURES), takes_mask_hint=True)
    monkeypatch.setitem(vars(ATTENTION), "kernels", (*ATTENTION.kernels, small))
    T, case = 260, cases.Case((2, 1), (16, 16), (260, 260), None, False, None)
    start, end = cases.bounds(name, "packed", (T, T))
    ids, about = cases.tokens("packed", T, T).start, known(name, "packed", T, T)
    inputs = cases.arrays(case, jnp.float32)
    q, k, v = (inputs[name] for name in "qkv")
    turn = lambda x: sharding.layers.zigzag(x, "batch", "seq", *[None] * (x.ndim - 2))
    back = lambda x: sharding.layers.unzigzag(x, "batch", "seq", *[None] * (x.ndim - 2))
    layout = sharding.Layout(sharding.make_mesh(context=2, devices=jax.devices()[:2]), sharding.DP | sharding.CP_RING)

    def ring(q, k, v):
        q, k, v, *rest = (turn(x) for x in (q, k, v, start, end, ids))
        out = nn.attend(
            q,
            k,
            v,
            *rest[:2],
            scale=0.25,
            mask_hint=ops.MaskHint(about.static, (rest[2], rest[2])),
            implementation="small",
            zigzag=True,
        )
        return back(out)

    pulled = lambda y, pull: (y, *pull(inputs["d_out"]))
    both = lambda run: jax.jit(lambda *x: pulled(*jax.vjp(run, *x)) if gradients else (run(*x),))
    with sharding.use(layout):
        got = both(ring)(q, k, v)
    want = both(lambda q, k, v: reference(q, k, v, k_start=start, k_end=end, scale=0.25)[0])(q, k, v)
    for x, y in zip(got, want, strict=True):
        assert np.linalg.norm(x - y) < 1e-5 * np.linalg.norm(y)


def test_a_window_lists_only_its_blocks():
    T = 1024
    mask, block = ops.StaticMask("causal", 200, aligned=True), splash.SplashBlock(128, 256)
    index = np.arange(T, dtype=np.int32)[None]
    visited = jax.jit(lambda *x: splash._visited(block, *x, T, T, T))(np.maximum(index - 199, 0), index + 1)
    listed = jax.jit(splash._listed, static_argnums=(1, 2))
    for axis, count in ((1, 3), (0, 4)):
        data, run = map(np.asarray, listed(visited, axis, splash._window_width(mask, block, by_keys=axis == 0)))
        assert data.shape[1 + axis] == count and int(run.sum()) == int(visited.sum())
        where = np.argwhere(np.asarray(run[0]))
        pairs = {(i, int(data[0, i, j])) if axis == 1 else (int(data[0, i, j]), j) for i, j in where}
        assert pairs == {tuple(map(int, pair)) for pair in np.argwhere(np.asarray(visited))}


def test_blocks_pad_little_and_divide():
    for T, S in ((1, 33), (130, 130), (1300, 4096), (4096, 1300), (131072, 131072)):
        tiles = splash.splash_tiles(T, S, 128, 128)
        for block in filter(None, (tiles.forward, tiles.dq, tiles.dkv)):
            assert block.queries % 128 == block.keys % block.compute == block.compute % 128 == 0
            assert -T % block.queries < 128 * -(-T // 1024) and -S % block.keys < 128 * -(-S // 1024)


@pytest.mark.parametrize(
    ("implementation", "T", "kernels"),
    [(None, 256, ("fwd", "dkv")), ("splash", 256, ("fwd", "dkv")), ("splash", 16384, ("fwd", "dq", "dkv"))],
)
def test_a_tpu_program_calls_the_kernels(implementation, T, kernels):
    q, k = (jax.ShapeDtypeStruct((2, T, heads, 128), jnp.bfloat16) for heads in (4, 2))
    ends = jax.ShapeDtypeStruct((2, T), jnp.int32)
    device = jax.sharding.AbstractDevice("TPU v5p", None, "tpu")

    def both(q, k, v, start, end):
        options = dict(k_start=start, k_end=end, mask_hint=ops.StaticMask("causal", aligned=True))
        run = lambda *x: ops.attention(*x, **options, implementation=implementation).astype(jnp.float32).sum()
        return jax.grad(run, argnums=(0, 1, 2))(q, k, v)

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        text = export.export(jax.jit(both), platforms=["tpu"])(q, k, k, ends, ends).mlir_module()
    for kernel in ("fwd", "dq", "dkv"):
        assert (f"splash_mha_{kernel}" in text) == (kernel in kernels)
    assert text.count("@tpu_custom_call(") == len(kernels)


def test_every_mask_says_the_same_as_its_intervals():
    """`StaticMask` promises what the intervals are: the visible keys by the one are those by the other."""
    for documents in cases.DOCUMENTS:
        for name in KNOWN:
            about, tokens = known(name, documents, 37, 37), cases.tokens(documents, 37, 37)
            start, end = (np.asarray(x)[..., None] for x in cases.bounds(name, documents, (37, 37)))
            key, static, empty = np.arange(37), about.static, start >= end
            seen = key < end
            if static.window is not None:
                seen &= end - key <= static.window
            if static.segmented:
                q_ids, k_ids = about.segment_ids
                seen &= np.asarray(q_ids)[..., None] == np.asarray(k_ids)[:, None]
            np.testing.assert_array_equal(seen & ~empty, (key >= start) & (key < end), err_msg=f"{name} {documents}")
            assert tokens.index.shape == (2, 37)
