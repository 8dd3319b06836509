"""A model as flat dicts from path to array: what optimizers, checkpoints and filters see."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Filter = Callable[[str, nnx.Variable], bool]
# Where a layer lies below its stack, and where several lie on a leading axis: see `nn.Stack`.
PLACE = r"(?:lead|prefix|body|suffix)\.\d+"
_STACKED = re.compile(rf"(^|\.){PLACE}(?=\.|$)")
_REPEATED = re.compile(r"(?P<part>(?:.*?\.)??(?:lead|body))\.\d+\.")


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def variables(model: Any) -> dict[str, nnx.Variable]:
    """Every `nnx.Variable` of `model` by dotted path, such as `"layers.body.0.attn.q.w"`."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable)
    return {_dotted(path): leaf for path, leaf in leaves if is_variable(leaf)}


def axes(model: Any) -> dict[str, tuple[str, ...]]:
    """The axis names of every variable; their number is its logical rank, whatever a stack adds in front."""
    return {path: tuple(v.get_metadata().get("axes", ())) for path, v in variables(model).items()}


def summed_axes(model: Any) -> dict[str, tuple[str, ...]]:
    """Of every matrix that multiplies activations, the names of the axes that are summed over: its inputs."""
    named = {path: v.get_metadata().get("summed") for path, v in variables(model).items()}
    return {path: tuple(names) for path, names in named.items() if names is not None}


def pattern_path(path: str) -> str:
    """`path` without a stack's layout: `"layers.body.0.attn.q.w"` becomes `"layers.attn.q.w"`."""
    return _STACKED.sub("", path).lstrip(".")


def repeated_part(path: str) -> str | None:
    """The part of a stack, such as `"layers.body"`, that keeps several layers in the array at `path`, on its leading
    axis; None of other arrays."""
    found = _REPEATED.match(path)
    return found and found["part"]


def is_repeated(path: str) -> bool:
    """Whether a path is of layers that a stack repeats, whose arrays have a leading axis of layers."""
    return repeated_part(path) is not None


def is_trainable(path: str, variable: nnx.Variable) -> bool:
    """The default filter: parameters of a floating dtype."""
    value = variable.get_value()
    return isinstance(variable, nnx.Param) and hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def partition(model: Any, filter: Filter = is_trainable) -> tuple[dict[str, Any], Any]:
    """Splits `model` into `{path: array}` of what `filter(logical path, variable)` takes, and all the rest."""
    trainable = {path: v.get_value() for path, v in variables(model).items() if filter(pattern_path(path), v)}

    def keep(path, leaf):
        return leaf.replace(None) if _dotted(path) in trainable else leaf

    return trainable, jax.tree_util.tree_map_with_path(keep, model, is_leaf=is_variable)


def combine(trainable: dict[str, Any], rest: Any) -> Any:
    """The inverse of `partition`. Raises KeyError when `trainable` has a path that `rest` did not leave open."""
    left = set(trainable)

    def put(path, leaf):
        name = _dotted(path)
        if not is_variable(leaf) or name not in trainable:
            return leaf
        left.discard(name)
        return leaf.replace(trainable[name])

    model = jax.tree_util.tree_map_with_path(put, rest, is_leaf=is_variable)
    if left:
        raise KeyError(f"no place in the model for {sorted(left)}")
    return model


def cast(model: Any, dtype: Any, filter: Filter = is_trainable) -> Any:
    """`model` with the parameters that `filter(logical path, variable)` takes in `dtype`, such as bfloat16: half the
    memory of float32.

    Call it in the function that builds a model. An optimizer should then round stochastically, as
    `training.in_bfloat16` does.
    """
    taken, rest = partition(model, filter)
    return combine({path: value.astype(dtype) for path, value in taken.items()}, rest)


def num_parameters(model: Any) -> int:
    """How many numbers all variables hold; also works on `jax.eval_shape` of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(model))


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
