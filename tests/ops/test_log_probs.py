"""Per-token log-probabilities against float64 formulas, one device, and their bound on memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.ops import fused_linear_log_probs
from tests.ops.test_cross_entropy import B, T, V, close, inputs, mesh, sharded_inputs  # noqa: F401

P = jax.sharding.PartitionSpec


def truth(hidden, weight, targets, d_log_prob, d_entropy, softcap, temperature):
    """Results and gradients of both in float64: `d log p_y / dz = onehot - p`, `dH/dz = -p (log p + H)`."""
    h, w, y = np.asarray(hidden, np.float64), np.asarray(weight, np.float64), np.asarray(targets)
    valid = y >= 0
    raw = np.where(valid[..., None], h, 0) @ w.T
    capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
    z = capped / temperature
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    p, onehot = np.exp(log_p), np.eye(w.shape[0])[np.where(valid, y, 0)]
    entropy = -(p * log_p).sum(-1)
    dz = d_log_prob[..., None] * (onehot - p) - d_entropy[..., None] * p * (log_p + entropy[..., None])
    slope = 1.0 if softcap is None else 1 - np.tanh(raw / softcap) ** 2
    d_raw = valid[..., None] * dz / temperature * slope
    out = (onehot * log_p).sum(-1) * valid, entropy * valid, (z.argmax(-1) == y) & valid
    return out, (d_raw @ w, np.einsum("btv,btd->vd", d_raw, np.where(valid[..., None], h, 0)))


def factors(shape):
    rng = np.random.default_rng(5)
    return rng.normal(size=shape), rng.normal(size=shape)


def weighted(run, d_log_prob, d_entropy):
    """The sum whose gradient asks for these cotangents."""

    def total(hidden, weight):
        out = run(hidden, weight)
        value = jnp.sum(d_log_prob * out.log_prob)
        return value if out.entropy is None else value + jnp.sum(d_entropy * out.entropy), out

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("softcap", "temperature", "entropy", "chunk", "dtype"),
    [
        (None, 0.7, True, 4, jnp.float32),
        (3.0, 0.7, True, None, jnp.bfloat16),
        (3.0, 1.7, False, 5, jnp.float32),
        pytest.param(None, 1.0, False, None, jnp.float32, marks=pytest.mark.full),
        pytest.param(3.0, 1.0, True, 1, jnp.float32, marks=pytest.mark.full),
        pytest.param(None, 1.7, True, 21, jnp.bfloat16, marks=pytest.mark.full),
    ],
)
def test_values_and_gradients(softcap, temperature, entropy, chunk, dtype):
    hidden, weight, targets, _ = inputs(dtype)
    d_log_prob, d_entropy = factors((B, T))
    options = {"softcap": softcap, "temperature": temperature}
    run = lambda h, w: fused_linear_log_probs(h, w, targets, entropy=entropy, chunk=chunk, **options)
    (_, out), grads = weighted(run, d_log_prob, d_entropy)(hidden, weight)
    want, want_grads = truth(hidden, weight, targets, d_log_prob, entropy * d_entropy, **options)
    assert out.log_prob.dtype == jnp.float32
    close(out.log_prob, want[0], 1e-5)
    assert (out.entropy is not None) == entropy
    if entropy:
        close(out.entropy, want[1], 1e-5)
    np.testing.assert_array_equal(out.correct, want[2])
    for got, expected, arg in zip(grads, want_grads, (hidden, weight), strict=True):
        assert got.dtype == arg.dtype
        close(got, expected, 1e-5 if dtype == jnp.float32 else 2e-2)


def test_memory_never_holds_all_logits():
    tokens, dim, vocab, chunk = 2048, 16, 4000, 128
    args = jnp.zeros((tokens, dim)), jnp.zeros((vocab, dim)), jnp.zeros(tokens, jnp.int32)

    def temporary(run):
        def total(h, w, y):
            log_prob, entropy = run(h, w, y)
            return jnp.sum(log_prob**2 + entropy**2)  # its gradient is known only when all tokens are

        return jax.jit(jax.grad(total, (0, 1))).lower(*args).compile().memory_analysis().temp_size_in_bytes

    def at_once(h, w, y):
        log_p = jax.nn.log_softmax(h @ w.T)
        return jnp.take_along_axis(log_p, y[:, None], 1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, 1)

    def ours(h, w, y):
        out = fused_linear_log_probs(h, w, y, entropy=True, chunk=chunk)
        return out.log_prob, out.entropy

    assert temporary(ours) < 4 * (3 * chunk * vocab + 2 * vocab * dim + 4 * tokens * dim) < 4 * tokens * vocab
    assert temporary(at_once) > 4 * tokens * vocab


@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.full)])
def test_split_vocabulary_equals_one_device(mesh, check):  # noqa: F811
    args = sharded_inputs(mesh)
    d_log_prob, d_entropy = factors(args[2].shape)
    options = {"softcap": 4.0, "temperature": 0.7, "entropy": True, "chunk": 3}

    def split(hidden, weight):
        local = lambda *args: fused_linear_log_probs(*args, axis_name="tensor", **options)
        specs = (P("data"), P("tensor"), P("data"))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check)(
            hidden, weight, args[2]
        )

    sharded = weighted(split, d_log_prob, d_entropy).lower(*args[:2]).compile()
    got = sharded(*args[:2])
    want, want_grads = truth(*args, d_log_prob, d_entropy, 4.0, 0.7)
    close(got[0][1].log_prob, want[0], 1e-5)
    close(got[0][1].entropy, want[1], 1e-5)
    np.testing.assert_array_equal(got[0][1].correct, want[2])
    for gradient, expected in zip(got[1], want_grads, strict=True):
        close(gradient, expected, 1e-5)
    assert "all-gather" not in sharded.as_text()


def test_what_does_not_fit_is_refused():
    hidden, weight, targets, _ = inputs()
    with pytest.raises(ValueError, match="temperature must be positive"):
        fused_linear_log_probs(hidden, weight, targets, temperature=float("nan"))
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {V}\)"):
        fused_linear_log_probs(hidden, weight, targets.at[0, 0].set(V))
