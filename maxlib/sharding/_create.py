"""Parameters that are born in their place on the mesh."""

import difflib
import itertools
import warnings
from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib.sharding._presets import PRESETS, Rules
from maxlib.sharding._rules import AnyMesh, check, drop_uneven, memory_kind, parameter_spec, use

Model = TypeVar("Model")
# What axes are called: in the presets' rules, and besides in maxlib's layers.
_PATCH = ("channel", "patch_row", "patch_column")
_NAMES = {*itertools.chain(*PRESETS.values()), "head_dim", "norm", "position", "router", "act_embed", *_PATCH}


def shardings(model: Model, mesh: AnyMesh, rules: Rules) -> Model:
    """`model` (or its `jax.eval_shape`) with every array replaced by the `NamedSharding` that `rules` give it.

    Variables without axis names are replicated. Raises ValueError, naming the parameter, when a mesh axis does not
    divide a dimension or two names share a mesh axis; warns of a rule that no axis is named after.
    """
    check(mesh, rules)
    names = set()

    def place(path, leaf):
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(mesh, P())
        names.update(leaf.get_metadata().get("axes", ()))
        return leaf.replace(sharding_of(jax.tree_util.keystr(path, simple=True, separator="."), leaf, mesh, rules))

    placed = jax.tree_util.tree_map_with_path(place, model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    _warn_of_unknown(rules, set(filter(None, names)))
    return placed


def _warn_of_unknown(rules: Rules, names: set[str]) -> None:
    """A name that is not known may be of an activation in a layer from elsewhere, so it is no error."""
    for name in sorted(rules.keys() - names - _NAMES):
        close = difflib.get_close_matches(name, sorted(names | _NAMES), 1)
        meant = f"is {close[0]!r} meant?" if close else f"the model's parameters have {sorted(names)}"
        warnings.warn(
            f"no axis is named {name!r}, which the rules have, unless a layer of your own calls an activation so: {meant}",
            stacklevel=4,
        )


def sharding_of(path: str, variable: nnx.Variable, mesh: AnyMesh, rules: Rules) -> NamedSharding:
    """Where one parameter lives; its axis names bind to the trailing dimensions. The rule "layers_memory" is for the
    matrices that a stack repeats.
    """
    names, shape = variable.get_metadata().get("axes", ()), variable.get_value().shape
    partition = parameter_spec(names, shape, rules, mesh, path=path)
    _, uneven = drop_uneven(partition, shape, mesh)
    if uneven:
        name = ("layers", *names)[uneven[0] - len(shape) + len(names) + 1]
        raise ValueError(
            f"{path}: axis {name!r} of size {shape[uneven[0]]} does not divide over {partition[uneven[0]]!r} of the mesh "
            f"{dict(mesh.shape)}; change the mesh, or take rules with {name!r}: None"
        )
    repeated = len(shape) > len(names) > 1  # a matrix of every layer of a stack
    return NamedSharding(mesh, partition, memory_kind=memory_kind("layers_memory", rules) if repeated else None)


def create(build: Callable[[], Model], mesh: Mesh, rules: Rules) -> Model:
    """Runs `build` so that every parameter is born where `rules` put it; values equal those on one device."""
    places = shardings(jax.eval_shape(build), mesh, rules)
    with use(mesh, rules):
        return jax.jit(build, out_shardings=places)()
