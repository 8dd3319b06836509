"""The training state, and how it is made from a model and an optimizer."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from maxlib import nn, sharding
from maxlib.training._moments import LowState
from maxlib.training._offload import check_offloaded
from maxlib.training._optimizer_wrappers import PathFilter, check_averages
from maxlib.training._placement import place_beside, place_like_parameters, specs_like_parameters


@nn.pytree
class TrainState:
    """Everything that a training step reads and writes. A donated state is deleted; the step returns a new one.

    Args:
        trainable: Trained parameters by path.
        rest: The rest of the model (`nn.partition`).
        opt_state: State of the optimizer.
        step: Number of steps done.
        key: Random key of the whole run; each step folds in its number.
    """

    trainable: dict[str, Any]
    rest: Any
    opt_state: Any
    step: Int[Array, ""]
    key: Array

    @property
    def model(self) -> Any:
        """Builds the model from this state's arrays."""
        return nn.combine(self.trainable, self.rest)


def make_state(
    model: Any | Callable[[], Any],
    optimizer: optax.GradientTransformation,
    *,
    filter: nn.tree.Filter | None = None,
    key: Array | int = 0,
) -> TrainState:
    """Makes the state before the first step. It shares the model's arrays: donating it deletes them in the model too.

    Moments are created with their parameters' sharding, or with the layout's (`sharding.ZERO1`, `OFFLOAD_OPTIMIZER`),
    so call it inside `sharding.use` if the steps run there. It warns if the model is split over devices but no layout
    is active.

        optimizer = training.adamw(1e-3)
        state = training.make_state(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)), optimizer)

    Args:
        model: A model, or a function that builds one, which is run under jit so that parameters are created already
            sharded.
        optimizer: An optax optimizer of `{path: array}`.
        filter: Selects the trained parameters; the others are frozen. None trains the factors of adapters if the model
            has any, else all parameters of a floating dtype, except the frozen model of `post_training.WithFrozen`.
        key: Random key of the whole run.

    Raises:
        ValueError: when there is nothing to train, a pattern of `trainable_only` matches nothing, a parameter occurs
            twice (`self.head = self.embed`), moments should be offloaded but the optimizer cannot keep them on the
            host, or `ema` comes before another transformation in a chain.
    """
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer must be an optax.GradientTransformation, such as training.adamw(1e-3), got {optimizer!r:.80}"
        )
    if filter is not None and not callable(filter):
        raise TypeError(
            f"filter must be a function of path and variable, such as trainable_only('head.w'), got {filter!r:.80}"
        )
    if is_builder(model):
        model = _built(model, sharding.current())
    sharding.check_no_aliases(model)
    if isinstance(filter, PathFilter):
        filter.check(model)
    trainable, rest = nn.partition(model, filter or nn.tree.default_filter(model))
    if not nn.variables(model):
        raise ValueError(f"a model must have parameters to train, got {type(model).__name__} {model!r:.80} without any")
    if not trainable:
        raise ValueError("filter selected no parameters; nn.tree.pattern_paths(model) lists their names")
    _warn_without_layout(trainable)

    def start(params: dict[str, Any], run_key: Array | None) -> Any:
        seeded = jax.random.key(key) if isinstance(key, int) else run_key
        counters = place_like_parameters((jnp.zeros((), jnp.int32), seeded), trainable, rest)
        return *counters, _initial(optimizer, params, rest)

    # One program, which takes less time to compile than several.
    step, copied_key, opt_state = jax.jit(start)(trainable, None if isinstance(key, int) else key)
    check_offloaded(opt_state, trainable)
    check_averages(opt_state)
    _warn_of_rounding(opt_state, trainable)
    return place_beside(TrainState(trainable, rest, opt_state, step, copied_key), trainable)


