"""The training step: a pure function from state and batch to state and metrics."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from maxlib import nn, sharding
from maxlib.training._compiled_step import CompiledStep
from maxlib.training._expert_balance import with_moved_biases
from maxlib.training._gradients import Accumulated, divisor, gradients_of
from maxlib.training._objectives.objective import Batch, Loss, Quotient, Stats, check_read, unwrap
from maxlib.training._objectives.remat_names import check_remat_names
from maxlib.training._objectives.tuning import noisy_loss
from maxlib.training._offload import apply_updates, update
from maxlib.training._placement import batch_names, place_like_parameters
from maxlib.training._state import TrainState

Metrics = dict[str, Any]
_OWN_METRICS = {"loss", "grad_norm", "finite", "num_targets", "num_tokens", "skipped", "learning_rate"}
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    log_schedule: optax.Schedule | None = None,
    router_bias_update_rate: float = 1e-3,
) -> Step:
    """Makes `step(state, batch) -> (state, metrics)`, pure; jit it with its state donated, or use `jit_step`.

    Metrics: `loss` (what is minimized), `num_targets`, `num_tokens` (without padding), `grad_norm` (before clipping),
    `finite` (False if the loss or the gradient norm is NaN or infinite; the new state is then invalid), `skipped` (with
    `skip_spikes`), and the means of the loss's own sums.

        step = training.jit_step(training.make_train_step(training.next_token_loss, optimizer))
        state, metrics = step(training.make_state(model, optimizer), batch)

    Args:
      loss: `(model, batch, key) -> (sum over targets, Stats)`, such as one that `objective` makes; the step follows
          the gradient of the mean. It is computed by autodiff, unless the loss has a method `gradients`, as
          `accumulate(loss, 4)` and `one_f_one_b(loss)` do.
      optimizer: of `{path: array}`.
      log_schedule: schedule to log as `learning_rate`. It does not change the rate: pass the same schedule to the
          optimizer.
      router_bias_update_rate: step size of the expert biases of trained routers (arXiv:2408.15664), for models that
          have them (`nn.Router(expert_bias=True)`). 0 freezes them. The default is that of DeepSeek V3.

    Raises:
      ValueError: in a step, for a metric of the loss that has one of these names; for a batch whose rows (of a
        microbatch) or sequence the layout does not divide; or for a name in `remat` that no layer marks.
    """
    optimizer, gradients = optax.with_extra_args_support(optimizer), gradients_of(loss)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_read(loss, batch)
        for x in jax.tree.leaves(batch):
            _check_divides(x, getattr(loss, "microbatches", 1))
        key = jax.random.fold_in(state.key, state.step)
        batch = jax.tree.map(_by_rows, batch)
        check_remat_names(unwrap(loss)[1].get("remat"), state.trainable, state.rest, batch)
        grads, value, stats = gradients(state.trainable, state.rest, batch, key)
        _check_metric_names(stats)
        grads = place_like_parameters(grads, state.trainable, state.rest, optimizer=True)
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        trainable, opt_state = _updated(optimizer, state, grads, value)
        skipped = optax.tree.get(opt_state, "skipped")  # None without `skip_spikes`
        metrics = {"loss": value, "grad_norm": norm, "num_targets": stats.num_targets, "num_tokens": num_tokens(batch)}
        metrics |= _health(value, norm, skipped) | means(stats)
        if log_schedule is not None:
            metrics["learning_rate"] = jnp.asarray(log_schedule(state.step), jnp.float32)
        rest, rate = state.rest, cast(Any, router_bias_update_rate)
        if router_bias_update_rate:
            rest = with_moved_biases(rest, state.trainable, stats.expert_counts, rate=rate, skipped=skipped)
        return TrainState(trainable, rest, opt_state, state.step + 1, state.key), _everywhere(metrics)

    return step


def _updated(
    optimizer: optax.GradientTransformationExtraArgs, state: TrainState, grads: dict[str, Any], loss: Array
) -> tuple[dict[str, Any], Any]:
    """Returns the new parameters and optimizer state, with the shardings of the old ones."""
    extra = {"value": loss, "stacked": nn.tree.stacked_paths(state.rest)}  # for decay, and offloading by layer
    updates, opt_state = update(optimizer, grads, state.opt_state, state.trainable, **extra)
    trainable = place_like_parameters(apply_updates(state.trainable, updates), state.trainable, state.rest)
    return trainable, place_like_parameters(opt_state, state.trainable, state.rest, optimizer=True)


def _health(loss: Array, norm: Array, skipped: Array | None) -> Metrics:
    """Returns `finite`, and `skipped` if the optimizer skips steps; the state after a skipped step is valid."""
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if skipped is None:
        return {"finite": finite}
    return {"finite": finite | skipped, "skipped": skipped.astype(jnp.float32)}


def make_eval_step(loss: Loss) -> Callable[[TrainState, Batch], Stats]:
    """Makes `step(state, batch) -> Stats`, with the loss among its sums; see `evaluate`.

    Args:
      loss: as for `make_train_step`. Embedding noise is left out.

    Raises:
      ValueError: in a step, for a batch whose rows or sequence do not divide under the active layout.
    """
    silent = _without_noise(loss)

    def step(state: TrainState, batch: Batch) -> Stats:
        for x in jax.tree.leaves(batch):
            _check_divides(x, 1)
        value, stats = silent(state.model, jax.tree.map(_by_rows, batch), state.key)
        _check_metric_names(stats)
        return _everywhere(Stats(stats.num_targets, {"loss": value} | stats.sums))

    return step


def _check_metric_names(stats: Stats) -> None:
    """Raises ValueError for metrics of a loss that would replace the step's own."""
    if taken := sorted(_OWN_METRICS & stats.sums.keys()):
        raise ValueError(f"the step itself reports {', '.join(taken)}: give this metric of the loss another name")


