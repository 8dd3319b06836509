"""The loss against a float64 formula, optax, itself on one device, and its bounds on memory and matmuls."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.ops import (
    CrossEntropy,
    fused_linear_cross_entropy,
    fused_linear_gather_log_probs,
    fused_linear_log_probs,
)
from maxlib.ops._cross_entropy import chunked

B, T, D, V = 3, 7, 8, 29
FIELDS = ("token_loss", "log_prob", "lse")


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, (B, T))
    nothing = rng.random((B, T)) < 0.25
    targets[nothing] = rng.choice([-1, -100], nothing.sum())  # nothing to learn, of both kinds
    hidden, weight = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
    dtypes = dtype, dtype, np.int32, np.float32
    arrays = zip((hidden, weight, targets, rng.random((B, T))), dtypes, strict=True)
    return tuple(jnp.asarray(a.astype(dtype)) for a, dtype in arrays)


def truth(hidden, weight, targets, weights, softcap=None, z_loss=0.0, smoothing=0.0):
    """Results, and gradients of the weighted loss by hidden and weight, from the textbook formulas in float64."""
    h, w = np.asarray(hidden, np.float64).reshape(-1, D), np.asarray(weight, np.float64)
    y, a = np.asarray(targets).reshape(-1), np.asarray(weights, np.float64).reshape(-1)
    valid = y >= 0
    y, a = np.where(valid, y, 0), a * valid
    raw = h @ w.T
    x = raw if softcap is None else softcap * np.tanh(raw / softcap)
    lse = np.log(np.exp(x).sum(1))
    log_p = x - lse[:, None]
    onehot = np.eye(V)[y]
    smooth = (1 - smoothing) * onehot + smoothing / V
    out = {
        "token_loss": (-(smooth * log_p).sum(1) + z_loss * lse**2) * valid,
        "log_prob": (onehot * log_p).sum(1) * valid,
        "lse": lse * valid,
        "correct": (x.argmax(1) == y) & valid,
    }
    p = np.exp(log_p)
    dx = (a * valid)[:, None] * (p - smooth + (2 * z_loss * lse)[:, None] * p)
    dx = dx if softcap is None else dx * (1 - np.tanh(raw / softcap) ** 2)
    return {**out, "loss": (a * out["token_loss"]).sum()}, (dx @ w, dx.T @ h)


def close(got, want, tol):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=tol, atol=tol * max(1.0, np.abs(want).max()))


# Every pair of values of any two features occurs in some row.
PAIRWISE = [
    # softcap, z_loss, smoothing, chunk, dtype, weighted
    (None, 0.01, 0.1, 4, jnp.bfloat16, True),
    (3.0, 0.0, 0.1, 5, jnp.float32, True),
    (3.0, 0.01, 0.0, None, jnp.bfloat16, False),
    (None, 0.0, 0.0, 4, jnp.float32, False),
    (None, 0.01, 0.0, 5, jnp.bfloat16, False),
    (3.0, 0.01, 0.1, 1, jnp.float32, False),
    (None, 0.0, 0.1, None, jnp.float32, True),
    (3.0, 0.0, 0.0, 4, jnp.bfloat16, True),
    (None, 0.0, 0.0, 1, jnp.bfloat16, True),
]


@pytest.mark.parametrize(
    ("softcap", "z_loss", "smoothing", "chunk", "dtype", "weighted"),
    [pytest.param(*row, marks=() if i < 3 else pytest.mark.full) for i, row in enumerate(PAIRWISE)],
)
def test_values_and_gradients(softcap, z_loss, smoothing, chunk, dtype, weighted):
    hidden, weight, targets, weights = inputs(dtype)
    options = {"softcap": softcap, "z_loss": z_loss}
    settings = dict(label_smoothing=smoothing, chunk=chunk, **options)

    def loss(hidden, weight, weights):
        out = fused_linear_cross_entropy(hidden, weight, targets, weights=weights if weighted else None, **settings)
        return out.loss, out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(hidden, weight, weights)
    factors = weights if weighted else jnp.ones_like(weights)
    want, want_grads = truth(hidden, weight, targets, factors, smoothing=smoothing, **options)
    assert out.token_loss.dtype == out.lse.dtype == jnp.float32
    assert out.loss.shape == ()
    for name in ("loss", *FIELDS, "correct"):
        close(getattr(out, name), want[name], 1e-5)
    for got, expected, arg in zip(grads, want_grads, (hidden, weight), strict=False):
        assert got.dtype == arg.dtype
        close(got, expected, 1e-5 if dtype == jnp.float32 else 2e-2)
    close(grads[2], want["token_loss"].reshape(B, T) if weighted else np.zeros((B, T)), 1e-5)


@pytest.fixture
def blocks(monkeypatch):
    """Makes the loss take five columns of the vocabulary at a time, as for a TPU that keeps their logits."""
    monkeypatch.setattr(chunked, "COLUMNS", 5)
    monkeypatch.setattr(chunked, "_kept_logits", lambda rows, options: 30)


@pytest.mark.parametrize("row", [PAIRWISE[1], *(pytest.param(row, marks=pytest.mark.full) for row in PAIRWISE[2:])])
def test_blocks_of_the_vocabulary(blocks, row):
    test_values_and_gradients(*row)
    softcap, z_loss, smoothing, chunk, dtype, _ = row
    hidden, weight, targets, weights = inputs(dtype)
    options = {"softcap": softcap, "z_loss": z_loss}

    def evaluated(hidden, weight):  # without gradients, no row has all of its logits either
        return fused_linear_cross_entropy(hidden, weight, targets, label_smoothing=smoothing, chunk=chunk, **options)

    assert f",{V}]" not in str(jax.make_jaxpr(evaluated)(hidden, weight))
    want, _ = truth(hidden, weight, targets, jnp.ones_like(weights), smoothing=smoothing, **options)
    close(jax.jit(evaluated)(hidden, weight).token_loss, want["token_loss"], 1e-5)


@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.full)])
def test_blocks_of_a_split_vocabulary(blocks, mesh, check):
    test_split_vocabulary_equals_one_device(mesh, {"chunk": 3, "check": check}, "loss")


@pytest.mark.parametrize("per_token", [False, pytest.param(True, marks=pytest.mark.full)])
def test_ignored_tokens_add_exactly_nothing(per_token):
    hidden, weight, targets, _ = inputs()
    ignored = np.asarray(targets) < 0
    poisoned = jnp.where(ignored[..., None], jnp.nan, hidden)

    def total(hidden, weight):
        out = fused_linear_cross_entropy(hidden, weight, targets, z_loss=0.1, chunk=4)
        return (out.token_loss.sum() if per_token else out.loss), out

    run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, out), (d_hidden, d_weight) = run(poisoned, weight)
    _, clean = run(hidden, weight)
    assert all((np.asarray(x)[ignored] == 0).all() for x in out[1:])
    assert (np.asarray(d_hidden)[ignored] == 0).all()
    np.testing.assert_array_equal(d_hidden, clean[0])
    np.testing.assert_array_equal(d_weight, clean[1])


@pytest.mark.parametrize("bad", [V, -2, 2**31 - 1])
def test_a_target_outside_the_vocabulary_gives_nan_inside_jit(bad):
    """A finite loss would train every other token down; outside jit it is an error."""
    hidden, weight, targets, _ = inputs()
    targets = targets.at[0, 1].set(bad)
    grad = jax.jit(jax.value_and_grad(lambda h, w, y: fused_linear_cross_entropy(h, w, y).loss, (0, 1)))
    loss, (d_hidden, d_weight) = grad(hidden, weight, targets)
    assert np.isnan(loss) and np.isnan(d_weight).any() and np.isnan(d_hidden[0, 1]).all()
    is_bad = np.asarray(targets) == bad
    score = jax.jit(lambda h, w, y: fused_linear_log_probs(h, w, y).log_prob)
    np.testing.assert_array_equal(np.isnan(score(hidden, weight, targets)), is_bad)
    ids = jnp.stack([targets, jnp.maximum(targets, 0)], -1)
    at = np.isnan(jax.jit(fused_linear_gather_log_probs)(hidden, weight, ids))
    np.testing.assert_array_equal(at, (ids < 0) | (ids >= V))
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {V}\), or -1"):
        fused_linear_cross_entropy(hidden, weight, targets)


def test_nothing_to_predict():
    hidden, weight, _, _ = inputs()
    total = lambda h, w: fused_linear_cross_entropy(h, w, jnp.full((B, T), -1)).loss
    value, grads = jax.jit(jax.value_and_grad(total, (0, 1)))(hidden, weight)
    assert value == 0
    assert not any(np.any(g) for g in grads)


def test_logits_far_apart_stay_finite():
    hidden, weight, targets, _ = inputs()
    out = jax.jit(fused_linear_cross_entropy)(hidden * 1e4, weight, targets)
    assert np.isfinite(out.loss)
    assert out.loss > 1e3


def test_weight_gradient_accumulates_in_float32():
    # In bfloat16 a sum of ones stops at 256.
    tokens = 600
    hidden, weight = jnp.ones((tokens, 4), jnp.bfloat16), jnp.zeros((2, 4), jnp.bfloat16)
    loss = lambda w: fused_linear_cross_entropy(hidden, w, jnp.zeros(tokens, jnp.int32), chunk=1).loss
    np.testing.assert_allclose(
        np.asarray(jax.jit(jax.grad(loss))(weight), np.float32), [[-300] * 4, [300] * 4], rtol=0.01
    )


@pytest.mark.parametrize("field", ["loss", pytest.param("log_prob", marks=pytest.mark.full)])
def test_checkpoint_vmap_and_scan(field):
    hidden, weight, targets, _ = inputs()

    def total(hidden, targets, weight):
        return jnp.sum(getattr(fused_linear_cross_entropy(hidden, weight, targets, chunk=4, z_loss=0.1), field))

    want = jax.jit(jax.value_and_grad(lambda h, w: total(h, targets, w), (0, 1)))(hidden, weight)

    def mapped(hidden, weight):
        return jnp.sum(jax.vmap(total, (0, 0, None))(hidden, targets, weight))

    def scanned(hidden, weight):
        step = lambda sum_, x: (sum_ + total(*x, weight), None)
        return jax.lax.scan(step, 0.0, (hidden, targets))[0]

    for other in (mapped, scanned, jax.checkpoint(lambda h, w: total(h, targets, w))):
        got = jax.jit(jax.value_and_grad(other, (0, 1)))(hidden, weight)
        jax.tree.map(lambda a, b: close(a, b, 1e-5), got, want)


def count_matmuls(jaxpr) -> int:
    inner = (p for eqn in jaxpr.eqns for p in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")))
    inner = (getattr(p, "jaxpr", p) for p in inner)
    return sum(e.primitive.name == "dot_general" for e in jaxpr.eqns) + sum(
        count_matmuls(p) for p in inner if hasattr(p, "eqns")
    )


def test_training_makes_the_logits_once():
    hidden, weight, targets, _ = inputs()

    @jax.jit
    def loss(hidden, weight):
        out = fused_linear_cross_entropy(hidden, weight, targets, chunk=4)
        return out.loss, out

    assert count_matmuls(jax.make_jaxpr(loss)(hidden, weight).jaxpr) == 1
    assert count_matmuls(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, weight).jaxpr) == 3


@pytest.mark.parametrize("field", ["loss", pytest.param("log_prob", marks=pytest.mark.full)])
def test_memory_is_bounded_by_the_chunk(field):
    tokens, dim, vocab, chunk = 2048, 16, 4000, 128
    args = jnp.zeros((tokens, dim)), jnp.zeros((vocab, dim)), jnp.zeros(tokens, jnp.int32)

    def temporary(chunk):
        def total(h, w, y):
            return jnp.sum(getattr(fused_linear_cross_entropy(h, w, y, chunk=chunk), field))

        return jax.jit(jax.grad(total, (0, 1))).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary(chunk) < 4 * (3 * chunk * vocab + 2 * vocab * dim + 4 * tokens * dim)
    assert temporary(tokens) > 4 * tokens * vocab


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


SHARDED = {"softcap": 4.0, "z_loss": 0.02, "label_smoothing": 0.1}


def sharded_inputs(mesh):
    rng = np.random.default_rng(0)
    P = jax.sharding.PartitionSpec
    hidden, weight = rng.normal(size=(4, 10, D)), rng.normal(size=(32, D))
    targets = rng.integers(-1, 32, (4, 10))
    put = lambda x, *spec: jax.device_put(jnp.asarray(x), jax.sharding.NamedSharding(mesh, P(*spec)))
    return (
        put(hidden.astype(np.float32), "data"),
        put(weight.astype(np.float32), "tensor"),
        put(targets.astype(np.int32), "data"),
    )


def split_vocabulary(mesh, hidden, weight, targets, check=True, axis_name="tensor", **options) -> CrossEntropy:
    P = jax.sharding.PartitionSpec

    def local(hidden, weight, targets):
        out = fused_linear_cross_entropy(hidden, weight, targets, axis_name=axis_name, **options)
        return out._replace(loss=jax.lax.psum(out.loss, "data"))

    specs = (P("data"), P("tensor"), P("data"))
    out_specs = CrossEntropy(P(), *(P("data"),) * 4)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check)
    return run(hidden, weight, targets)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        pytest.param({"chunk": 3}, "loss", id="checked"),
        # Left to XLA, chunks that do not divide the devices' tokens are padded, which moves a few bytes per token.
        pytest.param({"chunk": 4}, "log_prob", id="automatic"),
        pytest.param({"chunk": 3, "check": False}, "loss", marks=pytest.mark.full, id="unchecked"),
        pytest.param({"chunk": 3, "check": False}, "log_prob", marks=pytest.mark.full, id="unchecked log_prob"),
    ],
)
def test_split_vocabulary_equals_one_device(mesh, options, field):
    args = sharded_inputs(mesh)

    def grad_of(run, **options):
        def total(*args):
            out = run(*args, **SHARDED, **options)
            return jnp.sum(getattr(out, field)), out

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))

    automatic = options["chunk"] == 4
    run = fused_linear_cross_entropy if automatic else functools.partial(split_vocabulary, mesh)
    sharded = grad_of(run, **options).lower(*args).compile()
    got = sharded(*args)
    want = grad_of(fused_linear_cross_entropy)(*(jnp.asarray(np.asarray(a)) for a in args))
    jax.tree.map(lambda a, b: close(a, b, 1e-5), got, want)
    assert "all-gather" not in sharded.as_text()


@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.full)])
def test_token_weights_have_a_gradient_when_the_vocabulary_is_split(mesh, check):
    P = jax.sharding.PartitionSpec
    hidden, weight, targets = sharded_inputs(mesh)

    def split(weights):
        local = lambda h, w, y, a: jax.lax.psum(
            fused_linear_cross_entropy(h, w, y, weights=a, axis_name="tensor").loss, "data"
        )
        specs = P("data"), P("tensor"), P("data"), P("data")
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
        return run(hidden, weight, targets, weights)

    got = jax.jit(jax.grad(split))(jnp.ones(targets.shape))
    on_one = jax.device_put((hidden, weight, targets), jax.devices()[0])
    close(got, jax.jit(fused_linear_cross_entropy)(*on_one).token_loss, 1e-5)


BAD = {
    "same D": {"weight": jnp.ones((V, D + 1))},
    "'V D'": {"weight": jnp.ones((1, V, D))},
    "shape '\\*B' of hidden": {"targets": jnp.zeros((B, T + 1), jnp.int32)},
    "weights must have the shape": {"weights": jnp.ones((T, B))},
    "targets must be integers": {"targets": jnp.zeros((B, T))},
    f"in \\[0, {V}\\)": {"targets": jnp.full((B, T), V)},
    f"first is {V + 3}": {"targets": jnp.full((B, T), V + 3)},
    "softcap must be positive": {"softcap": 0.0},
    "z_loss must not be negative": {"z_loss": -1.0},
    "label_smoothing must be in": {"label_smoothing": 1.5},
    "at least 1 token": {"chunk": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_errors_say_what_must_hold(message):
    unchecked = inspect.unwrap(fused_linear_cross_entropy)  # the shape checker of the tests would be first
    hidden, weight, targets, _ = inputs()
    with pytest.raises(ValueError, match=message):
        unchecked(**{"hidden": hidden, "weight": weight, "targets": targets, **BAD[message]})


def test_axis_name_needs_a_weight_split_over_it(mesh):
    P = jax.sharding.PartitionSpec
    hidden, weight, targets = sharded_inputs(mesh)

    def local(h, w, y):
        return fused_linear_cross_entropy(h, w, y, axis_name="tensor").loss

    with pytest.raises(ValueError, match="it varies over \\[\\]"):
        jax.eval_shape(
            jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P()), hidden, weight, targets
        )
