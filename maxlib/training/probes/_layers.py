"""Statistics of every layer's values, gradients and parameters on one batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from maxlib import nn, sharding
from maxlib.checkpoint import layer_paths
from maxlib.training._gradients import divisor
from maxlib.training._state import TrainState, make_state
from maxlib.training._step import jit_step, make_train_step
from maxlib.training.losses import Batch, LossFunction
from maxlib.training.probes import _hooks as hooks


@dataclasses.dataclass(frozen=True)
class Observation:
    """Statistics of one forward and backward pass, from `observe`.

    Args:
        outputs: By layer (`layers.3.attn.q`), in the order of the forward pass: the root mean square (`rms`) and
            largest magnitude (`max`) of its output, the `gradient_rms` of the output, the number of `nonfinite` values
            in both, and for attention `max_logit` and `entropy` (nats) of the batch's first row. Only the latter two
            leave out padding.
        parameters: Norm of every weight, layer by layer.
        gradients: Norm of every weight's gradient.
        loss: Loss per target.
    """

    outputs: dict[str, dict[str, float]]
    parameters: dict[str, float]
    gradients: dict[str, float]
    loss: float


def observe(model: Any, batch: Batch, loss: LossFunction, key: Array | None = None) -> Observation:
    """Runs one forward and backward pass and records statistics of every layer. The model is not changed.

    Call it inside `sharding.use` if the model is sharded.

    Args:
        model: The model.
        batch: The batch.
        loss: The training loss.
        key: Random key of the loss.
    """
    key = jax.random.key(0) if key is None else key
    recorded = _watched(loss)(model, batch, key)
    laid, seen = nn.tree.groupings(model), jax.device_get(recorded.seen)
    outputs = {}
    for path, row in hooks.in_layer_order(recorded.order, laid):
        name = layer_paths(path, laid)[row or 0][0]
        outputs[name] = {}
        for kind in (f"{path}.tap", f"{path}.logit_tap"):
            if kind in seen:
                values = seen[kind] if row is None else seen[kind][row]
                outputs[name] |= {field: float(x) for field, x in hooks.read(kind, values).items()}
    return Observation(
        outputs, _by_layer(recorded.parameters, laid), _by_layer(recorded.gradients, laid), float(recorded.loss)
    )


class LayerStatistics:
    """Callback that writes statistics of every layer to the Trainer's writers: `callbacks=[(500, LayerStatistics())]`.

    It computes the gradient of the last batch once more, so it should run rarely. It writes arrays with one number per
    layer of a stack (`layers/...`): `output_rms`, `output_max`, `gradient_rms` (of the output), `parameter_norm`,
    `gradient_norm`, and for attention `max_logit` and `entropy`. The load of experts is a metric of every step
    (`moe/load`).
    """

    def __call__(self, trainer: Any) -> None:
        state: TrainState = trainer.state
        with trainer.sharded():
            observation = observe(state.model, trainer.batch, trainer.loss, state.key)
        values = by_stack(observation, {name: len(stack) for name, stack in nn.tree.stacks(state.rest).items()})
        trainer.writers.write(trainer.step, values)


def by_stack(observation: Observation, stacks: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns `{"layers/output_rms": one number per layer, ...}`."""
    values = {}
    for stack, length in stacks.items():
        names = [f"{stack}.{i}" for i in range(length)]
        for ours, field in (("output_rms", "rms"), ("output_max", "max"), ("gradient_rms", "gradient_rms")):
            values[f"{stack}/{ours}"] = [observation.outputs.get(name, {}).get(field, np.nan) for name in names]
        for kind in ("parameters", "gradients"):
            norms = getattr(observation, kind)
            values[f"{stack}/{kind[:-1]}_norm"] = [_together(norms, f"{name}.") for name in names]
        for field in hooks.LOGITS:
            values[f"{stack}/{field}"] = [_largest(observation.outputs, f"{name}.", field) for name in names]
    return {name: np.array(v) for name, v in values.items() if not np.all(np.isnan(v))}


def _together(norms: dict[str, float], prefix: str) -> float:
    return float(np.sqrt(sum(norm**2 for name, norm in norms.items() if name.startswith(prefix))))


def _largest(outputs: dict[str, dict[str, float]], prefix: str, field: str) -> float:
    return max(
        (seen[field] for name, seen in outputs.items() if name.startswith(prefix) and field in seen), default=np.nan
    )


@nn.pytree
class _Recorded:
    """order: recorded while tracing; it is static, so every call of the compiled function returns it."""

    loss: Any
    gradients: Any
    parameters: Any
    seen: Any
    order: tuple[str, ...] = nn.static()


