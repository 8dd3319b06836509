"""Schedules of the learning rate, from step to rate."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import optax

from maxlib._utils.arguments import check_choice


def warmup_cosine(peak: float, steps: int, *, warmup: int, end_fraction: float = 0.1) -> optax.Schedule:
    """Returns a schedule with a linear warm-up, then a half cosine down to `end_fraction * peak` at `steps`.

    Args:
        peak: Largest learning rate.
        steps: Number of steps of the run.
        warmup: Number of steps of the warm-up.
        end_fraction: Last learning rate, as a fraction of `peak`.

    Raises:
        ValueError: when the parts do not fit into `steps`.
    """
    _check(steps, warmup)
    return _after_warmup(peak, warmup, optax.cosine_decay_schedule(peak, steps - warmup, alpha=end_fraction))


def warmup_linear(peak: float, steps: int, *, warmup: int, end_fraction: float = 0.0) -> optax.Schedule:
    """Returns a schedule with a linear warm-up, then a linear decay to `end_fraction * peak` at `steps`.

    Args:
        peak: Largest learning rate.
        steps: Number of steps of the run.
        warmup: Number of steps of the warm-up.
        end_fraction: Last learning rate, as a fraction of `peak`.

    Raises:
        ValueError: when the parts do not fit into `steps`.
    """
    _check(steps, warmup)
    return _after_warmup(peak, warmup, optax.linear_schedule(peak, end_fraction * peak, steps - warmup))


def warmup_stable_decay(
    peak: float,
    steps: int,
    *,
    warmup: int,
    decay: int,
    end_fraction: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> optax.Schedule:
    """Returns a schedule with a linear warm-up, a plateau, and a decay to `end_fraction * peak`
    (WSD, arXiv:2404.06395).

    A run may be extended from any checkpoint of its plateau.

    Args:
        peak: Largest learning rate.
        steps: Number of steps of the run.
        warmup: Number of steps of the warm-up.
        decay: Number of steps of the decay at the end.
        end_fraction: Last learning rate, as a fraction of `peak`.
        shape: Shape of the decay: "linear", "cosine" (half a cosine), or "sqrt", `1 - √progress` (arXiv:2405.18392).

    Raises:
        ValueError: when the parts do not fit into `steps`.
    """
    _check(steps, warmup, decay)
    check_choice("shape", shape, ("linear", "cosine", "sqrt"))
    begin = steps - decay

    def schedule(step: Any) -> Any:
        progress = jnp.clip((step - begin) / decay, 0.0, 1.0)
        left = {
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "sqrt": 1 - jnp.sqrt(progress),
        }[shape]
        rise = jnp.minimum(1.0, (step + 1) / (warmup + 1))
        return peak * jnp.where(step < warmup, rise, end_fraction + (1 - end_fraction) * left)

    return schedule


def by_tokens(schedule: optax.Schedule, tokens_per_step: int | Callable[[Any], Any]) -> optax.Schedule:
    """Returns a schedule of steps from one whose lengths are in tokens.

        schedule = training.warmup_stable_decay(3e-4, 100_000_000_000, warmup=1_000_000_000, decay=20_000_000_000)
        optimizer = training.adamw(training.by_tokens(schedule, tokens_per_step=4_000_000))

    Args:
        schedule: Maps a number of tokens, those before a step, to a rate.
        tokens_per_step: Tokens of a step; or a function from a step to the tokens of all steps before it, such as
            that of `Ramp.tokens_before`.
    """

    def by_steps(step: Any) -> Any:
        return schedule(tokens_per_step(step) if callable(tokens_per_step) else step * float(tokens_per_step))

    return by_steps


def _after_warmup(peak: float, warmup: int, schedule: optax.Schedule) -> optax.Schedule:
    """Prepends a warm-up whose first step has a rate above 0: step `i` has `(i + 1) / (warmup + 1)` of the peak."""
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
