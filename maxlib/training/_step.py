"""The training step: a pure function from state and batch to state and metrics."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from maxlib import nn, sharding
from maxlib.training._losses import Batch, Stats
from maxlib.training._offload import apply_updates, check_offloaded, update
from maxlib.training._pipelining import Gradients

Loss = Callable[[Any, Batch, Array], tuple[Array, Stats]]
Metrics = dict[str, Any]


@nn.pytree
class TrainState:
    """All that a step reads and writes. A donated state is gone; the step returns its successor.

    trainable: parameters by path; rest: what else the model consists of (`nn.partition`). key: constant through a run;
    the step folds its number in.
    """

    trainable: dict[str, Any]
    rest: Any
    opt_state: Any
    step: Int[Array, ""]
    key: Array

    @property
    def model(self) -> Any:
        """The model, made of this state's own arrays."""
        return nn.combine(self.trainable, self.rest)


Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_state(
    model: Any, optimizer: optax.GradientTransformation, *, filter: nn.Filter = nn.is_trainable, key: Array | int = 0
) -> TrainState:
    """The state before the first step. It holds the model's own arrays: donating it deletes them in the model too.

    Moments are born where their parameters live, or where the layout puts them (`sharding.ZERO1`, `OFFLOAD_OPTIMIZER`),
    so call it inside `sharding.use` if the steps run there. Raises ValueError when `filter` leaves nothing to train,
    and for moments that shall live on the host of an optimizer that keeps none there.
    """
    trainable, rest = nn.partition(model, filter)
    if not trainable:
        names = sorted({*nn.tree.pattern_paths(model).values()})
        raise ValueError(f"filter must take at least one parameter to train, it takes none of {names}")
    seed = jax.random.key(key) if isinstance(key, int) else key
    start = lambda params, key: (optimizer.init(sharding.memory.to_device(params)), jnp.zeros((), jnp.int32), key)
    born = lambda params, key: _place(start(params, key), params, rest, optimizer=True)
    opt_state, step, own_key = jax.jit(born)(trainable, seed)
    check_offloaded(opt_state, trainable)
    return TrainState(trainable, rest, opt_state, step, own_key)


def make_train_step(
    loss_fn: Loss,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    schedule: optax.Schedule | None = None,
    gradients: Gradients | None = None,
) -> Step:
    """`step(state, batch) -> (state, metrics)`, pure; jit it with its state donated, or use `jit_step`.

    loss_fn: `(model, batch, key) -> (sum over target tokens, Stats)`; the step follows the gradient of the mean.
    accumulate: how many microbatches a batch is computed in; they are weighted by their numbers of targets, so the mean
    is that of the whole batch. schedule: only reported, as `learning_rate`. gradients: what finds the gradient in place
    of autodiff of `loss_fn`, such as `one_f_one_b`: `(trainable, rest, batch, key) -> (gradients of the mean, mean,
    Stats)`. Raises ValueError for both `gradients` and `accumulate`; the step does for a batch whose rows (of each
    microbatch) or sequence the mesh does not divide by the layout in use.

    Metrics: `loss` (what is minimized), `tokens`, `grad_norm` (before clipping), `finite` (False when loss or gradient
    is not and the state is as bad as they are), `skipped` (with `skip_spikes`), and the means of the loss's own sums.
    """
    if gradients is not None and accumulate > 1:
        raise ValueError(
            f"gradients takes the whole batch, which accumulate={accumulate} would cut: leave accumulate out (a pipeline has "
            "microbatches of its own)"
        )
    optimizer = optax.with_extra_args_support(optimizer)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        jax.tree.map(lambda x: _check_divides(x, accumulate), batch)
        key = jax.random.fold_in(state.key, state.step)
        batch = jax.tree.map(_by_rows, batch)
        if gradients is None:
            grads, loss, stats = _gradients(loss_fn, state, batch, key, accumulate)
        else:
            grads, loss, stats = gradients(state.trainable, state.rest, batch, key)
        grads = _place(grads, state.trainable, state.rest, optimizer=True)
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        extra = {"value": loss, "stacked": nn.tree.stacked_paths(state.rest)}  # by_layer takes those layer by layer
        updates, opt_state = update(optimizer, grads, state.opt_state, state.trainable, **extra)
        trainable = _place(apply_updates(state.trainable, updates), state.trainable, state.rest)
        opt_state = _place(opt_state, state.trainable, state.rest, optimizer=True)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        metrics = {"loss": loss, "tokens": stats.tokens, "grad_norm": norm, "finite": finite} | means(stats)
        if (skipped := optax.tree.get(opt_state, "skipped")) is not None:  # `skip_spikes`
            metrics |= {"skipped": skipped.astype(jnp.float32), "finite": finite | skipped}
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        return TrainState(trainable, state.rest, opt_state, state.step + 1, state.key), _everywhere(metrics)

    return step


