"""Offloading of optimizer moments to the host, with an update that copies them to the device layer by layer."""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Int

from maxlib import sharding
from maxlib._xla_workarounds import run_once_later
from maxlib.sharding import memory

Update = Callable[..., Any]


def offload_by_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `optimizer` to create its moments on the host if the layout says so (`sharding.OFFLOAD_OPTIMIZER`).

    A loop over the layers of a stack copies the moments of one layer at a time to the device and back. `update` takes
    the paths that store several layers, `stacked=nn.tree.stacked_paths(model)`, as `make_train_step` passes them; other
    arrays are copied whole. Without offloading, nothing changes.

    Args:
        optimizer: An optimizer that treats each layer of a parameter separately, such as Adam, but not clipping by the
            global norm.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params):
        return _on_host_if_asked(inner.init(memory.to_device(params)), params)

    def update(updates, state, params=None, *, stacked: Collection[str] | None = None, **extra):
        if not any(map(memory.is_on_host, jax.tree.leaves((state, params)))):
            return inner.update(updates, state, params, stacked=stacked, **extra)
        step = functools.partial(inner.update, stacked=(), **extra)  # sees one layer at a time
        changes, after = {}, state
        for repeats, paths in _groups(updates, stacked or ()):
            part = (_only(tree, paths, updates) for tree in (updates, state, params))
            moved, new = _whole(step, *part) if repeats is None else _scanned(step, repeats, *part)
            changes, after = changes | moved, _joined(after, new, updates)
        return changes, after

    return optax.GradientTransformationExtraArgs(init, update)


def update(
    optimizer: optax.GradientTransformationExtraArgs, updates: Any, state: Any, params: Any, **extra: Any
) -> Any:
    """Calls `optimizer.update`. Raises ValueError if parameters are on the host and the optimizer does not support
    that.
    """
    try:
        return optimizer.update(updates, state, params, **extra)
    except ValueError as error:
        if "memory_space" not in str(error) or not any(map(memory.is_on_host, jax.tree.leaves(params))):
            raise
        raise ValueError(
            "the layout keeps layers on the host (OFFLOAD_LAYERS), which this optimizer does not support: use "
            "training.adamw with float32 moments, wrap everything that reads parameters in training.offload_by_layer, "
            "or omit OFFLOAD_LAYERS"
        ) from error


def apply_updates(params: Any, updates: Any) -> Any:
    """Applies updates as optax does, but in place and layer by layer for parameters on the host."""

    def apply(p: Array, u: Array) -> Any:
        if not memory.is_on_host(p):
            return optax.apply_updates(p, u)

        def layer(i: Array, p: Array) -> Array:
            return _put(p, memory.to_host(optax.apply_updates(memory.to_device(_at(p, i)), _at(u, i))), i)

        return lax.fori_loop(0, p.shape[0], layer, p)

    return jax.tree.map(apply, params, updates)


def check_offloaded(state: Any, params: dict[str, Any]) -> None:
    """Raises ValueError if the layout asks for moments on the host but all of them are on the device."""
    if (layout := sharding.current()) is None or not layout.offload.optimizer:
        return
    shapes = {x.shape for x in params.values()}
    moments = [x for x in jax.tree.leaves(state) if x.shape in shapes]
    if moments and not any(map(memory.is_on_host, moments)):
        raise ValueError(
            "the layout asks for moments on the host (OFFLOAD_OPTIMIZER), but this optimizer keeps all of them on the "
            "device: use training.adamw with float32 moments, wrap an optimizer that treats layers separately in "
            "training.offload_by_layer, or leave that out"
        )


def _on_host_if_asked(state: Any, params: dict[str, Any]) -> Any:
    """Puts moments, which are dicts by path, into the layout's memory kind."""
    if (layout := sharding.current()) is None or not layout.offload.optimizer:
        return state
    is_node = functools.partial(_by_path, params=params)
    return jax.tree.map(lambda node: memory.to_host(node) if is_node(node) else node, state, is_leaf=is_node)


def _by_path(node: Any, params: Iterable[str]) -> bool:
    """Returns True for a dict from paths of parameters, such as the moments of Adam."""
    return isinstance(node, dict) and bool(node) and set(node) <= set(params)


def _groups(params: dict[str, Any], stacked: Collection[str]) -> list[tuple[int | None, list[str]]]:
    """Groups paths by their number of stacked layers; None is the group of arrays outside stacks."""
    groups: dict[int | None, list[str]] = {}
    for path, leaf in params.items():
        repeats = jax.tree.leaves(leaf)[0].shape[0] if path in stacked and jax.tree.leaves(leaf) else None
        groups.setdefault(repeats, []).append(path)
    return list(groups.items())


def _only(tree: Any, paths: list[str], params: dict[str, Any]) -> Any:
    """Returns `tree` restricted to these parameters."""
    is_node = functools.partial(_by_path, params=params)

    def cut(node: Any) -> Any:
        return {path: node[path] for path in paths if path in node} if is_node(node) else node

    return jax.tree.map(cut, tree, is_leaf=is_node)


def _joined(tree: Any, part: Any, params: dict[str, Any]) -> Any:
    """Returns `tree` with its entries replaced by those of `part`."""
    is_node = functools.partial(_by_path, params=params)
    return jax.tree.map(lambda old, new: old | new if is_node(old) else new, tree, part, is_leaf=is_node)


def _whole(step: Update, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Updates arrays outside stacks, in a loop of one iteration."""
    once, updates = run_once_later(updates)

    def run(_, carry: Any) -> Any:
        updates, state = carry
        changes, new = step(updates, *memory.to_device((state, params)))
        return changes, memory.to_host_like(state, new)

    return lax.fori_loop(0, once, run, (_as_changes(step, updates, state, params), state))


def _scanned(step: Update, repeats: int, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Updates layer by layer, in place: moments in their buffers, and updates in those of the gradients."""
    is_node = functools.partial(_by_path, params=updates)
    nodes, tree = jax.tree.flatten(state, is_leaf=is_node)
    held, common = [n if is_node(n) else None for n in nodes], [None if is_node(n) else n for n in nodes]

    def layer(i: Int[Array, ""], carry: Any) -> Any:
        updates, held, _ = carry
        here = memory.to_device(_at(held, i))
        mixed = [common[k] if h is None else h for k, h in enumerate(here)]
        changes, new = step(_at(updates, i), jax.tree.unflatten(tree, mixed), memory.to_device(_at(params, i)))
        new = jax.tree.flatten(new, is_leaf=is_node)[0]
        back = [None if h is None else new[k] for k, h in enumerate(held)]
        return (
            _put(updates, changes, i),
            _put(held, memory.to_host_like(held, back), i),
            [new[k] if h is None else None for k, h in enumerate(held)],
        )

    start = _as_changes(step, updates, state, params), held, common
    changes, held, common = lax.fori_loop(0, repeats, layer, start)
    return changes, jax.tree.unflatten(tree, [c if h is None else h for h, c in zip(held, common, strict=True)])


def _at(tree: Any, i: Int[Array, ""]) -> Any:
    """Returns layer `i` of arrays with a leading axis of layers."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree: Any, layer: Any, i: Int[Array, ""]) -> Any:
    """Writes layer `i` of arrays with a leading axis of layers."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), tree, layer)


def _as_changes(step: Update, updates: Any, state: Any, params: Any) -> Any:
    """Casts the gradients to the dtype of their updates."""
    shapes, _ = jax.eval_shape(lambda *args: step(*memory.to_device(args)), updates, state, params)
    return jax.tree.map(lambda g, shape: jnp.asarray(g, shape.dtype), updates, shapes)
