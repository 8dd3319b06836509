"""Expert balancing without a loss: each step updates the routers' biases by how often each expert was chosen."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from maxlib import nn
from maxlib.nn.router import expert_bias_paths, moved_biases
from maxlib.training._placement import place_like_parameters


def with_moved_biases(
    rest: Any, trainable: dict[str, Any], counts: Array | None, *, rate: Any, skipped: Bool[Array, ""] | None
) -> Any:
    """Returns `rest` with updated expert biases of trained routers (arXiv:2408.15664).

    Routers of frozen layers, or of the base of an adapter, keep their biases, as they keep their weights.

    Args:
        rest: The parts of the model that are not trained, including the biases.
        trainable: Trained parameters by path.
        counts: How often each expert of each layer was chosen, `L E`; None if the loss does not report it.
        rate: Step size of the biases.
        skipped: True if the step is skipped; None if steps are never skipped.
    """
    paths = _bias_paths(rest, counts)
    trained = [bias for bias in dict.fromkeys(paths) if _trains(bias, rest, trainable)]
    if not trained:
        return rest
    if counts is None or len(counts) != len(paths):
        _warn_without_counts(paths, counts)
        return rest
    new = moved_biases(rest, paths, counts, rate=rate)
    old = {path: nn.variables(rest)[path].get_value() for path in trained}
    new = {path: new[path] if skipped is None else jnp.where(skipped, old[path], new[path]) for path in trained}
    return nn.combine(place_like_parameters(new, new, rest), rest)


def _bias_paths(rest: Any, counts: Array | None) -> list[str]:
    """Lists the biases whose routers report counts; multi-token prediction modules only do so if the loss runs them."""
    frozen = nn.tree.frozen_prefixes(rest)
    paths = [path for path in expert_bias_paths(rest) if not path.startswith(frozen)]
    nodes = jax.tree_util.tree_leaves_with_path(rest, is_leaf=lambda x: isinstance(x, nn.mtp.MTP))
    is_mtp = tuple(
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}." for path, x in nodes if isinstance(x, nn.mtp.MTP)
    )
    if counts is None or len(counts) == len(paths):
        return paths
    return [path for path in paths if not path.startswith(is_mtp)]


def _trains(bias: str, rest: Any, trainable: dict[str, Any]) -> bool:
    """Returns True if the weight of this bias's router is trained, other than through an adapter."""
    router, known = bias.rpartition(".")[0] + ".", nn.variables(rest)
    return any(path.startswith(router) and not isinstance(known[path], nnx.LoRAParam) for path in trainable)


def _warn_without_counts(paths: list[str], counts: Array | None) -> None:
    reported = "none" if counts is None else f"those of {len(counts)} layers"
    warnings.warn(
        f"the model has {len(paths)} expert biases of trained routers, but the loss reports {reported} of their experts' "
        "counts (Stats.expert_counts), so no bias is updated and nothing balances the experts: derive the loss from "
        "training.Loss, or pass router_bias_update_rate=0 and call nn.router.update_router_bias yourself",
        stacklevel=2,
    )