def abstract_state(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    layout: sharding.Layout | None = None,
    filter: nn.tree.Filter | None = None,
    key: Array | int = 0,
) -> TrainState:
    """Returns the shapes and shardings of the state that `make_state` makes; allocates nothing.

    Args:
        model: A function that builds the model, or its shapes, with their shardings if there is a layout.
        optimizer: As for `make_state`.
        layout: The layout in which the state would be made; None for the default device.
        filter: As for `make_state`.
        key: As for `make_state`.

    Raises:
        ValueError: as `make_state` does.
    """

    def make(model: Any) -> TrainState:
        return make_state(model, optimizer, filter=filter, key=key)

    if is_builder(model):
        model = sharding.eval_shape(model)
        if layout is not None:
            model = jax.tree.map(_at, model, sharding.shardings(model, layout))
    if layout is None:
        place = jnp.zeros(()).sharding  # of the default device
        return jax.tree.map(lambda x: _at(x, place), jax.eval_shape(make, model))
    trainable, rest = nn.partition(model, filter or nn.tree.default_filter(model))
    with sharding.use(layout):
        traced, state = jax.make_jaxpr(make, return_shape=True)(model)
        specs = specs_like_parameters(state.opt_state, trainable, rest, optimizer=True)
    spaces = jax.tree.unflatten(jax.tree.structure(state), [x.memory_space for x in traced.out_avals])

    def moment(x: Any, space: Any, spec: P) -> jax.ShapeDtypeStruct:
        kind = "pinned_host" if space == jax.memory.Space.Host else None
        return _at(x, NamedSharding(layout.mesh, spec, memory_kind=kind))

    moments = jax.tree.map(moment, state.opt_state, spaces.opt_state, specs)
    replicated = NamedSharding(layout.mesh, P())
    arrays = trainable, rest, moments, _at(state.step, replicated), _at(state.key, replicated)
    return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(arrays))


def _at(x: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def is_builder(model: Any) -> bool:
    """Returns True for a function that builds a model."""
    return callable(model) and not nn.variables(model)


def _built(build: Callable[[], Any], layout: sharding.Layout | None) -> Any:
    """Builds a model, with a layout as shards."""
    if layout is not None:
        return sharding.init_sharded(build, layout)
    sharding.eval_shape(build)  # for its check
    model = build()  # operation by operation: as one program it would take three times as long to compile
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), model)


def init_optimizer(optimizer: optax.GradientTransformation, params: dict[str, Any], rest: Any) -> Any:
    """Makes the optimizer's initial state for these parameters, with their shardings."""
    return place_beside(jax.jit(lambda params: _initial(optimizer, params, rest))(params), params)


def _initial(optimizer: optax.GradientTransformation, params: dict[str, Any], rest: Any) -> Any:
    return place_like_parameters(optimizer.init(sharding.memory.to_device(params)), params, rest, optimizer=True)


def _warn_without_layout(trainable: dict[str, Any]) -> None:
    """Warns about parameters that are split over devices while no layout is active."""
    if sharding.current() is not None:
        return
    arrays = {path: x for path, x in trainable.items() if isinstance(x, jax.Array) and not isinstance(x, Tracer)}
    split = [path for path, x in arrays.items() if not x.sharding.is_fully_replicated]
    if split:
        warnings.warn(
            f"{len(split)} of {len(trainable)} trained parameters, such as {split[0]}, are split over devices, but no "
            "layout is active: moments may be replicated, and kernels and activations are not sharded. Make the state "
            "and run the "
            "steps inside `with sharding.use(layout):`",
            stacklevel=3,
        )


def _warn_of_rounding(opt_state: Any, trainable: dict[str, Any]) -> None:
    """Warns about low-precision parameters that lose most updates, unless the optimizer rounds stochastically."""

    def is_low(x: Any) -> bool:
        return isinstance(x, LowState)

    rounds = any(map(is_low, jax.tree.leaves(opt_state, is_leaf=is_low)))

    def coarse(x: Array) -> bool:
        return jnp.finfo(x.dtype).bits < 32 and not (rounds and x.dtype == jnp.bfloat16)

    if lost := [path for path, x in trainable.items() if coarse(x)]:
        warnings.warn(
            f"{len(lost)} of {len(trainable)} trained parameters are {trainable[lost[0]].dtype}, such as {lost[0]}, "
            "and this optimizer's updates of them are rounded to nearest: updates below 1/256 of a weight, which are "
            "nearly all, are lost. Train in float32 (from_pretrained(..., dtype=jnp.float32)), or use stochastic "
            "rounding for bfloat16: "
            "training.bfloat16_moments(optimizer), or adamw(..., moments=jnp.bfloat16)",
            stacklevel=3,
        )
