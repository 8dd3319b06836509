"""Merging of models of one architecture: averages, SLERP, task vectors with TIES, and dense models into experts.

All functions take models, or trees of arrays such as the parameters of an adapter, and return a new one in the dtypes
of the first. Matrices that a stack stores together are merged one by one, so the result does not depend on the stack's
groups.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxlib import nn
from maxlib._utils.paths import dotted

_SEPARATE = ("layers", "unstaged_layers", "expert")  # axes along which an array holds several matrices


def average(models: Iterable[Any], *, weights: Sequence[float] | None = None) -> Any:
    """Averages parameters: of a run's last checkpoints, or a soup of several runs (Wortsman et al. 2022, 2203.05482).

        merged = average([model, jax.tree.map(lambda x: 2 * x, model)], weights=[2, 1])

    Args:
        models: Models of one architecture; an iterator is read one by one, so that only two are in memory.
        weights: Weight of each; they are divided by their sum. By default all are equal.

    Raises:
        ValueError: when there is no model, a model has another structure, or weights do not fit.
    """
    factors = None if weights is None else iter(weights)
    first, totals, mass, count = None, [], 0.0, 0
    for model in models:
        factor = 1.0 if factors is None else next(factors, math.nan)
        first = model if first is None else first
        scaled = [factor * _wide(x) if _is_float(x) else x for x in _leaves(model, like=first)]
        totals = [a + b if _is_float(a) else a for a, b in zip(totals, scaled, strict=True)] if totals else scaled
        mass, count = mass + factor, count + 1
    if not count or not mass or not math.isfinite(mass) or (weights is not None and len(weights) != count):
        raise ValueError(f"average needs models and a weight for each, whose sum is not 0; got {count} and {weights}")
    leaves, tree = jax.tree.flatten(first)
    pairs = zip(totals, leaves, strict=True)
    return tree.unflatten([(x / mass).astype(like.dtype) if _is_float(like) else like for x, like in pairs])


def slerp(first: Any, second: Any, t: float) -> Any:
    """Interpolates between two models on the sphere: each matrix as a vector (Shoemake 1985), t = 0 is the first.

    sin((1 - t) w) / sin(w) * a + sin(t w) / sin(w) * b, w the angle between a and b. Nearly parallel vectors are
    interpolated linearly.

    Args:
        first: A model.
        second: Another of the same architecture.
        t: Share of the second.

    Raises:
        ValueError: when the structures differ.
    """

    def arc(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
        cosine = jnp.vdot(a, b) / jnp.maximum(jnp.linalg.norm(a) * jnp.linalg.norm(b), 1e-30)
        angle = jnp.arccos(jnp.clip(cosine, -1.0, 1.0))
        sine = jnp.sin(angle)
        is_line = sine < 1e-4
        safe = jnp.where(is_line, 1.0, sine)
        near = jnp.where(is_line, 1 - t, jnp.sin((1 - t) * angle) / safe)
        far = jnp.where(is_line, t, jnp.sin(t * angle) / safe)
        return near * a + far * b

    return _by_matrix(lambda pair: arc(*pair), [first, second])


def ties(
    models: Sequence[Any],
    *,
    base: Any = None,
    density: float = 0.2,
    weights: Sequence[float] | None = None,
    majority: Literal["total", "frequency"] = "total",
) -> Any:
    """Merges the changes that fine-tuning made (TIES, Yadav et al. 2023, arXiv:2306.01708).

    Of each matrix of changes the largest share `density` stays. Each number's sign is elected, and those with that
    sign are averaged; `base` plus this average is the result. `density=1` with one model returns it.

    Args:
        models: Fine-tuned models.
        base: The model from which they started; None if `models` are changes themselves, such as the parameters of
            LoRA.
        density: Share of the numbers of each matrix to keep.
        weights: Factor of each model's changes, by default 1.
        majority: Elects a sign by the sum of the changes ("total"), or by their number ("frequency").

    Raises:
        ValueError: when structures or the number of weights differ, or `density` is outside (0, 1].
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    factors = np.ones(len(models)) if weights is None else np.asarray(weights, np.float32)
    if factors.shape != (len(models),) or not len(models):
        raise ValueError(f"there must be models and a weight for each, got {len(models)} and {weights}")

    def merge(arrays: list[Array]) -> Array:
        changes = jnp.stack(arrays if base is None else [x - arrays[0] for x in arrays[1:]])  # [models, ...]
        changes = jax.vmap(lambda x: _largest(x, density))(changes)
        votes = changes if majority == "total" else jnp.sign(changes)
        elected = jnp.sign(changes) == jnp.where(votes.sum(axis=0) >= 0, 1, -1)[None]
        scaled = changes * factors.reshape(-1, *(1,) * (changes.ndim - 1))
        merged = jnp.where(elected, scaled, 0).sum(axis=0) / jnp.maximum(elected.sum(axis=0), 1)
        return merged if base is None else arrays[0] + merged

    return _by_matrix(merge, list(models) if base is None else [base, *models])


