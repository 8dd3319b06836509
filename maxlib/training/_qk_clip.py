"""QK-clip (MuonClip, Kimi Team 2025, arXiv:2507.20534): bounds attention logits by scaling the projections of queries
and keys after a step.

The largest logit of each head is taken in the step's own forward pass. As in `probes`, each attention layer gets a
variable of zeros, a tap, whose "gradient" is the largest logits. So they are returned along with the gradients,
through scans, remat and meshes.

Shapes: B rows, T queries, S keys, N query heads, K key heads, G = N / K, H head dimension, L layers of a stack.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn, sharding
from maxlib.training.probes._hooks import beside

TAP = "max_logits"
CHUNK = 256  # queries whose scores exist at once


class MaxLogits(nnx.Variable):
    """Zeros, one for each head; its gradient is the heads' largest logits."""


def is_max_logits(path: str) -> bool:
    """Returns True for the path of a tap."""
    return path.endswith(f".{TAP}")


def max_logits_taps(trainable: dict[str, Any], rest: Any) -> tuple[dict[str, Array], Any]:
    """Returns a tap by path for each attention layer, and `rest` with layers that write to them.

    Args:
        trainable: Trained parameters by path.
        rest: The rest of the model.

    Raises:
        ValueError: for a model without such layers, a layer whose queries and keys are normalized or frozen, and in a
            pipeline.
    """
    if (layout := sharding.current()) is not None and layout.pipeline is not None:
        raise ValueError("qk_clip does not support pipelines: use a layout without one, or qk_clip=None")
    names = nn.tree.axes(rest)
    # A frozen model beside the trained one, such as a reference, is left alone.
    frozen = nn.tree.frozen_prefixes(rest)
    layers = nn.tree.find(rest, (nn.Attention, nn.MLA))
    if all(path.startswith(frozen) for path, _ in layers):
        raise ValueError("qk_clip needs a model with layers of nn.Attention or nn.MLA, this one has none")
    paths = iter(path for path, _ in layers)
    taps = {}

    def tapped(layer: Any) -> Any:
        if not _is_attention(layer):
            return layer
        path = next(paths)
        if path.startswith(frozen):
            return layer
        weight = _projection_of_queries(path, layer, trainable)
        copy = jax.tree.map(lambda leaf: leaf, layer)
        copy.__class__ = _tapped_class(type(layer))
        # The weight is [N, H, D], below the axes of stacks.
        copy.max_logits = MaxLogits(None, axes=(*names[weight][:-3], None))
        taps[f"{path}.{TAP}"] = jnp.zeros((*trainable[weight].shape[:-3], layer.num_heads))
        return copy

    rest = jax.tree.map(tapped, rest, is_leaf=_is_attention)
    return taps, rest


def clip_queries_and_keys(
    params: dict[str, Array],
    rest: Any,
    max_logits: dict[str, Array],
    *,
    limit: float,
    skipped: Bool[Array, ""] | None = None,
) -> dict[str, Array]:
    """Returns parameters whose projections of queries and keys are scaled so that logits would be at most `limit`.

    For heads with the largest logit S the factor is η = min(1, limit / S). In `nn.MLA`, the parts of queries and keys
    that are not rotated are multiplied by √η, and the rotated part of queries, whose keys all heads share, by η. In
    `nn.Attention`, heads that share keys have one η, that of the largest S, and queries and keys are multiplied by √η.

    Args:
        params: Parameters by path, after the step.
        rest: The rest of the model.
        max_logits: The largest logit of each head by path, `N` or `L N`, from the taps.
        limit: Largest logit.
        skipped: True if the step was skipped, and nothing is to change.
    """
    layers = dict(nn.tree.find(rest, (nn.Attention, nn.MLA)))
    new = dict(params)
    for tap, largest in max_logits.items():
        path = tap.removesuffix(f".{TAP}")
        layer = layers[path]
        factor = limit / jnp.maximum(largest, limit)  # [..., N]
        factor = factor if skipped is None else jnp.where(skipped, 1.0, factor)
        if isinstance(layer, nn.MLA):
            new |= _scaled_mla(params, path, layer, factor)
        else:
            new |= _scaled_gqa(params, path, layer, factor)
    return new


