"""The check that layers which are scanned together have one structure."""

import collections
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from maxlib._utils.paths import dotted
from maxlib.nn._jaxpr_equality import is_same_program
from maxlib.nn._stack_grouping import layer_groups
from maxlib.nn.tree import variables

# Part of jit's cache key, which a plain context variable would not be.
skip_check = jax.make_user_context(False)


@contextmanager
def skip_layer_check() -> Iterator[None]:
    """Skips checking that layers scanned together are identical, so only one is traced.

    This makes describing a deep model ten times faster. Use it for models that are checked elsewhere.
    """
    with skip_check(True):
        yield


def slots_built_apart(build: Callable, keys: Any, grouping: dict[str, int]) -> set[range]:
    """Compares every scanned layer with the first of its slot.

    Returns:
        The slots whose layers have one structure but initial values that depend on the index.

    Raises:
        ValueError: when the structure of two layers differs, including static attributes.
    """
    # Trace the constructor for its operations and the shapes and structure of its result, without making arrays.
    trace = lambda i: jax.make_jaxpr(functools.partial(build, i), return_shape=True)(keys[i])
    # Layers stored alone need not match.
    scanned = [group for group in layer_groups(**grouping).values() if group.repeats]
    apart = set()
    for numbers in (group.layers(slot) for group in scanned for slot in range(group.slots)):
        program, first = trace(numbers[0])
        for i in numbers[1:]:
            other_program, other = trace(i)
            if not is_same_program(program, other_program):
                apart.add(numbers)
            if jax.tree.flatten(first) != jax.tree.flatten(other):  # leaves and structure
                raise ValueError(
                    f"layers {numbers[0]} and {i} would be scanned together under {grouping} but differ in "
                    f"{_difference(first, other)}; nn.grouping_for finds a valid grouping"
                )
    return apart


def check_alike(layers: list[Any], numbers: range, grouping: dict[str, int]) -> None:
    """Raises ValueError unless the layers with these numbers have one structure and one shape for each array."""
    # The structure holds static attributes too, such as a mask; arrays are compared by shape, not by value.
    described = {
        i: (jax.tree.structure(layers[i]), jax.tree.map(jnp.shape, jax.tree.leaves(layers[i]))) for i in numbers
    }
    for i in numbers[1:]:
        if described[i] != described[numbers[0]]:
            # Only shapes are needed to say where they differ.
            differ = _difference(*(jax.eval_shape(lambda i=i: layers[i]) for i in (numbers[0], i)))
            raise ValueError(
                f"layers {numbers[0]} and {i} would be scanned together under {grouping} but differ in {differ}; a larger "
                "prefix stores the first layers alone, and nn.grouping_for finds a grouping for the kinds of layers"
            )


def check_layer_axis(layers: Any) -> None:
    """Raises ValueError unless all arrays of layers that are scanned together have a leading axis of one size."""
    # Arrays of n layers are [n, ...]; an array of a part made for one layer lacks the n.
    leaves = jax.tree_util.tree_leaves_with_path(layers)
    rows = {dotted(path).removesuffix(".value"): jnp.shape(x)[:1] for path, x in leaves}
    # The size that most arrays have is right: a new part is a few of many.
    counts = collections.Counter(rows.values())
    most = max(counts, key=lambda size: counts[size], default=())
    wrong = next((path for path, size in rows.items() if size != most), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong} of a scanned block lacks the axis of layers, of size {', '.join(map(str, most))}: a scanned block "
            "stores several layers. To give each layer a new part, take the layers out of the scan with "
            "`alone = model.layers.unstacked()`, change each `alone[i]`, and put them back with `alone.regrouped(...)`"
        )


def _difference(first, other) -> str:
    """Names the arrays in which two layers differ; if there are none, static attributes differ."""
    shape = lambda array: f"{array.dtype} {array.shape}"
    shapes = lambda variable: str(jax.tree.map(shape, variable.get_value())).strip("'")
    found = [{path: shapes(x) for path, x in variables(layer).items()} for layer in (first, other)]
    paths = sorted({path for path, _ in found[0].items() ^ found[1].items()})
    said = [f"{path} ({found[0].get(path, 'absent')} and {found[1].get(path, 'absent')})" for path in paths]
    return ", ".join(said) or "options, not arrays"
