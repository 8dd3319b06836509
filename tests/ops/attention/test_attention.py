"""Every implementation against the reference, and general properties of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.ops import attention, attention_implementations
from maxlib.ops._attention.chunked import ChunkedTiles, chunked
from maxlib.ops._attention.split_kv import SplitTiles, split_kv
from tests.ops.attention import cases
from tests.ops.attention.kernels import by_name, reference

# The others have tests of their own.
EVERYWHERE = [kernel for kernel in attention_implementations() if kernel.platforms is None]
# Blocks smaller than the test's sequences, so that there are many tiles, and partial ones at every edge.
RUNS = {
    **{kernel.name: by_name(kernel.run) for kernel in EVERYWHERE if kernel.name != "reference"},
    "chunked 8x16": by_name(chunked, tiles=ChunkedTiles(8, 16)),
    "chunked 16x8": by_name(chunked, tiles=ChunkedTiles(16, 8)),
    "split_kv 16/4": by_name(split_kv, tiles=SplitTiles(16, 4)),  # chosen on GPUs and TPUs only
}
NAMES = [kernel.name for kernel in EVERYWHERE]
KERNELS = [name for name in NAMES if name != "reference"]
QUICKLY = {"xla_backend_optimization_level": "0"}  # compiling is what takes the time here


def everything(run, case):
    """A compiled function of (arrays, bounds) to output, log-sum-exp and the gradients of all that is there."""

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def results(arrays, start, end):
        inputs = {name: arrays[name] for name in ("q", "k", "v", "sinks", "bias") if arrays[name] is not None}
        call = lambda x: run(**x, k_start=start, k_end=end, scale=0.7, softcap=case.softcap)
        (out, lse), vjp = jax.vjp(call, inputs)
        return out, lse, vjp((arrays["d_out"], arrays["d_lse"].astype(lse.dtype)))[0]

    return results


def close(got, want, tol=1e-11):
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol, err_msg=jax.tree_util.keystr(path))


def check(name, case):
    inputs, ours, truth = cases.arrays(case), everything(RUNS[name], case), everything(reference, case)
    for start, end in cases.all_bounds(case.lengths).values():
        close(ours(inputs, start, end), truth(inputs, start, end))


# By default every value of every feature, else every pair of values.
EACH = [
    cases.Case((4, 4), (8, 8), (37, 37), None, False, None),
    cases.Case((4, 2), (6, 4), (1, 33), 2.0, True, (True, False)),
    cases.Case((3, 1), (4, 6), (18, 35), None, True, (False, True)),
]
PAIRS = [pytest.param(case, marks=pytest.mark.full) for case in cases.pairwise() if case not in EACH]


@pytest.mark.parametrize("case", [*EACH, *PAIRS], ids=str)
def test_equals_the_reference(case, float64):
    check("chunked 8x16", case)


@pytest.mark.parametrize("name", ["chunked", "split_kv 16/4", pytest.param("chunked 16x8", marks=pytest.mark.full)])
def test_every_implementation_equals_the_reference(name, float64):
    bias = None if name.startswith("split_kv") else (True, True)
    check(name, cases.Case((4, 2), (8, 6), (37, 37), 2.0, True, bias))


# ------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    "dtype",
    [jnp.bfloat16, *(pytest.param(dtype, marks=pytest.mark.full) for dtype in (jnp.float32, jnp.float16))],
    ids=lambda dtype: dtype.__name__,
)
def test_low_precision_is_as_good_as_the_dtype(dtype):
    case = cases.Case((4, 2), (32, 32), (150, 150), None, True, None)
    low = cases.arrays(case, dtype)
    low["q"] = low["q"] / 4  # logits near 1, as in a model
    start, end = cases.bounds("causal", "padded", case.lengths)
    got = everything(by_name(chunked), case)(low, start, end)
    want = everything(reference, case)(jax.tree.map(lambda x: x.astype(jnp.float32), low), start, end)
    assert got[0].dtype == dtype
    assert got[1].dtype == jnp.float32
    assert all(x.dtype == dtype for x in jax.tree.leaves(got[2]))
    finite = lambda x: np.where(np.isfinite(x), x, 0.0)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        with np.errstate(invalid="ignore"):  # minus infinity less itself
            error = np.linalg.norm(finite(np.asarray(x, np.float32) - y)) / np.linalg.norm(finite(y))
        assert error < 4 * jnp.finfo(dtype).eps


def test_keys_and_values_of_another_dtype_are_read_in_the_queries_dtype():
    inputs = cases.arrays(cases.Case((4, 2), (8, 8), (1, 33), None, False, None), jnp.float32)
    k, v = inputs["k"].astype(jnp.bfloat16), inputs["v"].astype(jnp.bfloat16)
    for name in NAMES:
        mixed = run(inputs["q"], k, v, implementation=name)
        assert mixed.dtype == jnp.float32
        close(mixed, run(inputs["q"], k.astype(jnp.float32), v.astype(jnp.float32), implementation=name), 1e-5)


# ------------------------------------------------------------------------------------------------ invariances

run = jax.jit(attention, static_argnames=("implementation", "return_lse"), compiler_options=QUICKLY)
PLAIN = cases.Case((4, 2), (8, 8), (37, 37), None, False, None)


@pytest.fixture
def qkv(float64):
    inputs = cases.arrays(PLAIN)
    return [inputs[name] for name in ("q", "k", "v")]


@pytest.mark.parametrize("name", NAMES)
def test_a_sink_of_minus_infinity_is_none(name, qkv):
    start, end = cases.bounds("causal", "padded", PLAIN.lengths)

    @jax.jit
    def results(sinks):
        def call(sinks, *x):
            return attention(*x, k_start=start, k_end=end, sinks=sinks, implementation=name, return_lse=True)

        (out, lse), vjp = jax.vjp(call, sinks, *qkv)
        of_sinks, *others = vjp((jnp.ones_like(out), jnp.ones_like(lse)))
        return (out, lse, others), of_sinks

    (with_sink, gradient), (without, _) = results(jnp.full(4, -jnp.inf)), results(None)
    close(with_sink, without)
    np.testing.assert_array_equal(gradient, np.zeros(4))


@pytest.mark.parametrize("name", NAMES)
def test_empty_rows_give_zeros_and_no_gradient(name, qkv):
    start, end = cases.bounds("causal", "padded", PLAIN.lengths)
    empty = np.asarray(start >= end)

    @jax.jit
    def results(*qkv):
        call = lambda *x: attention(*x, k_start=start, k_end=end, implementation=name, return_lse=True)
        (out, lse), vjp = jax.vjp(call, *qkv)
        # An infinite cotangent of an infinite log-sum-exp is what naive code downstream produces.
        return out, lse, vjp((jnp.ones_like(out), jnp.where(lse == -jnp.inf, jnp.inf, 1.0)))

    out, lse, (dq, dk, dv) = results(*qkv)
    assert empty.any()
    assert (np.asarray(out)[empty] == 0).all()
    assert (np.asarray(lse)[empty] == -np.inf).all()
    if name != "reference":  # there, autodiff multiplies the infinity by zero
        assert (np.asarray(dq)[empty] == 0).all()
        assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("name", KERNELS)
def test_packed_is_separate(name, qkv):
    start, end = cases.bounds("causal", "packed", PLAIN.lengths)
    packed = run(*qkv, k_start=start, k_end=end, implementation=name)
    for first, last in [(0, 12), (12, 37)]:
        alone = [x[:1, first:last] for x in qkv]
        causal = jnp.arange(1, last - first + 1)[None]
        close(packed[:1, first:last], run(*alone, k_end=causal, implementation=name))


def test_the_scale_is_that_of_the_key_width_unless_given(qkv):
    @jax.jit
    def results(q, k, v):
        by_default, explicit = attention(q, k, v), attention(q, k, v, scale=8**-0.5)
        return (by_default, explicit), (attention(2 * q, k, v, scale=0.3), attention(q, k, v, scale=0.6))

    for default, other in results(*qkv):
        close(default, other)


@pytest.mark.parametrize("name", KERNELS)
def test_decoding_equals_the_last_row(name, qkv):
    q, k, v = qkv
    start, end = cases.bounds("window", "packed", PLAIN.lengths)
    all_rows = run(q, k, v, k_start=start, k_end=end, implementation=name)
    cache = [jnp.pad(x, ((0, 0), (0, 500), (0, 0), (0, 0))) for x in (k, v)]
    token = run(q[:, -1:], *cache, k_start=start[:, -1:], k_end=end[:, -1:], implementation=name)
    close(token, all_rows[:, -1:])


@pytest.mark.parametrize("name", NAMES)
def test_a_width_in_place_of_values_takes_the_first_channels_of_the_keys(name):
    """In values and gradients; keys get the gradients of both."""
    inputs = cases.arrays(cases.Case((4, 1), (8, 6), (18, 35), None, False, None))
    start, end = cases.bounds("causal", "padded", (18, 35))
    run = functools.partial(attention, implementation=name, k_start=start, k_end=end)

    def results(q, k, d_out, values):
        out, pull = jax.vjp(lambda q, k: run(q, k, values(k)), q, k)
        return out, pull(d_out)

    inputs = inputs["q"], inputs["k"], inputs["d_out"]
    both = lambda values: jax.jit(functools.partial(results, values=values), compiler_options=QUICKLY)(*inputs)
    close(both(lambda k: 6), both(lambda k: k[..., :6]))


@pytest.mark.parametrize("width", [0, 9])
def test_a_width_that_keys_do_not_have_is_an_error(width):
    with pytest.raises(ValueError, match=f"v must be values, or their width, from 1 to Hk=8, got {width}"):
        attention(jnp.ones((1, 2, 3, 8)), jnp.ones((1, 5, 1, 8)), width)