def make_eval_step(loss_fn: Loss) -> Callable[[TrainState, Batch], Stats]:
    """`step(state, batch) -> Stats`, with the loss among its sums; see `evaluate`."""

    def step(state: TrainState, batch: Batch) -> Stats:
        loss, stats = loss_fn(state.model, jax.tree.map(_by_rows, batch), state.key)
        return _everywhere(Stats(stats.tokens, {"loss": loss} | stats.sums))

    return step


def jit_step(step: Step) -> Step:
    """`step` compiled, with its state donated: after a call only the state it returned exists."""
    return jax.jit(step, donate_argnums=0)


def means(stats: Stats) -> Metrics:
    """A loss's sums per target token."""
    return {name: value / jnp.maximum(stats.tokens, 1) for name, value in stats.sums.items()}


def _gradients(loss_fn: Loss, state: TrainState, batch: Batch, key: Array, accumulate: int) -> tuple[Any, Array, Stats]:
    """The gradient of the mean loss, that mean, and the statistics of the whole batch."""

    def loss_of(trainable, batch, key, mean: bool):
        loss, stats = loss_fn(nn.combine(trainable, state.rest), batch, key)
        return loss / jnp.maximum(stats.tokens, 1) if mean else loss, stats

    def gradient(*args):
        value, grads = jax.value_and_grad(loss_of, has_aux=True)(*args)
        return value, sharding.memory.to_device(grads)  # those of parameters on the host are born there

    if accumulate == 1:
        (loss, stats), grads = gradient(state.trainable, batch, key, True)
        return grads, loss, stats

    def add(total, xs):
        batch, key = xs
        (loss, stats), grads = gradient(state.trainable, batch, key, False)
        new = _place(jax.tree.map(lambda g: g.astype(jnp.float32), grads), state.trainable, state.rest), loss, stats
        return jax.tree.map(jnp.add, total, new), None

    xs = jax.tree.map(lambda x: _microbatches(x, accumulate), batch), jax.random.split(key, accumulate)
    first_batch, first_key = jax.tree.map(lambda x: x[0], xs)
    _, stats = jax.eval_shape(lambda t: loss_of(t, first_batch, first_key, False), state.trainable)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.trainable)
    start = (_place(zeros, state.trainable, state.rest), jnp.zeros(()), jax.tree.map(_zeros_like, stats))
    (grads, loss, stats), _ = jax.lax.scan(add, start, xs)
    count = jnp.maximum(stats.tokens, 1)
    return jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, state.trainable), loss / count, stats


def _zeros_like(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype)


def _microbatches(x: Array, count: int) -> Array:
    """Microbatch `i` takes every `count`-th row: rows that are spread over devices stay evenly spread."""
    if x.shape[0] % count:
        raise ValueError(f"accumulate={count} must divide the batch's {x.shape[0]} rows; change one of them")
    return jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)


def _by_rows(x: Array) -> Array:
    return sharding.constrain(x, *_names(x))


def _names(x: Array) -> tuple[str | None, ...]:
    return ("batch", "seq") if x.ndim == 2 else ("batch", *[None] * x.ndim)[: x.ndim]


def _check_divides(x: Array, accumulate: int) -> None:
    """What does not divide, `constrain` leaves whole, as decoding wants it: each device would train on all of it."""
    if (layout := sharding.current()) is None:
        return
    mesh, stages = layout.mesh, layout.mesh_axes("layers")  # which share the rows where they can
    places = zip(_names(x), layout.spec(*_names(x), what="batch"), x.shape, (accumulate, 1), strict=False)
    for name, place, size, cut in places:
        axes = (place,) if isinstance(place, str) else place or ()
        degrees = {axis: mesh.shape[axis] for axis in axes if axis not in stages and mesh.shape[axis] > 1}
        if size % (parts := cut * math.prod(degrees.values())):
            times = f", times accumulate={cut}" if cut > 1 else ""
            raise ValueError(
                f"a batch of shape {x.shape} does not divide over the mesh: its {size} {'rows' if name == 'batch' else 'tokens'} "
                f"must be a multiple of {parts}, as the rule {name!r} splits them over {degrees}{times}; change the batch, the "
                "mesh or that rule"
            )


def _place(tree: Any, params: dict[str, Any], rest: Any, *, optimizer: bool = False) -> Any:
    """Constrains what is like a parameter (gradients, moments) to that parameter's place, or the place of its optimizer
    state; all else is on every device.

    Without this XLA chooses, and may gather a gradient or turn a donated buffer into another layout.
    """
    if (layout := sharding.current()) is None:
        return tree
    names = nn.tree.axes(rest)

    def put(path, leaf):
        spec = P()
        for name in (getattr(part, "key", None) for part in path):
            if name in params and leaf.shape == params[name].shape:
                spec = layout.parameter_spec(names[name], leaf.shape, path=name)
                if optimizer:
                    spec = layout.optimizer_spec(names[name], leaf.shape, path=name)
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree_util.tree_map_with_path(put, tree)


def _everywhere(tree: Any) -> Any:
    """On every device, so that every host can read it."""
    if sharding.current() is None:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), tree)
