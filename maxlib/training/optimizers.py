"""AdamW with the choices that language models are trained with, and schedules; anything from optax does as well."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlib import nn

Mask = Callable[[dict[str, Any]], dict[str, bool]]


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    mask: Mask | dict[str, bool] | None,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip: float | None = 1.0,
) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) after clipping the gradient's global norm to `clip`.

    mask: what decays, usually `decay_mask(model)`; None decays everything. Moments are float32.
    """
    adam = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask, mu_dtype=jnp.float32)
    return adam if clip is None else optax.chain(clip_by_global_norm(clip), adam)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scales all gradients so that their common norm is at most `limit`.

    As optax's, but for one factor that XLA fuses into what follows; optax's selects between arrays, which on CPU keeps a
    second copy of all gradients and took AdamW 2.5 times as long.
    """

    def update(updates, state, params=None):
        scale = jnp.minimum(1.0, limit / optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), updates)))
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decay_mask(model: Any) -> Mask:
    """Weights with two or more axes decay, embeddings among them; norm scales, biases and sinks do not.

    Axes are counted by their names (`nn.axes`), so a norm scale that a stack holds as a matrix is still a vector. Works
    on `jax.eval_shape` of a model too.
    """
    names = nn.axes(model)
    is_bias = lambda path: path.rpartition(".")[2] in ("b", "bias")
    decays = {path: len(axes) >= 2 and not is_bias(path) for path, axes in names.items()}
    return lambda params: {path: decays[path] for path in params}


def warmup_cosine(peak: float, steps: int, *, warmup: int, end: float = 0.1) -> optax.Schedule:
    """Linear warm-up, then half a cosine down to `end * peak` at `steps`."""
    _check(steps, warmup)
    return _after_warmup(peak, warmup, optax.cosine_decay_schedule(peak, steps - warmup, alpha=end))


def warmup_linear(peak: float, steps: int, *, warmup: int, end: float = 0.0) -> optax.Schedule:
    """Linear warm-up, then a line down to `end * peak` at `steps`."""
    _check(steps, warmup)
    return _after_warmup(peak, warmup, optax.linear_schedule(peak, end * peak, steps - warmup))


def warmup_stable_decay(peak: float, steps: int, *, warmup: int, decay: int, end: float = 0.0) -> optax.Schedule:
    """Linear warm-up, a plateau, and a line down to `end * peak` over the last `decay` steps (WSD, arXiv:2404.06395).

    A run may be lengthened from any checkpoint of its plateau.
    """
    _check(steps, warmup, decay)
    parts = [optax.constant_schedule(peak), optax.linear_schedule(peak, end * peak, decay)]
    return _after_warmup(peak, warmup, optax.join_schedules(parts, [steps - warmup - decay]))


def _after_warmup(peak: float, warmup: int, schedule: optax.Schedule) -> optax.Schedule:
    """The first step already learns: step `i` of the warm-up has `(i + 1) / (warmup + 1)` of the peak."""
    if warmup == 0:
        return schedule
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, schedule], [warmup])


def _check(steps: int, warmup: int, decay: int = 1) -> None:
    if warmup < 0 or decay < 1 or warmup + decay > steps:
        raise ValueError(
            f"a schedule needs warmup >= 0, a decay of at least one step, and both within its steps; "
            f"got steps={steps}, warmup={warmup}, decay={decay}"
        )
