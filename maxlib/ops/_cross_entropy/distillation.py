"""Functions for distillation, a chunk of tokens at a time: divergences of two models, and probabilities of chosen
tokens.

Everything here is differentiated by autodiff. `_by_chunks` recomputes the logits of a chunk in the backward pass.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlib._utils.loops import each
from maxlib._utils.varying import vary, varying
from maxlib.ops._cross_entropy.api import check_chunk
from maxlib.ops._cross_entropy.chunked import _axes, _chunks, _split
from maxlib.ops._cross_entropy.terms import AxisName, Options, _pmax, _psum, columns_of, logits_of, vocab_size


def divergence(
    student: Float[Array, "*B V"], teacher: Float[Array, "*B V"], *, beta: float = 0.0
) -> Float[Array, "*B"]:
    """Computes the generalised Jensen-Shannon divergence of two distributions, in nats (GKD, arXiv:2306.13649).

    With p the teacher's and q the student's probabilities, it is KL(p ‖ q) for beta 0, KL(q ‖ p) for beta 1, and `beta
    KL(p ‖ M) + (1 - beta) KL(q ‖ M)` with M = beta p + (1 - beta) q in between. The latter vanishes like beta and 1 -
    beta near the ends, so the divergence is not continuous there.

    Args:
        student: Log-probabilities; `-inf` for none at all.
        teacher: Log-probabilities.
        beta: Interpolation between the two divergences, in [0, 1].
    """
    return jnp.sum(_pointwise(student, teacher, beta), axis=-1)


def top_k_divergence(
    student: Float[Array, "*B K"], teacher: Float[Array, "*B K"], *, beta: float = 0.0, tail: bool = True
) -> Float[Array, "*B"]:
    """Computes `divergence` over the teacher's K most likely tokens.

    Args:
        student: The student's log-probabilities of these tokens, over the whole vocabulary.
        teacher: The teacher's.
        beta: As in `divergence`.
        tail: True adds a bucket of all other tokens, log(1 - Σ p), on both sides. False divides by Σ p instead, which
            loses the total probability of the K tokens, and gives 0 for K = 1.
    """
    return divergence(_closed(student, tail), _closed(teacher, tail), beta=beta)


def _closed(log_probs: Float[Array, "*B K"], tail: bool) -> Float[Array, "*B _"]:
    """Completes the log-probabilities of some tokens to a distribution."""
    log_probs = log_probs.astype(jnp.promote_types(log_probs.dtype, jnp.float32))
    if not tail:
        return jax.nn.log_softmax(log_probs, axis=-1)
    total = jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
    # With rounding the sum may be 1 or more. In float16 and bfloat16 the limit itself would be 1.
    rest = jnp.log1p(-jnp.minimum(total, 1 - 1e-7))
    return jnp.concatenate([log_probs, rest], axis=-1)  # [*B, K] -> [*B, K + 1]


def fused_linear_divergence(
    hidden: Float[Array, "*B D"],
    weight: Float[Array, "V D"],
    teacher_hidden: Float[Array, "*C E"],
    teacher_weight: Float[Array, "U E"],
    *,
    where: Bool[Array, "*B"] | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk: int | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, "*B"]:
    """Computes `divergence` of two models' next-token distributions for each token, without storing all logits.

    It is differentiable with respect to `hidden` and `weight`; the teacher gets no gradient. Temporary memory is a few
    times `chunk * V` floats and the float32 gradient of `weight`, forward and backward.

    Args:
        hidden: The student's output after its final norm, with any leading axes.
        weight: The student's unembedding.
        teacher_hidden: The teacher's output for the same tokens, of any width.
        teacher_weight: The teacher's unembedding, of the same vocabulary.
        where: Tokens to compare, all by default; the others give 0 and have no gradient, even if not finite.
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher); values in between as in `divergence`.
        temperature: Divisor of both models' logits, after their soft-caps.
        softcap: The student's, see `fused_linear_cross_entropy`.
        teacher_softcap: The teacher's.
        chunk: Tokens per chunk; changes the result by rounding only.
        axis_name: Inside `jax.shard_map`, the mesh axis (or axes) over which the rows of both weights are split.

    Raises:
        ValueError: When shapes disagree, vocabularies differ or an option is out of range.
    """
    check_vocabulary(weight, teacher_weight)
    _check(temperature, chunk)
    if hidden.shape[:-1] != teacher_hidden.shape[:-1]:
        raise ValueError(
            f"student and teacher must get the same tokens; got hidden {hidden.shape} and {teacher_hidden.shape}"
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in [0, 1], got {beta}")
    ours = Options(softcap, 0.0, 0.0, axis_name, float(temperature))
    theirs = ours._replace(softcap=teacher_softcap)
    teacher_hidden, teacher_weight = jax.lax.stop_gradient((teacher_hidden, teacher_weight))

    def compare(h, g, w, v):
        student, teacher = _log_softmax(h, w, ours), _log_softmax(g, v, theirs)
        return _psum(jnp.sum(_pointwise(student, teacher, beta), axis=-1), axis_name)

    rows = _rows(hidden, where), _rows(teacher_hidden, where)
    out = _by_chunks(compare, rows, (weight, teacher_weight), chunk, axis_name).reshape(hidden.shape[:-1])
    return out if where is None else jnp.where(where, out, 0)


def fused_linear_gather_log_probs(
    hidden: Float[Array, "*B D"],
    weight: Float[Array, "V D"],
    ids: Int[Array, "*B K"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, "*B K"]:
    """Computes the log-probabilities of K tokens at each position; use `fused_linear_log_probs` for a single one.

    Args:
        hidden: The model's output after its final norm.
        weight: The unembedding.
        ids: Tokens to look up, in [0, V); others give NaN.
        temperature: Divisor of the logits, after the soft-cap.
        softcap: See `fused_linear_cross_entropy`.
        chunk: Tokens per chunk.
        axis_name: As in `fused_linear_divergence`.

    Returns:
        Log-probabilities, differentiable with respect to `hidden` and `weight`.
    """
    _check(temperature, chunk)
    options = Options(softcap, 0.0, 0.0, axis_name, float(temperature))

    def look_up(h, ids, w):
        log_p = _log_softmax(h, w, options)  # [m, V], or this device's part of V
        local = columns_of(ids, log_p.shape[1], axis_name)
        here = (local >= 0) & (local < log_p.shape[1])
        picked = jnp.take_along_axis(log_p, jnp.clip(local, 0, log_p.shape[1] - 1), axis=1)  # [m, K]
        in_vocab = (ids >= 0) & (ids < vocab_size(log_p.shape[1], axis_name))
        return jnp.where(in_vocab, _psum(jnp.where(here, picked, 0), axis_name), jnp.nan)

    rows = _rows(hidden, None), ids.reshape(-1, ids.shape[-1])
    return _by_chunks(look_up, rows, (weight,), chunk, axis_name).reshape(ids.shape)


def fused_linear_top_k(
    hidden: Float[Array, "*B D"],
    weight: Float[Array, "V D"],
    k: int,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    axis_name: AxisName | None = None,
) -> tuple[Float[Array, "*B K"], Int[Array, "*B K"]]:
    """Finds the k most likely tokens at each position, to store a teacher's predictions. It has no gradient.

    Args:
        hidden: The model's output after its final norm.
        weight: The unembedding.
        k: Number of tokens, at most those of the vocabulary.
        temperature: Divisor of the logits, after the soft-cap.
        softcap: See `fused_linear_cross_entropy`.
        chunk: Tokens per chunk.
        axis_name: As in `fused_linear_divergence`.

    Returns:
        Their log-probabilities in descending order, and their ids.

    Raises:
        ValueError: When `k` or an option is out of range.
    """
    _check(temperature, chunk)
    if k < 1 or (axis_name is None and k > weight.shape[0]):
        raise ValueError(f"k must be between 1 and the {weight.shape[0]} tokens of the vocabulary, got {k}")
    options = Options(softcap, 0.0, 0.0, axis_name, float(temperature))

    def best(h, w):
        log_p = _log_softmax(h, w, options)
        values, ids = jax.lax.top_k(log_p, min(k, log_p.shape[1]))
        if axis_name is not None:  # the best of each part of the vocabulary, then the best of those
            ids = ids + log_p.shape[1] * jax.lax.axis_index(axis_name)
            values, ids = _of_all_parts(values, axis_name), _of_all_parts(ids, axis_name)
            values, order = jax.lax.top_k(values, k)
            ids = jnp.take_along_axis(ids, order, axis=1)
        return values, ids.astype(jnp.int32)

    hidden, weight = jax.lax.stop_gradient((hidden, weight))
    out = _by_chunks(best, (_rows(hidden, None),), (weight,), chunk, axis_name)
    return jax.tree.map(lambda x: x.reshape(*hidden.shape[:-1], k), out)


def _of_all_parts(x: Array, axis_name: AxisName) -> Array:
    """Gathers `m k` of each device to `m (n k)`; implemented as a sum, so that JAX knows it to be equal on
    all devices.
    """
    device = jax.lax.axis_index(axis_name)
    parts = jnp.zeros((x.shape[0], jax.lax.axis_size(axis_name), x.shape[1]), x.dtype).at[:, device].set(x)
    return jax.lax.psum(parts, axis_name).reshape(x.shape[0], -1)


def _pointwise(student: Array, teacher: Array, beta: float) -> Array:
    """Computes the contribution of each token of the vocabulary to `divergence`."""
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    # `logaddexp` of twice -inf is -inf, but its gradient NaN.
    never = (teacher == -jnp.inf) & (student == -jnp.inf)
    p, q = (jnp.where(never, 0, x) for x in (teacher, student))
    mixture = jnp.where(never, -jnp.inf, jnp.logaddexp(p + math.log(beta), q + math.log1p(-beta)))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(a: Array, b: Array) -> Array:
    """Computes `e^a (a - b)`, 0 where a is -inf."""
    never = a == -jnp.inf
    return jnp.exp(a) * (jnp.where(never, 0, a) - jnp.where(never, 0, b))


def _log_softmax(rows: Float[Array, "m D"], weight: Float[Array, "V D"], options: Options) -> Float[Array, "m V"]:
    """Computes log-probabilities; each device may hold a part of the vocabulary."""
    logits = logits_of(rows, weight.astype(rows.dtype), options)
    top = _pmax(jax.lax.stop_gradient(jnp.max(logits, axis=1)), options.axis_name)
    shifted = logits - top[:, None]
    return shifted - jnp.log(_psum(jnp.sum(jnp.exp(shifted), axis=1), options.axis_name))[:, None]


def _by_chunks(f: Callable, rows: tuple, weights: tuple, chunk: int | None, axis_name: AxisName | None) -> Any:
    """Maps `f(*rows, *weights)` over chunks of rows, and recomputes each chunk in the backward pass.

    Gradients of the weights are summed over chunks in float32.
    """
    M, count = rows[0].shape[0], _chunks(rows[0], weights[0], chunk)
    # Mark the weights as varying over the mesh axes of rows, so that their gradients are summed over devices once
    # instead of once per chunk.
    everywhere = frozenset().union(*(varying(x) for x in (*rows, *weights)))
    rows = tuple(
        vary(x, everywhere if jnp.issubdtype(x.dtype, jnp.floating) else everywhere - _axes(axis_name)) for x in rows
    )
    weights = tuple(vary(w, everywhere).astype(jnp.promote_types(w.dtype, jnp.float32)) for w in weights)
    run = jax.checkpoint(lambda xs, weights: f(*xs, *weights))
    out = each(lambda xs: run(xs, weights), tuple(_split(x, count) for x in rows))
    # [count, size, ...] -> [M, ...]: chunk i has every count-th row (`_split`).
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[:M], out)


def _rows(hidden: Float[Array, "*B D"], where: Bool[Array, "*B"] | None) -> Float[Array, "M D"]:
    """Flattens the leading axes; excluded rows become zeros."""
    hidden = hidden if where is None else jnp.where(where[..., None], hidden, 0)
    return hidden.reshape(-1, hidden.shape[-1])


def check_vocabulary(weight: Array, teacher_weight: Array) -> None:
    """Raises ValueError unless both heads, `V ...`, have the same vocabulary size."""
    if weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"student and teacher must have the same vocabulary; the student's has {weight.shape[0]} tokens, the "
            f"teacher's {teacher_weight.shape[0]}. Distill from a teacher with the same tokenizer and the same padding "
            "of its table"
        )


def _check(temperature: float, chunk: int | None) -> None:
    check_chunk(chunk)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}")
