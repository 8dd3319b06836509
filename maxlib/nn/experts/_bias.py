"""Biases on the choice of experts, which balance the experts without a loss (Wang et al. 2024, arXiv:2408.15664)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib._utils.paths import dotted
from maxlib.nn.stack import Stack
from maxlib.nn.tree import combine, variables


class ExpertBias(nnx.Variable):
    """Bias on the choice of experts. It has no gradient; a training step updates it (`update_router_bias`)."""


def update_router_bias(model: Any, load: Float[Array, "L E"] | Float[Array, " E"], *, rate: float) -> Any:
    """Updates the expert biases of all routers to balance the experts (Wang et al. 2024, arXiv:2408.15664).

    Each bias changes by `rate`: up for experts with less than the mean load, down for those with more. A `Trainer` and
    `training.make_train_step` do this automatically.

    Args:
        model: A model or a layer. Every layer that reports a load must have an expert bias.
        load: `aux["moe/load"]` or `aux["moe/counts"]` of the step: a row for each MoE layer, or `E` for a single layer.
        rate: Size of a change.

    Returns:
        A new model.

    Raises:
        ValueError: when the number of rows differs from the number of expert biases.
    """
    paths = expert_bias_paths(model)
    load = jnp.atleast_2d(load)
    if len(paths) != len(load):
        raise ValueError(
            f"load must have a row for each of the model's {len(paths)} router expert biases, got {load.shape}"
        )
    return combine(moved_biases(model, paths, load, rate=rate), model)


def moved_biases(model: Any, paths: list[str], load: Float[Array, "L E"], *, rate: Any) -> dict[str, Array]:
    """Computes the new expert biases of `update_router_bias` by path.

    Args:
        model: A model or a layer.
        paths: The path of every row of `load`, from `expert_bias_paths`.
        load: Loads or counts of the experts.
        rate: Size of a change.
    """
    # Scanned layers share one variable [repeats, E]: collect its rows of `load`.
    rows: dict[str, list[int]] = {}
    for row, path in enumerate(paths):
        rows.setdefault(path, []).append(row)
    of_model = variables(model)

    def moved(path: str) -> Array:
        bias = of_model[path].get_value()
        # [repeats, E], or [E] for a layer that is not scanned.
        loads = load[jnp.array(rows[path])].reshape(bias.shape)
        mean = loads.mean(axis=-1, keepdims=True)
        # Ignore differences by rounding, so that sums over microbatches update the same biases as the whole batch.
        uneven = jnp.abs(mean - loads) > 1e-5 * mean
        return bias + (rate * jnp.where(uneven, jnp.sign(mean - loads), 0)).astype(bias.dtype)

    return {path: moved(path) for path in rows}


def expert_bias_paths(model: Any) -> list[str]:
    """Lists the path of every layer's expert bias in layer order; layers that are scanned together share a path.

    Args:
        model: A model or a layer.
    """
    found = []
    is_node = lambda x: isinstance(x, Stack | ExpertBias)
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_node):
        if isinstance(node, ExpertBias):
            found.append(dotted(path))
        elif isinstance(node, Stack):
            for i in range(len(node)):
                place, _ = node.where(i)
                _, group, slot = place.split(".")
                inner = expert_bias_paths(node.groups[int(group)][int(slot)])
                found += [".".join(filter(None, (dotted(path), place, one))) for one in inner]
    return found
