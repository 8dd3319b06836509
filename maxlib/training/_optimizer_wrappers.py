"""Wrappers of any optimizer: skipped steps, averaged parameters, learning rates by path."""

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn


class SpikeState(NamedTuple):
    """State of `skip_spikes`.

    Attributes:
        inner: State of the wrapped optimizer.
        norm: Running mean of the gradient's norm.
        loss: Running mean of the loss.
        deviation: Running mean of the loss's distance from its mean.
        count: Steps in these means.
        skipped: True if the last step was skipped.
    """

    inner: Any
    norm: Float[Array, ""]
    loss: Float[Array, ""]
    deviation: Float[Array, ""]
    count: Int[Array, ""]
    skipped: Bool[Array, ""]


def skip_spikes(
    optimizer: optax.GradientTransformation,
    *,
    norm_factor: float = 4.0,
    loss_factor: float = 1.5,
    decay: float = 0.98,
    warmup_steps: int = 100,
) -> optax.GradientTransformationExtraArgs:
    """Wraps `optimizer` to skip steps whose gradient or loss is not finite or far above recent ones.

    A skipped step changes nothing and does not enter the means; `make_train_step` reports it as `skipped`.

    Args:
        optimizer: The optimizer to wrap.
        norm_factor: A step is skipped if the gradient's norm exceeds this many times its running mean.
        loss_factor: A step is skipped if the loss exceeds its running mean by more than `loss_factor - 1` times the
            mean's magnitude, and by more than 8 `(loss_factor - 1)` typical deviations. The loss may have any sign.
        decay: Decay of the running means per step.
        warmup_steps: Before this step, only steps whose loss or gradient is not finite are skipped. The means remember
            the start of a run for about `1 / (1 - decay)` steps; during that time a rise after a fast fall is not
            skipped.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params):
        zero = jnp.zeros(())
        return SpikeState(inner.init(params), zero, zero, zero, jnp.zeros((), jnp.int32), jnp.array(False))

    def update(updates, state, params=None, **extra):
        value = extra["value"]  # the loss, as `make_train_step` gives it
        now = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), updates))
        finite = jnp.isfinite(now) & jnp.isfinite(value)
        # If the mean is negative or near zero, its magnitude is no scale for a spike, but the usual deviation is one.
        usual = jnp.maximum(jnp.abs(state.loss), 8 * state.deviation)
        high = (now > norm_factor * state.norm) | (value - state.loss > (loss_factor - 1) * usual)
        skipped = ~finite | (high & (state.count >= warmup_steps))
        share = jnp.where(state.count == 0, 0.0, decay)

        def mean(old: Array, new: Array) -> Array:
            return jnp.where(skipped, old, share * old + (1 - share) * new)

        def step(_):
            return inner.update(updates, state.inner, params, **extra)

        def stay(_):
            return jax.tree.map(jnp.zeros_like, updates), state.inner

        updates_, inner_state = jax.lax.cond(skipped, stay, step, None)
        count = state.count + jnp.where(skipped, 0, 1)
        moved = jnp.where(state.count == 0, 0.0, jnp.abs(value - state.loss))  # from the mean before this step
        means = mean(state.norm, now), mean(state.loss, value), mean(state.deviation, moved)
        return updates_, SpikeState(inner_state, *means, count, skipped)

    return optax.GradientTransformationExtraArgs(init, update)


class EMAState(NamedTuple):
    """State of `ema`.

    Attributes:
        inner: State of the wrapped optimizer.
        average: Moving average of the parameters.
    """

    inner: Any
    average: dict[str, Array]


def ema(optimizer: optax.GradientTransformation, *, decay: float = 0.999) -> optax.GradientTransformationExtraArgs:
    """Wraps `optimizer` to keep an exponential moving average of the parameters in float32; see `ema_model`.

    The average begins at the initial parameters. It takes the memory of another copy of them, with the same sharding.
    No transformation may change the updates after it, or the average would not follow the parameters: put it around
    `optax.chain`, or last in it. `make_state` checks this.

    Args:
        optimizer: The complete optimizer.
        decay: Weight of the old average at each step.

    Raises:
        ValueError: when `decay` is not in [0, 1).
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is the weight of the old average, in [0, 1), such as 0.999, got {decay}")
    inner = optax.with_extra_args_support(optimizer)

    def init(params):
        return EMAState(inner.init(params), jax.tree.map(lambda p: jnp.array(p, jnp.float32), params))

    def update(updates, state, params=None, **extra):
        updates, inner_state = inner.update(updates, state.inner, params, **extra)

        def mean(a: Array, p: Array, u: Array) -> Array:
            return decay * a + (1 - decay) * (p + u).astype(p.dtype).astype(jnp.float32)

        average = jax.tree.map(mean, state.average, params, updates)
        return updates, EMAState(inner_state, average)

    return optax.GradientTransformationExtraArgs(init, update)