def _scaled_gqa(params: dict[str, Array], path: str, layer: nn.Attention, factor: Array) -> dict[str, Array]:
    groups = layer.num_heads // layer.num_kv_heads
    # [..., N] -> [..., K, G] -> [..., K]
    shared = jnp.min(factor.reshape(*factor.shape[:-1], layer.num_kv_heads, groups), axis=-1)
    by_name = {"q": jnp.repeat(jnp.sqrt(shared), groups, axis=-1), "k": jnp.sqrt(shared)}
    return {
        name: _times(params[name], heads[..., None, None] if name.endswith(".w") else heads[..., None])
        for projection, heads in by_name.items()
        for name in (f"{path}.{projection}.w", f"{path}.{projection}.b")
        if name in params
    }


def _scaled_mla(params: dict[str, Array], path: str, layer: nn.MLA, factor: Array) -> dict[str, Array]:
    half = jnp.sqrt(factor)[..., None]  # [..., N, 1]
    rotated = jnp.arange(layer.nope_dim + layer.shared_dim) >= layer.nope_dim
    of_queries = jnp.where(rotated, factor[..., None], half)  # [..., N, H]
    q, k = f"{path}.q_up.w", f"{path}.k_up.w"
    return {q: _times(params[q], of_queries[..., None]), k: _times(params[k], half[..., None])}


def _times(x: Array, factor: Array) -> Array:
    return (x * factor).astype(x.dtype)


def _is_attention(x: Any) -> bool:
    return isinstance(x, nn.Attention | nn.MLA)


def _projection_of_queries(path: str, layer: Any, trainable: dict[str, Any]) -> str:
    """Returns the path of the weight that makes a layer's queries.

    Raises:
        ValueError: for a layer whose logits do not follow the scale of its trained projections.
    """
    if type(layer) not in (nn.Attention, nn.MLA):
        raise ValueError(f"qk_clip supports nn.Attention and nn.MLA, but {path} is a {type(layer).__name__}")
    if isinstance(layer, nn.MLA):
        names = ("q_up", "k_up")
    elif layer.q_norm is not None or layer.k_norm is not None or layer.v is None:
        raise ValueError(
            f"qk_clip cannot bound the logits of {path}, whose queries or keys are normalized, or whose keys are also "
            "its values: norms of queries and keys bound logits by themselves, so leave qk_clip out"
        )
    else:
        names = ("q", "k")
    if frozen := [name for name in names if f"{path}.{name}.w" not in trainable]:
        raise ValueError(f"qk_clip scales the weights of {', '.join(names)}, but {path} has frozen ones: {frozen}")
    return f"{path}.{names[0]}.w"


@functools.cache
def _tapped_class(cls: Any) -> type:
    """Returns a subclass that can be assigned to `__class__` of an instance of `cls`, because it adds no slots."""

    def __call__(self, x: Any, ctx: Any = None, cache: Any = None) -> Any:
        out, cache = cls.__call__(self, x, ctx, cache)
        ctx = nn.make_context(*x.shape[:2]) if ctx is None else ctx
        if ctx.zigzag:
            raise ValueError("qk_clip needs tokens in order: use a layout that does not reorder them (zigzag)")
        q, k = self.queries_and_keys(x, ctx)
        seen = largest_logits(q, k, *ctx.key_intervals(self.mask), scale=self.scale)
        return beside(out, self.max_logits[...], jax.lax.stop_gradient(seen)), cache

    return type(cls.__name__, (cls,), {"__slots__": (), "__call__": __call__})


def largest_logits(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    *,
    scale: float | None,
) -> Float[Array, " N"]:
    """Returns the largest visible logit of each head, before the soft-cap and without sinks.

    Args:
        q: Queries.
        k: Keys.
        k_start: First key of each query.
        k_end: One past each query's last key.
        scale: Factor on the scores, by default `H ** -0.5`.
    """
    q, k = jax.lax.stop_gradient((q, k))
    groups = q.shape[2] // k.shape[2]
    index = jnp.arange(k.shape[1])[None, :]

    def chunk(queries: tuple[Array, Array, Array]) -> Array:
        q, k_start, k_end = queries  # of one position: [B, K, G, H], [B], [B]
        logits = jnp.einsum("BKGH,BSKH->BKGS", q, k, preferred_element_type=jnp.float32)
        visible = (index >= k_start[:, None]) & (index < k_end[:, None])
        # [B, K, G, S] -> [K, G]
        return jnp.max(jnp.where(visible[:, None, None], logits, -jnp.inf), axis=(0, 3))

    # [B, T, N, H] -> [T, B, K, G, H]
    by_position = jnp.moveaxis(q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3]), 1, 0)
    largest = jax.lax.map(chunk, (by_position, k_start.T, k_end.T), batch_size=min(CHUNK, q.shape[1]))
    # [T, K, G] -> [N]
    return jnp.max(largest, axis=0).reshape(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
