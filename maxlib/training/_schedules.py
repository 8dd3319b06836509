"""Learning rate schedules; any optax schedule works as well."""

import optax


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
    peak: float, steps: int, *, warmup: int, decay: int, end_fraction: float = 0.0
) -> optax.Schedule:
    """Returns a schedule with a linear warm-up, a plateau, and a linear decay to `end_fraction * peak`
    (WSD, arXiv:2404.06395).

    A run may be extended from any checkpoint of its plateau.

    Args:
        peak: Largest learning rate.
        steps: Number of steps of the run.
        warmup: Number of steps of the warm-up.
        decay: Number of steps of the decay at the end.
        end_fraction: Last learning rate, as a fraction of `peak`.

    Raises:
        ValueError: when the parts do not fit into `steps`.
    """
    _check(steps, warmup, decay)
    parts = [optax.constant_schedule(peak), optax.linear_schedule(peak, end_fraction * peak, decay)]
    return _after_warmup(peak, warmup, optax.join_schedules(parts, [steps - warmup - decay]))


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
