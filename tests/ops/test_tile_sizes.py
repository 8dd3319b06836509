"""Tile sizes: each kernel runs with those of the code around it, or its own, and jit knows which."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import ops
from maxlib.kernels.attention.mosaic_gpu import config as hopper
from maxlib.kernels.grouped_matmul.megablox_tiles import Matmuls, Tiles
from maxlib.kernels.grouped_matmul.mosaic_gpu import config as grouped
from maxlib.ops import tiles
from maxlib.ops._attention import api
from maxlib.ops._attention.splash import SplashBlock

HOPPER = hopper.attention_tiles(128, 128, False)
MEGABLOX = Matmuls.of(4096, (8, 512, 256), "EOI", 2, 4).tiles()
SPLASH = tiles.SplashTiles(SplashBlock(512, 512), None, SplashBlock(512, 1024))
EVERY = [
    HOPPER,
    hopper.attention_tiles(256, 256, True),
    hopper.latent_tiles(320),
    SPLASH,
    tiles.ChunkedTiles(128, 256),
    tiles.SplitTiles(),
    MEGABLOX,
    grouped.grouped_tiles(4096, 2048),
    tiles.TritonTiles(),
    tiles.TritonAttentionTiles(),
    tiles.TiledTiles((64, 16)),
    tiles.DeltaTiles(),
    tiles.KimiTiles(),
    tiles.SSDTiles(),
    tiles.MosaicTpuTiles(),
]
named = lambda sizes: type(sizes).__name__ if isinstance(sizes, tiles.TileSizes) else str(sizes)[:40]
Q = np.random.default_rng(0).normal(size=(1, 64, 2, 16)).astype(np.float32)


def test_there_is_one_hashable_class_for_each_kernel():
    kinds = {type(sizes) for sizes in EVERY}
    assert kinds == {getattr(tiles, name) for name in tiles.__all__} - {tiles.TileSizes}
    assert len({kind.kernel for kind in kinds}) == len(kinds)
    assert all(hash(sizes) == hash(dataclasses.replace(sizes)) for sizes in EVERY)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SplashBlock(100, 128), "queries must be a multiple of 128 of at least 128, got 100"),
        (lambda: SplashBlock(128, 0), "keys must be a multiple of 128"),
        (lambda: tiles.ChunkedTiles(16, -1), "keys must be a whole number of at least 1, got -1"),
        (lambda: hopper.Tiles(4, 128), "warpgroups must be at most 3, whose registers fit, got 4"),
        (lambda: hopper.Tiles(2, 128, 1), "stages must be a whole number of at least 2, got 1"),
        (lambda: dataclasses.replace(HOPPER, decode=hopper.Tiles(2, 128)), "decode must have 1 warpgroup, got 2"),
        (lambda: dataclasses.replace(HOPPER, dq=hopper.Tiles(3, 64)), "dq must take a divisor of 128 .* got 192"),
        (lambda: grouped.Tiles(512), "columns must be at most 256"),
        (lambda: dataclasses.replace(grouped.grouped_tiles(64, 64), glu=grouped.Tiles(256)), "at most 128 columns"),
        (lambda: tiles.TiledTiles((16, 64)), "sizes must fall"),
        (lambda: tiles.DeltaTiles(chunk=48), "chunk must be a power of two, got 48"),
        (lambda: tiles.KimiTiles(chunk=48), "chunk must be a power of two, got 48"),
    ],
)
def test_an_error_says_what_must_hold(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Tiles(128, 100, 512), "summed must be a multiple of 128, or all 256, got 100"),
        (Tiles(2**16, 256, 512), "must fit in 16,777,216 bytes"),
    ],
)
def test_tiles_must_fit_the_matmul(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MEGABLOX, forward=change).fit(Matmuls.of(4096, (8, 512, 256), "EOI", 2, 4))


def test_sizes_in_code_are_part_of_jits_key():
    """The same compiled function runs with others inside; a plain global would be read once."""
    seen = []

    @jax.jit
    def run(q):
        seen.append(ops.explain_attention(q, q, q).tiles)
        return ops.attention(q, q, q)

    want = run(Q)
    with ops.tile_sizes(tiles.ChunkedTiles(16, 32)):
        got = run(Q)
        with ops.tile_sizes(tiles.ChunkedTiles(8, 8), tiles.SplitTiles(32, 8)):
            run(Q)
        run(Q)
    run(Q)
    assert [sizes.queries for sizes in seen] == [64, 16, 8]
    np.testing.assert_allclose(got, want, atol=1e-6)


def draw(*shapes):
    random = np.random.default_rng(0)
    return [0.5 * random.normal(size=shape).astype(np.float32) for shape in shapes]


def delta(q, k, v, rates):
    return ops.gated_delta_rule(q, k, v, -jax.nn.softplus(rates), jax.nn.sigmoid(rates), implementation="chunked")[0]


def kimi(q, k, v, rates, steps):
    rates, steps = -jax.nn.softplus(rates), jax.nn.sigmoid(steps)
    return ops.gated_delta_rule(q, k, v, rates, steps, implementation="chunked")[0]


def ssd(x, dt, a, b):
    return ops.ssd(x, jax.nn.softplus(dt), -jnp.exp(a), b, b)[0]


CALLS = {
    tiles.TiledTiles((32, 8)): (lambda *x: ops.grouped_matmul(*x, jnp.array([30, 50])), draw((90, 8), (2, 4, 8))),
    tiles.ChunkedTiles(16, 32, 64): (lambda *x: ops.attention(*x), draw(*[(2, 60, 2, 16)] * 3)),
    tiles.SplitTiles(32, 8): (
        lambda *x: ops.attention(*x, implementation="split_kv"),
        draw((1, 2, 2, 16), *[(1, 60, 2, 16)] * 2),
    ),
    tiles.DeltaTiles(16, 32): (delta, draw(*[(1, 70, 2, 16)] * 3, (1, 70, 2))),
    tiles.DeltaTiles(128, 128): (delta, draw(*[(1, 300, 2, 16)] * 3, (1, 300, 2))),
    tiles.KimiTiles(16, 32): (kimi, draw(*[(1, 70, 2, 16)] * 4, (1, 70, 2))),
    tiles.KimiTiles(64, 64): (kimi, draw(*[(1, 150, 2, 16)] * 4, (1, 150, 2))),
    tiles.SSDTiles(16, 32): (ssd, draw((1, 70, 2, 16), (1, 70, 2), (2,), (1, 70, 1, 8))),
    tiles.SSDTiles(128, 128): (ssd, draw((1, 300, 2, 16), (1, 300, 2), (2,), (1, 300, 1, 8))),
}


# By default the first of each kernel, and of recurrences, which are alike, one; larger tiles take the same path.
ALIKE = tiles.DeltaTiles, tiles.KimiTiles
FIRST = {type(sizes): sizes for sizes in reversed(CALLS) if not isinstance(sizes, ALIKE)}.values()
MARKED = [pytest.param(sizes, marks=() if sizes in FIRST else pytest.mark.full) for sizes in CALLS]


@pytest.mark.parametrize("sizes", MARKED, ids=named)
def test_every_kernel_takes_its_sizes_and_gives_the_same_numbers(sizes, monkeypatch):
    run, inputs = CALLS[sizes]
    if isinstance(sizes, tiles.SplitTiles):  # it is refused on a CPU, where it runs as well
        monkeypatch.setattr(api, "current_device", lambda: ("gpu", "NVIDIA L40S"))
    both = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(run(*x))), tuple(range(len(inputs)))))
    want, text = both(*inputs), str(jax.make_jaxpr(both)(*inputs))
    with ops.tile_sizes(sizes):
        got, other = both(*inputs), str(jax.make_jaxpr(both)(*inputs))
    assert text != other
    error = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert max(jax.tree.leaves(jax.tree.map(error, got, want))) < 1e-4  # the gradient of rates is a sum that cancels


def test_explanations_print_the_sizes():
    rows, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 256), (8, 512, 256)))
    device = ("tpu", "TPU v5p")
    assert f"tiles: {MEGABLOX}" in str(ops.explain_grouped_matmul(rows, weights, device=device))
    q = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    with ops.tile_sizes(SPLASH):
        assert f"tiles: {SPLASH}" in str(ops.explain_attention(q, q, q, device=device))
    assert "SSDTiles(chunk=128, block=128)" in str(ops.explain_ssd(q, q, device=device))
    assert "SSDTiles(chunk=64, block=256)" in str(ops.explain_ssd(q, q, device=("cpu", "cpu")))
    assert ops.explain_attention(q, q, q, device=("gpu", "NVIDIA H200")).tiles is None  # cuDNN has its own


def test_tile_sizes_takes_whole_kernels_once():
    with pytest.raises(TypeError, match="takes sizes of whole kernels"), ops.tile_sizes(SPLASH.forward):
        pass
    with pytest.raises(ValueError, match="one size for each kernel"), ops.tile_sizes(SPLASH, SPLASH):
        pass