@functools.lru_cache(maxsize=4)
def _watched(loss: LossFunction) -> Callable[..., _Recorded]:
    def is_tap(path: str) -> bool:
        return path.endswith((".tap", ".logit_tap"))

    @jax.jit
    def run(model: Any, batch: Batch, key: Array) -> _Recorded:
        is_trained = nn.tree.default_filter(model)

        def take(path: str, variable: Any) -> bool:
            return isinstance(variable, hooks.Tap) or is_trained(path, variable)

        model, order = hooks.with_hooks(model)
        watched, rest = nn.partition(model, take)

        def mean(watched: Any) -> Array:
            total, stats = loss(nn.combine(watched, rest), batch, key)
            return total / divisor(stats.num_targets)

        value, grads = jax.value_and_grad(mean)(watched)

        def norms(tree: Any) -> Any:
            return _norms({path: x for path, x in tree.items() if not is_tap(path)}, nn.tree.axes(model))

        seen = {path: g for path, g in grads.items() if is_tap(path)}
        return _Recorded(value, norms(grads), norms(watched), seen, tuple(order))

    return run


def _norms(params: dict[str, Any], axes: dict[str, tuple[str | None, ...]]) -> dict[str, Array]:
    """Computes one norm per array, or one per layer for arrays that store several."""
    return {path: _norm(x, x.ndim - sharding.layers.num_layer_axes(axes.get(path, ()))) for path, x in params.items()}


def _norm(x: Array, rank: int) -> Array:
    """Computes the norm of `x` without overflow: squares of float32 values may exceed float32."""
    x, axes = x.astype(jnp.float32), tuple(range(x.ndim - rank, x.ndim))
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), 1e-30)
    norm = jnp.sqrt(jnp.sum(jnp.square(x / jnp.broadcast_to(largest, x.shape)), axis=axes))
    return jnp.minimum(norm, jnp.finfo(jnp.float32).max / jnp.squeeze(largest, axes)) * jnp.squeeze(largest, axes)


def _by_layer(norms: dict[str, Array], laid: Mapping[str, nn.stack.Grouping]) -> dict[str, float]:
    by_layer = {}
    for path, norm in jax.device_get(norms).items():
        for name, row in layer_paths(path, laid):
            by_layer[name] = float(norm if row is None else norm[row])
    return by_layer


def mup_coord_check(
    build: Callable[[int], Any],
    widths: Sequence[int],
    *,
    optimizer: Callable[[Any], optax.GradientTransformation],
    batches: Sequence[Batch],
    loss: LossFunction,
) -> dict[str, Float[np.ndarray, "W S"]]:
    """Trains a model in several widths for a few steps and records the size of every layer's output (for muP).

    If the sizes do not depend on the width, one learning rate works for all widths (arXiv:2203.03466, appendix D.1).
    Outputs are recorded on the first batch, before each step and after the last. An output of sizes `x` after the last
    step grows as the width to the power `np.polyfit(np.log(widths), np.log(x[:, -1]), 1)[0]`.

    Args:
        build: Function from a width to a model.
        widths: At least two widths.
        optimizer: Function from the (abstract) model to an optimizer, so that it may end with
            `scale_by_path(mup_lr_factors(model, base), model=model)`; use the learning rate that you want to check.
        batches: One batch per step; a few are enough.
        loss: The training loss.

    Returns:
        By layer (`layers.3.attn.q`, and `logits`), the root mean square of its output, by width and number of steps.

    Raises:
        ValueError: when there are fewer than two widths, or the models have different layers.
    """
    if len(set(widths)) < 2:
        raise ValueError(f"growth needs at least two widths, got {list(widths)}")
    by_width = [_one_width(lambda width=width: build(width), optimizer, batches, loss) for width in widths]
    if any(sizes.keys() != by_width[0].keys() for sizes in by_width):
        raise ValueError("models of all widths must have the same layers; let build change widths only")
    return {name: np.array([sizes[name] for sizes in by_width]) for name in by_width[0]}


def _one_width(build, optimizer, batches, loss) -> dict[str, list[float]]:
    chosen = optimizer(jax.eval_shape(build))
    state, step = make_state(jax.jit(build)(), chosen), jit_step(make_train_step(loss, chosen))
    seen = [_sizes(state.model, batches[0], loss)]
    for batch in batches:
        state, _ = step(state, batch)
        seen.append(_sizes(state.model, batches[0], loss))
    return {name: [sizes[name] for sizes in seen] for name in seen[0]}


def _sizes(model: Any, batch: Batch, loss: LossFunction) -> dict[str, float]:
    outputs = observe(model, batch, loss).outputs
    return {name: seen["rms"] for name, seen in outputs.items()} | {"logits": float(_logits(model, batch["tokens"]))}


@jax.jit
def _logits(model: Any, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean(jnp.square(model.logits(model(tokens, dtype=jnp.float32).hidden))))