def check_averages(state: Any) -> None:
    """Raises ValueError if an `optax.chain` changes updates after `ema`."""
    before_last = state[:-1] if type(state) is tuple else ()
    if optax.tree.get(before_last, "average") is not None:
        raise ValueError(
            "in optax.chain, ema(...) comes before another transformation, so its average follows updates that are "
            "changed afterwards: put it around the whole chain, ema(optax.chain(...))"
        )
    if isinstance(state, tuple):  # of a chain, or of a wrapper with an `inner` state
        for part in state:
            check_averages(part)


def ema_model(state: Any) -> Any:
    """Builds the model of a `TrainState` with averages of the parameters, in their dtypes.

    Those are the averages of `ema`, or the point that schedule-free optimizers promise
    (`optax.contrib.schedule_free`, arXiv:2405.15682); their own parameters are only where gradients are taken.

    Args:
        state: A state whose optimizer is wrapped in `ema`, or is schedule-free.

    Raises:
        ValueError: when its optimizer has no averages.
    """
    average = optax.tree.get(state.opt_state, "average")
    if average is None:
        average = _schedule_free_average(state)
    if average is None:
        raise ValueError("this optimizer has no average of the parameters; wrap it: training.ema(optimizer)")
    cast = jax.tree.map(lambda a, p: a.astype(p.dtype), average, state.trainable)
    return nn.combine(cast, state.rest)


def holds_parameters(opt_state: Any) -> bool:
    """Returns True for an optimizer state that has arrays to which the parameters belong: averages, the other sequence
    of a schedule-free optimizer, replicas of DiLoCo.
    """

    def holds(x: Any) -> bool:
        return isinstance(x, EMAState | optax.contrib.ScheduleFreeState) or hasattr(x, "params")

    return any(map(holds, jax.tree.leaves(opt_state, is_leaf=holds)))


def _schedule_free_average(state: Any) -> dict[str, Array] | None:
    """Returns the averages of a schedule-free optimizer, None for another one."""

    def is_schedule_free(x: Any) -> bool:
        return isinstance(x, optax.contrib.ScheduleFreeState)

    for x in jax.tree.leaves(state.opt_state, is_leaf=is_schedule_free):
        if is_schedule_free(x):
            return optax.contrib.schedule_free_eval_params(x, state.trainable)
    return None


def scale_by_path(factors: Mapping[str, float], *, model: Any) -> optax.GradientTransformation:
    """Multiplies updates, and so learning rates, by path.

    `optax.chain(optimizer, scale_by_path({"embed.*": 0.1}, model=model))` trains embeddings at a tenth of the rate.

    Args:
        factors: Factors by shell-style patterns on paths without the groups of stacks ("layers.attn.q.w"). The first
            matching pattern applies; paths without a match are unchanged.
        model: Determines which paths belong to a stack; `jax.eval_shape` of a model is enough.

    Raises:
        ValueError: At `init`, if a pattern matches no parameter.
    """
    short = nn.tree.pattern_paths(model)

    def factor(path: str) -> float:
        name = short[path]
        return next((f for pattern, f in factors.items() if fnmatch.fnmatchcase(name, pattern)), 1.0)

    def init(params):
        _check_patterns(factors, {short[path] for path in params})
        return optax.EmptyState()

    def update(updates, state, params=None):
        factors = {path: factor(path) for path in updates}
        scaled = {path: u if factors[path] == 1 else (u * factors[path]).astype(u.dtype) for path, u in updates.items()}
        return scaled, state

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class PathFilter:
    """Filter of trainable parameters by patterns on their paths; `trainable_only` makes it."""

    patterns: tuple[str, ...]

    def __call__(self, path: str, variable: Any) -> bool:
        """Returns True for a trainable parameter whose path matches a pattern."""
        return nn.tree.is_trainable(path, variable) and any(
            fnmatch.fnmatchcase(path, pattern) for pattern in self.patterns
        )

    def check(self, model: Any) -> None:
        """Raises ValueError if a pattern matches no parameter of the model."""
        short = nn.tree.pattern_paths(model)
        _check_patterns(self.patterns, {short[path] for path in nn.partition(model)[0]})


def _check_patterns(patterns: Collection[str], names: Collection[str]) -> None:
    if unused := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
        raise ValueError(
            f"each pattern must match a parameter, {unused} match none (a tied head has none); there are {sorted(names)}"
        )


def trainable_only(*patterns: str) -> nn.tree.Filter:
    """Makes a filter for `make_state` and `Trainer` that trains only the parameters whose path matches a pattern.

    All others are frozen and have no moments. Patterns are those of `scale_by_path`, for example
    `trainable_only("layers.attn.*", "head.w")`. If a pattern matches nothing, `make_state` raises an error: for
    example, a model with a tied head has no "head.w".

    Args:
        *patterns: Shell-style patterns on paths without the groups of stacks.
    """
    return PathFilter(patterns)