def _without_noise(loss: Loss) -> Loss:
    """Returns the loss inside of `with_embedding_noise`, through `accumulate` and `functools.partial`."""
    if isinstance(loss, Accumulated):
        return _without_noise(loss.loss)
    if not isinstance(loss, functools.partial):
        return loss
    options = dict(loss.keywords)
    inner = loss.func
    if inner is noisy_loss:
        inner = options.pop("loss")
        del options["alpha"]
    return functools.partial(_without_noise(inner), *loss.args, **options)


def jit_step(step: Step) -> CompiledStep:
    """Compiles `step` with its state donated: after a call, only the returned state exists.

    Adds the options of XLA that suit the device and the mesh (`xla_flags.automatic`). The mesh is that of the layout
    (or of `jax.set_mesh`) in which the step is called, else that over which its arguments are placed. Flags in the
    environment win.

    Args:
      step: a step from `make_train_step`.

    Returns:
      A function of a state and a batch; like that of `jax.jit`, it has the methods `lower` and `trace`.
    """
    return CompiledStep(step)


def means(stats: Stats) -> Metrics:
    """Divides a loss's sums by the number of targets, or by their own divisors."""
    divided = lambda x: x if isinstance(x, Quotient) else Quotient(x, stats.num_targets)
    return {name: divided(x).sum / divisor(divided(x).count) for name, x in stats.sums.items()}


def num_tokens(batch: Batch) -> Array:
    """Counts the tokens of a batch and its nested batches, without padding."""
    inside = sum((num_tokens(x) for x in batch.values() if isinstance(x, dict)), start=jnp.zeros((), jnp.int32))
    if "tokens" not in batch:
        return inside
    real = jnp.ones(batch["tokens"].shape, bool)
    for name in ("segment_ids", "valid"):
        real = real & (batch[name] != 0) if name in batch else real
    return inside + jnp.sum(real)


def _by_rows(x: Array) -> Array:
    return sharding.constrain(x, *batch_names(x))


def _check_divides(x: Array, microbatches: int) -> None:
    """Raises ValueError for batches that do not divide over the mesh.

    `constrain` would replicate them (intended for decoding), so every device would compute everything.
    """
    if (layout := sharding.current()) is None:
        return
    rows, tokens, *_ = *layout.spec(*batch_names(x), what="batch"), None, None  # a spec omits trailing None
    if x.ndim > 0:
        _check_axis(layout, x.shape, 0, rows, microbatches)
    if x.ndim == 2:
        _check_axis(layout, x.shape, 1, tokens, 1)


def _check_axis(layout: sharding.Layout, shape: tuple[int, ...], axis: int, names: Any, microbatches: int) -> None:
    """Raises ValueError unless mesh axes divide an axis of a batch: rows, 0, or tokens, 1."""
    stages = layout.mesh_axes("layers")  # stages split the rows if possible
    split = (names,) if isinstance(names, str) else names or ()
    degrees = {name: n for name in split if name not in stages and (n := layout.mesh.shape[name]) > 1}
    parts = microbatches * math.prod(degrees.values())
    if shape[axis] % parts:
        words, rule = ("tokens", "seq") if axis else ("rows", "batch")
        times = f", times {microbatches} accumulated microbatches" if microbatches > 1 else ""
        raise ValueError(
            f"a batch of shape {shape} does not divide over the mesh: its {shape[axis]} {words} must be a multiple of "
            f"{parts}, because the rule {rule!r} splits them over {degrees}{times}; change the batch, the mesh or that "
            "rule"
        )


def _everywhere(tree: Any) -> Any:
    """Replicates on every device, so that every host can read it."""
    if sharding.current() is None:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), tree)
