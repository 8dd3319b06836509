"""The public attention function: checks its arguments and chooses an implementation."""

import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib._utils.varying import is_tracked
from maxlib.hardware import current_device, explained_device
from maxlib.ops._attention.masks import MaskHint, StaticMask
from maxlib.ops._attention.reference import AttentionInputs
from maxlib.ops._attention.table import ATTENTION, AttentionCall, without_device
from maxlib.ops._axes import check_axes, require
from maxlib.ops._cost import register_flops
from maxlib.ops._dispatch import Choice, Explanation, Shaped


@overload
def attention(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"] | int,
    *,
    k_start: Int[Array, "B T"] | None = None,
    k_end: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
    mask_hint: StaticMask | MaskHint | None = None,
    implementation: str | None = None,
    return_lse: Literal[False] = False,
) -> Float[Array, "B T N Hv"]: ...


@overload
def attention(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"] | int,
    *,
    k_start: Int[Array, "B T"] | None = None,
    k_end: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
    mask_hint: StaticMask | MaskHint | None = None,
    implementation: str | None = None,
    return_lse: Literal[True],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]: ...


def attention(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"] | int,
    *,
    k_start: Int[Array, "B T"] | None = None,
    k_end: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
    mask_hint: StaticMask | MaskHint | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attends from each query `i` to the keys `[k_start[i], k_end[i])`: softmax(scale q k + bias) v.

    Accumulates in float32 (float64 for float64 inputs). The logits are scaled, then soft-capped, then biased.

        q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))  # four query heads share two key heads
        k_end = jnp.broadcast_to(jnp.arange(1, 9), (2, 8))
        y = ops.attention(q, k, k, k_end=k_end)  # causal: query i attends to the keys up to i

    Args:
        q: Queries, N heads.
        k: Keys, K heads; each is shared by N / K consecutive query heads (grouped-query attention).
        v: Values, K heads, of any width; or their width Hv, if they are the first channels of the keys (latent
            attention), which some kernels then read only once.
        k_start: Index of the first key that each query attends to; default 0.
        k_end: One past the index of the last key that each query attends to; default S. Bounds may be out of range. An
            empty interval gives zeros.
        scale: Factor on the products of queries and keys; default `Hk ** -0.5`.
        softcap: Logits become `softcap * tanh(logits / softcap)`; None for no cap.
        sinks: An extra logit per query head in the softmax's denominator, without a value (GPT-OSS).
        bias: Added to the logits; B and N may be 1.
        mask_hint: Static description of the intervals (`Mask.static`), with segments if they hide keys, for kernels
            that take a named mask. It must agree with the intervals. By default it is derived from absent bounds.
        implementation: Name of the implementation to run. None runs the first in order of preference that supports the
            call; `explain_attention` shows which one and why. "offline" runs the first that also compiles without the
            device, for plans.
        return_lse: True also returns the log-sum-exp of every row's logits.

    Returns:
        The output, in the dtype of `q`; with `return_lse` also the float32 log-sum-exp (sink included, `-inf` for empty
        rows). Both are differentiable.

    Raises:
        ValueError: When shapes do not agree, or the named implementation cannot run the call.
    """
    hint, shared = _hint(mask_hint, k_start, k_end), isinstance(v, int)
    v = _values(k, v) if isinstance(v, int) else v
    call = _describe(q, k, v, k_start, k_end, softcap, sinks, bias, return_lse, hint, shared=shared)
    start = jnp.zeros(q.shape[:2], jnp.int32) if k_start is None else k_start
    end = jnp.full(q.shape[:2], k.shape[1], jnp.int32) if k_end is None else k_end
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    choice = ATTENTION.choose(call, without_device(call) if implementation == "offline" else implementation)
    arrays = q, k, v, start, end, sinks, bias, hint and hint.segment_ids
    out, lse = _attention(*arrays, static=hint and hint.static, scale=scale, softcap=softcap, choice=choice)
    return (out, lse) if return_lse else out


def _flops(q, k, v, k_start, k_end, *_) -> Any:
    """Counts the FLOPs of both matmuls over all visible pairs of a query and a key, or all pairs for unknown bounds."""
    pairs = math.prod(q.shape[:-2]) * k.shape[-3]
    if not isinstance(k_start, jax.ShapeDtypeStruct) and not isinstance(k_end, jax.ShapeDtypeStruct):
        seen = jnp.minimum(k_end, k.shape[-3]) - jnp.maximum(k_start, 0)
        pairs = jnp.sum(jnp.maximum(seen, 0).astype(jnp.float32))
    # Per pair and query head: 2 Hk for the logit, 2 Hv for the weighted value.
    return 2.0 * q.shape[-2] * (q.shape[-1] + v.shape[-1]) * pairs


def _hint(mask_hint: StaticMask | MaskHint | None, k_start, k_end) -> MaskHint | None:
    """Returns the hint for the intervals: without bounds, every query attends to all keys."""
    if mask_hint is None and k_start is None:
        mask_hint = StaticMask("full", aligned=True) if k_end is None else StaticMask("any")
    return MaskHint(mask_hint) if isinstance(mask_hint, StaticMask) else mask_hint


@register_flops(_flops, static=("static", "scale", "softcap", "choice"), name="attention")
def _attention(q, k, v, k_start, k_end, sinks, bias, segment_ids, *, static, scale, softcap, choice: Choice):
    kernel = ATTENTION[choice.kernel]
    if static is not None and not (static.aligned or kernel.takes_mask_hint):
        # In a ring, bounds may be outside of this part of the keys, and windows count from there. Other kernels skip
        # more tiles with clipped bounds.
        k_start, k_end = (jnp.clip(x, 0, k.shape[1]) for x in (k_start, k_end))
    hint = MaskHint(static, segment_ids) if kernel.takes_mask_hint and static is not None else None
    x = AttentionInputs(q, k, v, k_start, k_end, scale, softcap, sinks, bias, hint)
    return kernel.run(x, **choice.options)


def explain_attention(
    q: Shaped,
    k: Shaped,
    v: Shaped | int,
    *,
    k_start: Shaped | None = None,
    k_end: Shaped | None = None,
    softcap: float | None = None,
    sinks: Shaped | None = None,
    bias: Shaped | None = None,
    mask_hint: StaticMask | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `attention` would run for these arguments, and why.

    Args:
        q: Queries; this and every other array may be a `jax.ShapeDtypeStruct`.
        k: Keys.
        v: Values, or their width.
        k_start: As in `attention`.
        k_end: As in `attention`.
        softcap: As in `attention`.
        sinks: As in `attention`.
        bias: As in `attention`.
        mask_hint: As in `attention`.
        implementation: As in `attention`.
        return_lse: As in `attention`.
        device: Platform, and jax's `device_kind` or a short name, such as `("gpu", "H100")` or `("tpu", "v6e")`;
            default: the device in use.

    Returns:
        An `Explanation`, which prints as a readable text.

    Raises:
        ValueError: When shapes do not agree, no implementation has the name `implementation`, or the device is unknown.
    """
    hint, shared, device = _hint(mask_hint, k_start, k_end), isinstance(v, int), explained_device(device)
    v = jax.eval_shape(functools.partial(_values, width=v), k) if isinstance(v, int) else v
    call = _describe(q, k, v, k_start, k_end, softcap, sinks, bias, return_lse, hint, device, shared=shared)
    return ATTENTION.explain(call, implementation)


