"""Arrays with one row per layer: those that a stack gives to its layers, and those that layers report."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib.nn._stack_grouping import LayerGroup

Aux = dict[str, jax.Array]


def check_no_inputs(inputs: Any) -> None:
    """Raises ValueError if layers of a pipeline get inputs of their own."""
    if jax.tree.leaves(inputs):
        raise ValueError(
            "layer_inputs are not supported in a pipeline; put the values in x or ctx, or use a strategy without Pipeline"
        )


def inputs_by_slot(group: LayerGroup, layer_inputs: Any) -> list[Any] | None:
    """Returns the rows of `layer_inputs` for the layers of each slot."""
    if layer_inputs is None:
        return None
    rows = [group.layers(slot) for slot in range(group.slots)]
    return [_rows_of(row, group.repeats is None, layer_inputs) for row in rows]


def _rows_of(layers: range, alone: bool, layer_inputs: Any) -> Any:
    """Returns the rows for the layers of one slot; None if there are no rows for them."""
    given = min(len(a) for a in jax.tree.leaves(layer_inputs))
    if layers.start >= given:
        return None
    if layers[-1] >= given:
        raise ValueError(
            f"layer_inputs have {given} rows, for the first of the layers {layers.start} to {layers[-1]}, which are scanned "
            "together: group the stack so that layers without a row are stored separately (`nn.grouping_for`)"
        )
    return jax.tree.map(
        lambda a: a[layers.start] if alone else a[layers.start : layers.stop : layers.step], layer_inputs
    )


def in_layer_order(parts: Iterable[LayerGroup], auxes: Iterable[list[Aux]]) -> Aux:
    """Joins the layers' `aux` into one array per name, with a row for each layer that reports it, in layer order."""
    rows: dict[str, list[tuple[np.ndarray, jax.Array]]] = {}
    for group, found in zip(parts, auxes, strict=True):
        for slot, aux in enumerate(found):
            for name, value in aux.items():
                # [...] -> [1, ...] for a layer that is not scanned
                value = jnp.asarray(value)[None] if group.repeats is None else value
                rows.setdefault(name, []).append((np.array(group.layers(slot)), value))
    return {name: _sorted_by_layer(*zip(*found, strict=True)) for name, found in rows.items()}


def _sorted_by_layer(numbers: Iterable[np.ndarray], values: Iterable[jax.Array]) -> jax.Array:
    """Concatenates the rows of all slots and sorts them by layer."""
    order = np.argsort(np.concatenate([*numbers]))
    return jnp.concatenate([*values])[order]  # [layers, ...]