def upcycle(dense: Any, sparse: Any) -> Any:
    """Fills a model with experts from a dense one (sparse upcycling, Komatsuzaki et al. 2023, arXiv:2212.05055).

    Each expert becomes a copy of the dense MLP of its layer; all other parameters that both have are copied, and
    routers keep the values that they have in `sparse`. If routers' weights sum to 1, the result computes what the dense
    model did, until training lets experts differ.

    Args:
        dense: The dense model, such as a Llama.
        sparse: A new model with experts of the width of the dense MLP, such as a Mixtral.

    Raises:
        ValueError: when a parameter of `sparse` that is no router's has no counterpart of its shape.
    """
    source = {path: v.get_value() for path, v in nn.variables(nn.unstack(dense)).items()}
    separate = nn.unstack(sparse)
    filled = {}
    for path, variable in nn.variables(separate).items():
        shape, name = variable.get_value().shape, path.replace(".moe.", ".mlp.").replace(".moe_norm.", ".mlp_norm.")
        has_experts = variable.get_metadata().get("axes", ())[:1] == ("expert",)
        value = source.get(name)
        if value is not None and value.shape == (shape[1:] if has_experts else shape):
            filled[path] = jnp.broadcast_to(value, shape).astype(variable.get_value().dtype)
        elif ".router." not in path:
            raise ValueError(
                f"{path} {shape} has no counterpart in the dense model"
                + ("" if value is None else f", whose {name} is {value.shape}")
                + ": both must have the same sizes, and experts the width of the dense MLP"
            )
    values, rest = nn.partition(separate, lambda *_: True)
    full = nn.combine(values | filled, rest)
    return jax.tree.map(
        lambda x: x.restacked() if isinstance(x, nn.Stack) else x, full, is_leaf=lambda x: isinstance(x, nn.Stack)
    )


def _by_matrix(merge: Callable[[list[Array]], Array], models: list[Any]) -> Any:
    """Applies `merge` to the arrays of all models at each path, matrix by matrix, in float32."""
    named = nn.tree.axes(models[0])
    leaves, tree = jax.tree_util.tree_flatten_with_path(models[0])
    others = [_leaves(model, like=models[0]) for model in models[1:]]
    merged = []
    for i, (path, first) in enumerate(leaves):
        if not _is_float(first):
            merged.append(first)
            continue
        run = merge
        for _ in [name for name in named.get(dotted(path).removesuffix(".value"), ()) if name in _SEPARATE]:
            run = jax.vmap(run)
        merged.append(run([_wide(x) for x in (first, *(leaf[i] for leaf in others))]).astype(first.dtype))
    return tree.unflatten(merged)


def _largest(x: Array, density: float) -> Array:
    """Keeps the share `density` of the numbers, those of the largest magnitude."""
    count = int(density * x.size)
    kept = jax.lax.top_k(jnp.abs(x).reshape(-1), count)[1]
    return jnp.zeros(x.size, x.dtype).at[kept].set(x.reshape(-1)[kept]).reshape(x.shape)


def _leaves(model: Any, *, like: Any) -> list[Any]:
    """Returns the arrays of a model; raises ValueError unless they have the paths and shapes of another's."""
    shapes = [[(path, jnp.shape(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)] for tree in (like, model)]
    if shapes[0] != shapes[1]:
        raise ValueError("models to merge must have the same config, and stacks with the same groups")
    return jax.tree.leaves(model)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _wide(x: Any) -> Array:
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))
