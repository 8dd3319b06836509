"""The TPU kernels: run by Pallas's interpreter, compiled for TPUs (both without one), and run where there is one."""

import functools
import importlib.util
import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from maxlib.kernels.attention.mosaic_tpu import config, mosaic_tpu, visits
from maxlib.kernels.attention.tiles import tiles
from maxlib.observability import forward_flops
from maxlib.ops._attention import explain_attention
from tests.ops.attention import cases
from tests.ops.attention.kernels import MASKS, check, some_masks, values

FACTORS = {
    "heads": [(4, 2), (2, 2), (3, 1)],
    "widths": [(64, 64), (128, 128), (192, 128), (80, 80), (64, 128)],
    "lengths": [(200, 330), (1, 33), (137, 137)],  # multiples of no tile
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "bias": [None],
}
MAX_QUERIES = [
    cases.Case((4, 2), (64, 64), (200, 330), 2.0, True, None),
    cases.Case((3, 1), (80, 80), (137, 137), None, False, None),
    cases.Case((2, 2), (192, 128), (1, 33), None, True, None),
]
DECODING = [
    cases.Case((6, 2), (64, 32), (3, 330), 2.0, True, None),
    cases.Case((3, 1), (96, 64), (1, 33), None, False, None),
]
SMALL = config.Blocks(rows=128, keys=128)  # many tiles in a small test, and partial ones at every edge
CHIP = config.Generation(SMALL, SMALL, vmem=2**24, cores=2)
on_a_tpu = jax.default_backend() == "tpu"
tpu = pytest.mark.tpu
no_tpu = pytest.mark.skipif(on_a_tpu, reason="is for machines without one")
small = functools.partial(mosaic_tpu, chip=CHIP)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(config, "decode_keys", lambda *sizes: 32)


# ------------------------------------------------------------------------------------------------ on a CPU


@no_tpu
@pytest.mark.parametrize(
    ("case", "count"),
    [(MAX_QUERIES[0], 1), *(pytest.param(case, 2, marks=pytest.mark.full) for case in MAX_QUERIES)],
    ids=str,
)
def test_the_kernels_equal_the_reference(case, count, interpreted):
    check(small, case, some_masks(case, count), jnp.float32, 1e-5)


@no_tpu
@pytest.mark.full
def test_every_mask(interpreted):
    check(small, MAX_QUERIES[0], MASKS, jnp.float32, 1e-5)


@no_tpu
@pytest.mark.full
@pytest.mark.parametrize("case", cases.pairwise(FACTORS), ids=str)
def test_the_kernels_equal_the_reference_pairwise(case, interpreted):
    check(small, case, some_masks(case, 5), jnp.float32, 1e-5)


@no_tpu
@pytest.mark.parametrize(
    ("case", "masks"),
    [(DECODING[0], MASKS[4:5]), *(pytest.param(case, MASKS, marks=pytest.mark.full) for case in DECODING)],
    ids=str,
)
def test_decoding_equals_the_reference(case, masks, interpreted):
    check(small, case, masks, jnp.float32, 1e-5, results=values)


@no_tpu
@pytest.mark.full
def test_low_precision(interpreted):
    case = cases.Case((4, 2), (64, 64), (137, 137), None, True, None)
    check(small, case, MASKS[3:6], jnp.bfloat16, 4 * jnp.finfo(jnp.bfloat16).eps)


@no_tpu
@pytest.mark.full
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_any_scale(scale, interpreted):
    check(small, cases.Case((2, 1), (64, 64), (60, 60), None, False, None), MASKS[3:4], jnp.float32, 1e-5, scale)


# ------------------------------------------------------------------------------------------------ compiled for TPUs


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("topology", ["v5e", "v5p", "v6e"])
def test_every_kernel_compiles_within_its_memory(topology):
    done = subprocess.run([sys.executable, "-m", "tests.ops.tpu", topology], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


# ------------------------------------------------------------------------------------------------ tables and blocks


@pytest.mark.parametrize(("T", "S"), [(256, 512), (2, 700), pytest.param(512, 512, marks=pytest.mark.full)])
def test_kernels_tell_the_compiler_what_they_compute_under_a_causal_mask(T, S):
    B, N, K, Hk, Hv = 2, 4, 2, 48, 32
    q, k, v = (jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in ((B, T, N, Hk), (B, S, K, Hk), (B, S, K, Hv)))
    end = np.broadcast_to((np.arange(T, dtype=np.int32) + 1) * S // T, (B, T))
    attend = lambda *x: small(*x, k_start=jnp.zeros_like(end), k_end=jnp.asarray(end), scale=1.0)[0]
    if T <= 16:  # decoding: every row meets all key heads of a full cache
        assert forward_flops(attend, q, k, v) == B * 2 * (T * N) * (S * K) * (Hk + Hv)
        return
    cut = CHIP.forward
    groups, rows = N // K, config.queries(cut, N // K, T)
    padded = np.pad(end, ((0, 0), (0, -T % rows)), mode="edge")
    visited, _ = tiles(jnp.zeros_like(padded), jnp.asarray(padded), S + -S % cut.keys, rows, cut.keys)
    pairs = int(visited.sum()) * K * groups * rows * cut.keys
    assert forward_flops(attend, q, k, v) == 2 * pairs * (Hk + Hv)
    both = jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))
    assert forward_flops(both, q, k, v) == 2 * pairs * ((Hk + Hv) + (2 * Hk + Hv) + (2 * Hk + 2 * Hv))


