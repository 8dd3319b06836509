"""A model as flat dicts from path to array, as optimizers, checkpoints and filters use it."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib._utils.arguments import check_dtype as _check_dtype
from maxlib._utils.paths import dotted
from maxlib.sharding.layers import is_stacked as _is_stacked
from maxlib.sharding.layers import own_axes as own_axes

Filter = Callable[[str, nnx.Variable], bool]


class StackedLayers(nnx.Module):
    """Base class of modules that store numbered layers in groups, by which functions on paths recognize them
    (`nn.Stack`).

    Attributes:
        groups: A list of groups, each a list of layers; in a group that repeats, they have a leading axis of repeats.
        grouping: The period and the repeats of each group.
    """

    groups: nnx.List
    grouping: tuple[tuple[int, int], ...]


class HasFrozen(nnx.Module):
    """Base class of modules with parts that `default_filter` does not train (`post_training.WithFrozen`).

    Attributes:
        frozen_parts: Names of the attributes that hold these parts.
    """

    frozen_parts: ClassVar[tuple[str, ...]] = ()


def is_variable(x: Any) -> bool:
    """Returns True for an `nnx.Variable`."""
    return isinstance(x, nnx.Variable)


def is_stack(x: Any) -> TypeGuard[StackedLayers]:
    """Returns True for a stack of layers."""
    return isinstance(x, StackedLayers)


def variables(model: Any) -> dict[str, nnx.Variable]:
    """Returns every `nnx.Variable` of `model` by dotted path, such as `"layers.groups.0.0.attn.q.w"`."""
    return dict(find(model, nnx.Variable))


def find(model: Any, kinds: Any) -> list[tuple[str, Any]]:
    """Lists the parts of `model` of the given types with their dotted paths; parts within them are not listed."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, kinds))
    return [(dotted(path), x) for path, x in leaves if isinstance(x, kinds)]


def axes(model: Any) -> dict[str, tuple[str | None, ...]]:
    """Returns the axis names of every variable by path, one for each dimension, `()` if it has none.

    If a stack stores several layers together, the first name is `"layers"` or `"unstaged_layers"`; `own_axes` removes
    it.
    """
    return {path: tuple(v.get_metadata().get("axes", ())) for path, v in variables(model).items()}


def summed_axes(model: Any) -> dict[str, tuple[str, ...]]:
    """Returns the names of the input axes (those summed over) of every matrix that multiplies activations, by path."""
    named = {path: v.get_metadata().get("summed") for path, v in variables(model).items()}
    return {path: tuple(names) for path, names in named.items() if names is not None}


def stacked_paths(model: Any) -> frozenset[str]:
    """Returns the paths of the variables that store several layers on a leading axis."""
    return frozenset(path for path, names in axes(model).items() if _is_stacked(names))


def groupings(model: Any) -> dict[str, list[list[int]]]:
    """Returns the groups of every stack by path, each as `[period, repeats]`."""
    return {path: [[*group] for group in stack.grouping] for path, stack in stacks(model).items()}


def stacks(model: Any) -> dict[str, Any]:
    """Returns every stack of `model` by path, without stacks in layers of stacks."""
    return dict(find(model, StackedLayers))