def _values(k, width: int):
    """Returns the first channels of the keys."""
    Hk = check_axes("attention", k=(k, "B S K Hk"))["Hk"]
    require("attention", 0 < width <= Hk, f"v must be values, or their width, from 1 to Hk={Hk}", f"{width}")
    return k[..., :width]


def _describe(q, k, v, k_start, k_end, softcap, sinks, bias, return_lse, hint, device=None, *, shared) -> AttentionCall:
    _check(q, k, v, k_start, k_end, softcap, sinks, bias)
    if hint is not None and hint.segment_ids is not None:
        shapes, got = (q.shape[:2], k.shape[:2]), tuple(ids.shape for ids in hint.segment_ids)
        require("attention", got == shapes, f"segment_ids must be B T and B S, here {shapes}", f"shapes {got}")
    (B, T, N, Hk), (S, K, Hv) = q.shape, v.shape[1:]
    uses = {
        "gqa": K != N,
        "value_dim": Hv != Hk,
        "softcap": softcap is not None,
        "sinks": sinks is not None,
        "bias": bias is not None,
        "lse": return_lse,
        "float64": q.dtype == jnp.float64,
    }
    platform, device_kind = device or current_device()
    return AttentionCall(
        batch=B,
        queries=T,
        keys=S,
        heads=N,
        kv_heads=K,
        key_dim=Hk,
        value_dim=Hv,
        dtype=str(q.dtype),
        features=frozenset(name for name, is_used in uses.items() if is_used),
        platform=platform,
        device_kind=device_kind,
        mask=hint and hint.static,
        tracked=is_tracked(q, k, v),
        shared=shared,
    )


def _check(q, k, v, k_start, k_end, softcap, sinks, bias) -> None:
    op = "attention"
    sizes = check_axes(
        op,
        q=(q, "B T N Hk"),
        k=(k, "B S K Hk"),
        v=(v, "B S K Hv"),
        k_start=(k_start, "B T"),
        k_end=(k_end, "B T"),
        sinks=(sinks, "N"),
    )
    B, T, N, S, K = (sizes[axis] for axis in "BTNSK")
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(op, jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be floating point", str(x.dtype))
    require(op, K > 0 and N % K == 0, "the N query heads must be a multiple of the K key heads", f"N={N} and K={K}")
    require(op, min(B, T, S) > 0, "attention needs at least one row, one query and one key", f"B={B}, T={T} and S={S}")
    for name, ends in (("k_start", k_start), ("k_end", k_end)):
        is_index = ends is None or jnp.issubdtype(ends.dtype, jnp.integer)
        require(op, is_index, f"{name} must hold integer key indices", getattr(ends, "dtype", None))
    if bias is not None:
        fits = len(bias.shape) == 4 and bias.shape[0] in (1, B) and bias.shape[1] in (1, N) and bias.shape[2:] == (T, S)
        must = f"bias must have the axes B N T S = {(B, N, T, S)}, where B and N may be 1"
        require(op, fits, must, f"shape {bias.shape}")
    require(op, softcap is None or softcap > 0, "softcap must be positive, or None for no cap", str(softcap))
