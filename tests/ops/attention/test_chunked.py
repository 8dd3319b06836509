"""Guarantees of the blockwise implementation beyond its results: skipped tiles, memory, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from maxlib.ops import attention
from maxlib.ops._attention.chunked import ChunkedTiles, _attend, _attend_bwd, chunked, chunked_tiles
from tests.ops.attention import cases
from tests.ops.attention.kernels import by_name, compiled, reference

T = 48


def visited(mask: str, documents: str, block_q: int, block_k: int):
    """Which tiles the forward and the backward pass touch: those where poisoned values show up in the block's rows."""
    start, end = (x[:1] for x in cases.bounds(mask, documents, (T, T)))
    q, k, v = (jnp.ones((1, T, 1, 4)) for _ in range(3))
    spec = ChunkedTiles(block_q, block_k).spec(q.shape, T, 1.0)
    out, lse = compiled(functools.partial(_attend, spec))(q, k, v, None, start, end)

    @compiled
    def rows(j):
        poisoned = v.at[:, j * block_k + jnp.arange(block_k)].set(jnp.nan)
        args = (q, k, poisoned, None, start, end)
        dq = _attend_bwd(spec, (args, out, lse), (out, lse * 0.0))[0]
        return _attend(spec, *args)[0], dq

    columns = [rows(np.int32(j)) for j in range(T // block_k)]
    touched = lambda x: np.isnan(np.asarray(x)[0, :, 0, 0]).reshape(-1, block_q).any(axis=1)
    return [np.stack([touched(column[i]) for column in columns], axis=1) for i in (0, 1)]


@pytest.mark.parametrize(
    ("mask", "documents"),
    [
        ("window", "packed"),
        *(
            pytest.param(*pair, marks=pytest.mark.full)
            for pair in (("causal", "one"), ("causal", "padded"), ("chunk", "one"))
        ),
    ],
)
def test_both_passes_visit_only_tiles_that_are_seen(mask, documents):
    start, end = (np.asarray(x)[0, :, None] for x in cases.bounds(mask, documents, (T, T)))
    sees = (start <= np.arange(T)) & (np.arange(T) < end)
    needed = sees.reshape(T // 8, 8, T // 6, 6).any(axis=(1, 3))
    assert not needed.all()
    for pass_ in visited(mask, documents, 8, 6):
        np.testing.assert_array_equal(pass_, needed)


def test_decoding_reads_no_further_than_it_sees():
    cache, ones = jnp.ones((1, 4096, 2, 8)).at[:, 512:].set(jnp.nan), np.ones((1, 1, 4, 8), np.float32)
    call = compiled(lambda q, end: attention(q, cache, cache, k_end=end, implementation="chunked"))
    np.testing.assert_array_equal(call(ones, np.array([[300]])), ones)


# ------------------------------------------------------------------------------------------------ memory


def temporaries(run, length: int) -> int:
    """Bytes that forward and backward need besides arguments and results."""
    x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    ends = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def gradients(q, k, v, start, end):
        return jax.grad(lambda *x: run(*x, k_start=start, k_end=end, scale=1.0)[0].sum(), argnums=(0, 1, 2))(q, k, v)

    analysis = jax.jit(gradients).lower(x, x, x, ends, ends).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_memory_is_linear_in_the_length():
    short, long = temporaries(by_name(chunked), 4096), temporaries(by_name(chunked), 8192)
    assert long < 2.2 * short
    assert long < temporaries(reference, 8192) / 8


def test_many_heads_and_rows_share_no_tile():
    for shape in [(64, 4096, 32, 128), (6, 1000, 12, 64), (1, 1, 8, 64), (1, 129, 1, 8)]:
        _, T, N, _ = shape
        spec = chunked_tiles(T, N, T).spec(shape, T, 1.0)
        assert shape[0] % spec.rows == 0
        assert spec.rows == 1 or spec.rows * shape[2] * spec.block_q * spec.block_k <= 2**19


# ------------------------------------------------------------------------------------------------ transformations

CASE = cases.Case((4, 2), (8, 8), (37, 37), 2.0, True, (False, True))
RUNS = [reference, by_name(chunked, tiles=ChunkedTiles(16, 16))]


@pytest.fixture
def inputs(float64):
    arrays = cases.arrays(CASE, batch=8)
    bounds = tuple(jnp.tile(x, (4, 1)) for x in cases.bounds("window", "padded", CASE.lengths))
    return [arrays[name] for name in ("q", "k", "v", "sinks", "bias")], bounds


def both(make):
    """Compares the results of `make` with the blockwise implementation and with the reference."""
    results = compiled(lambda: [make(run) for run in RUNS])()
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11)


def scalar(run, q, k, v, sinks, bias, start, end):
    out, lse = run(q, k, v, sinks=sinks, bias=bias, k_start=start, k_end=end, scale=0.5, softcap=2.0)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))


def test_remat_can_save_the_results_by_name(inputs):
    """With both saved, the forward pass is not run again: its two matmuls run once, and the backward pass has five,
    and on CPUs a sum of products, `d_out * out`, that runs as a matmul.
    """
    (q, k, v, _, _), (start, end) = inputs

    def matmuls(policy):
        call = jax.checkpoint(
            lambda q: by_name(chunked)(q, k, v, k_start=start, k_end=end, scale=1.0)[0].sum(), policy=policy
        )
        return str(jax.make_jaxpr(jax.value_and_grad(call))(q)).count("dot_general[")

    assert matmuls(checkpoint_policies.save_only_these_names("attention_out", "attention_lse")) == 2 + 5 + 1
    assert matmuls(None) == 2 + 2 + 5 + 1


@pytest.mark.parametrize(
    ("kv_heads", "check_vma"),
    [(None, True)]
    + [pytest.param(*pair, marks=pytest.mark.full) for pair in (("heads", True), ("heads", False), (None, False))],
)
def test_shard_map_over_batch_and_heads(kv_heads, check_vma, inputs):
    """Sinks and bias are replicated over the batch (keys over heads, too, if asked): their gradients are summed."""
    (q, k, v, sinks, bias), bounds = inputs
    k, v = (x if kv_heads else x[:, :, :1] for x in (k, v))
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), axis_types=(AxisType.Auto,) * 2)
    rows, keys = P("batch", None, "heads"), P("batch", None, kv_heads)
    specs = (rows, keys, keys, P("heads"), P(None, "heads"), P("batch"), P("batch"))

    def sharded(q, k, v, sinks, bias, start, end):
        kernel = lambda q, k, v, sinks, bias, start, end: RUNS[1](
            q, k, v, sinks=sinks, bias=bias, k_start=start, k_end=end, scale=0.5, softcap=2.0
        )
        kernel = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=(rows, rows), check_vma=check_vma)
        out, lse = kernel(q, k, v, sinks, bias, start, end)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    value = {reference: functools.partial(scalar, reference), RUNS[1]: sharded}
    both(lambda run: jax.value_and_grad(value[run], argnums=(0, 1, 2, 3, 4))(q, k, v, sinks, bias, *bounds))