def test_kernels_tell_the_compiler_what_they_read_and_write():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)
    traced = jax.make_jaxpr(
        lambda q, k, v: small(q, k, v, k_start=jnp.zeros((1, 256), int), k_end=jnp.ones((1, 256), int), scale=1.0)[0]
    )(x, x, x)
    (cost,) = [str(eqn.params["cost_estimate"]) for eqn in kernels_in(traced.jaxpr)]
    block, vector = 128 * 64 * 4, 128 * 4
    # Of each head two blocks of queries, outputs, bounds and log-sum-exps; keys and values of three tiles.
    moved = 2 * (2 * (2 * block + 3 * vector) + 3 * 2 * block)
    assert f"bytes_accessed={moved}" in cost and f"transcendentals={2 * 3 * 128 * 128}" in cost


def kernels_in(jaxpr):
    """The calls of Pallas, wherever they stand."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
            continue
        for part in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(part, "jaxpr"):
                yield from kernels_in(part.jaxpr)


TILES = jax.jit(tiles, static_argnums=(2, 3, 4))
SHARES = jax.jit(visits.shares, static_argnums=1)
TABLE = jax.jit(lambda visited, full: visits.table(visited, full)[1:])


@pytest.mark.parametrize(("mask", "documents"), MASKS[2::5])
def test_a_table_has_every_tile_once_and_says_what_to_do(mask, documents):
    start, end = cases.bounds(mask, documents, (48, 64))
    visited, full = map(np.asarray, TILES(start, end, 64, 8, 16))
    how = visits.Table(row_bits=3, column_bits=2)  # of 6 rows and 4 columns
    for parts in (1, 2):
        shared = SHARES(visited, parts)
        codes, count = TABLE(shared, np.broadcast_to(full[None], shared.shape))
        found = np.zeros((2, 6, 4), int)
        for part in np.asarray(codes)[:, : int(count)]:
            read = [jax.tree.map(int, how.read(code)) for code in part]
            for tile in read:
                found[tile.batch, tile.row, tile.column] += 2 if tile.full else tile.masked
            for row, run in itertools.groupby(
                (t for t in read if t.first or t.last or t.full or t.masked), lambda t: t[:2]
            ):
                run = list(run)
                assert [t.first for t in run] == [1] + [0] * (len(run) - 1), row
                assert [t.last for t in run] == [0] * (len(run) - 1) + [1], row
            assert {t[:2] for t in read if t.last} == set(itertools.product(range(2), range(6)))  # every row is written
        np.testing.assert_array_equal(found, np.where(full & visited, 2, visited))


@pytest.mark.parametrize("kind", config.GENERATIONS)
def test_blocks_fill_registers_and_no_more_than_there_is(kind):
    chip = config.generation(kind)
    for blocks, groups, length in itertools.product(
        (chip.forward, chip.backward), (1, 2, 3, 7, 8, 71, 128), (1, 100, 5000)
    ):
        rows = groups * config.queries(blocks, groups, length)
        assert rows % 16 == 0
        assert rows <= max(2 * blocks.rows, groups * 16)
        assert config.queries(blocks, groups, length) < length + 128
        assert config.keys(blocks, length) % 128 == 0
    assert config.decode_keys(32768, 8, 128) * 8 * 128 * 2 == 2**19


def test_a_window_costs_what_it_covers():
    """The number of visited tiles follows the window, in both passes."""
    T, window, chip = 8192, 1024, config.V5E
    end = np.arange(1, T + 1, dtype=np.int32)[None]
    start = np.maximum(end - window, 0)
    block_q, block_k = config.queries(chip.forward, 4, T), config.keys(chip.forward, T)
    visited, _ = TILES(start, end, T, block_q, block_k)
    count = TABLE(visited[None], visited[None])[1]
    assert count * block_q * block_k < 2.2 * window * T


# ------------------------------------------------------------------------------------------------ dispatch


def explain(length=300, dtype=jnp.bfloat16, device=("tpu", "TPU v5p"), **options):
    q = jax.ShapeDtypeStruct((2, length, 4, 128), dtype)
    return explain_attention(q, q, q, device=device, **options)


def test_tpus_get_these_kernels_by_name():
    """Until a TPU has run them."""
    assert explain(implementation="mosaic_tpu").chosen == "mosaic_tpu"
    assert explain().chosen == "splash"
    assert explain().refused["mosaic_tpu"] == "runs only by name: it has not run on a TPU yet, and splash has"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(device=("gpu", "NVIDIA H200")), "runs on tpu, not on gpu"),
        (dict(dtype=jnp.float16), "takes queries in bfloat16 or float32, not in float16"),
        (dict(bias=jax.ShapeDtypeStruct((1, 1, 300, 300), jnp.bfloat16)), "lacks bias"),
        (dict(length=2**20), "takes at most 131072 tiles, not .* split batch or sequence"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_they_cannot_run_is_explained(change, reason):
    answer = explain(**change)
    assert answer.chosen != "mosaic_tpu"
    assert re.search(reason, answer.refused["mosaic_tpu"])


# ------------------------------------------------------------------------------------------------ on a TPU


@tpu
@pytest.mark.parametrize("case", cases.pairwise(FACTORS), ids=str)
def test_on_a_tpu_the_kernels_equal_the_reference(case):
    check(mosaic_tpu, case, some_masks(case, 3), jnp.bfloat16, 4 * jnp.finfo(jnp.bfloat16).eps)


@tpu
@pytest.mark.parametrize("case", DECODING, ids=str)
def test_on_a_tpu_decoding_equals_the_reference(case):
    check(mosaic_tpu, case, MASKS, jnp.bfloat16, 4 * jnp.finfo(jnp.bfloat16).eps, results=values)