def path_of(model: Any, node: Any) -> str:
    """Returns the dotted path of this object in `model`."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: x is node)
    return next(dotted(path) for path, leaf in leaves if leaf is node)


def pattern_paths(model: Any) -> dict[str, str]:
    """Maps the path of every variable to its pattern path, which does not depend on the grouping of stacks.

    `"layers.groups.0.1.attn.q.w"` and `"layers.groups.1.0.attn.q.w"` become `"layers.attn.q.w"`.
    """
    if is_stack(model):
        # groups.0.1.attn.q.w -> attn.q.w: without group and slot.
        slots = ((f"groups.{n}.{i}", layer) for n, group in enumerate(model.groups) for i, layer in enumerate(group))
        return {f"{slot}.{path}": short for slot, layer in slots for path, short in pattern_paths(layer).items()}
    patterns = {}
    for path, leaf in find(model, (nnx.Variable, StackedLayers)):
        if is_variable(leaf):
            patterns[path] = path
        else:
            patterns |= {f"{path}.{p}": f"{path}.{short}" for p, short in pattern_paths(leaf).items()}
    return patterns


def is_trainable(path: str, variable: nnx.Variable) -> bool:
    """Returns True for parameters of a floating dtype."""
    value = variable.get_value()
    return isinstance(variable, nnx.Param) and hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def default_filter(model: Any) -> Filter:
    """Returns the default filter of trained parameters: adapter factors if the model has any, else all floating
    parameters, and never those of a frozen part.

    Args:
        model: The model; `jax.eval_shape` of it is enough.
    """
    frozen = frozen_prefixes(model)
    short = pattern_paths(model)
    factors = [short[path] for path, v in variables(model).items() if isinstance(v, nnx.LoRAParam)]
    # Train only the factors if there are any; `adapters.save` assumes that the base has not changed.
    kind = nnx.Param if all(path.startswith(frozen) for path in factors) else nnx.LoRAParam

    def chosen(path: str, variable: nnx.Variable) -> bool:
        return isinstance(variable, kind) and is_trainable(path, variable) and not path.startswith(frozen)

    return chosen


def frozen_prefixes(model: Any) -> tuple[str, ...]:
    """Returns the path prefixes of frozen parts, such as `"frozen."` (`HasFrozen`)."""
    # The path of the model itself is "".
    return tuple(f"{path}.{name}.".lstrip(".") for path, node in find(model, HasFrozen) for name in node.frozen_parts)


def partition(model: Any, filter: Filter = is_trainable) -> tuple[dict[str, Any], Any]:
    """Splits a model into parameters and everything else.

    Args:
        model: The model.
        filter: Called with the pattern path and the variable; True selects it. The default selects floating parameters.

    Returns:
        The selected arrays as `{path: array}`, and the model without them.
    """
    # Filters get pattern paths, so that they work for every grouping.
    short = pattern_paths(model)
    trainable = {path: v.get_value() for path, v in variables(model).items() if filter(short[path], v)}

    def keep(path, leaf):
        # None is not a leaf of a pytree, so a gradient with respect to the rest has no entry for it.
        return leaf.replace(None) if dotted(path) in trainable else leaf

    return trainable, jax.tree_util.tree_map_with_path(keep, model, is_leaf=is_variable)


def combine(trainable: dict[str, Any], rest: Any) -> Any:
    """Puts the arrays of `partition` back into the rest of the model.

    Args:
        trainable: Arrays by path.
        rest: The model without them.

    Returns:
        The whole model.

    Raises:
        KeyError: when `trainable` has a path that is not missing from `rest`.
    """
    # Paths whose variable has not been found yet.
    left = set(trainable)

    def put(path, leaf):
        name = dotted(path)
        if not is_variable(leaf) or name not in trainable:
            return leaf
        left.discard(name)
        return leaf.replace(trainable[name])

    model = jax.tree_util.tree_map_with_path(put, rest, is_leaf=is_variable)
    if left:
        raise KeyError(f"no place in the model for {sorted(left)}")
    return model


def cast(model: Any, dtype: Any, filter: Filter = is_trainable) -> Any:
    """Casts parameters to `dtype`, such as bfloat16.

    Call it in the function that builds a model. An optimizer should then round stochastically, as
    `training.bfloat16_moments` does.

    Args:
        model: The model.
        dtype: The new dtype.
        filter: Called with the pattern path and the variable; True selects it.

    Raises:
        TypeError: when `dtype` is not floating.
    """
    _check_dtype(dtype)
    taken, rest = partition(model, filter)
    return combine({path: value.astype(dtype) for path, value in taken.items()}, rest)


def num_parameters(model: Any) -> int:
    """Returns the number of parameters in all variables; also works on `jax.eval_shape` of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(model))
