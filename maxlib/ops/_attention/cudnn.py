"""NVIDIA's cuDNN through `jax.nn.dot_product_attention`, on GPUs from Ampere on: named masks over whole rows, and one
query against a cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib.hardware import current_device, is_blackwell
from maxlib.ops._attention.cudnn_sinks import attend_with_sinks
from maxlib.ops._attention.masks import MaskHint


def head_width(key_dim: int, value_dim: int, device_kind: str) -> int:
    """Returns the width to which heads are padded: JAX needs one width for q, k and v, and GPUs support only some
    widths.

    Blackwell's backward kernels support head widths up to 128, and 256 (docs.nvidia.com/cudnn/operations/Attention).
    """
    width = max(key_dim, value_dim)
    return 256 if is_blackwell(device_kind) and 128 < width < 256 else width


def cudnn(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    *,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    scale: float,
    softcap: None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: None = None,
    mask_hint: MaskHint,
) -> tuple[Float[Array, "B T N Hv"], None]:
    """Returns the output and None for the log-sum-exp, which JAX rounds and does not differentiate.

    Visibility comes from the named mask; only for one query against a cache are the intervals read. Heads of different
    widths are padded with zeros, which change neither the logits nor the first columns of the output.
    """
    width = head_width(q.shape[-1], v.shape[-1], current_device()[1])
    q, k, wide = (jnp.pad(x.astype(q.dtype), ((0, 0),) * 3 + ((0, width - x.shape[-1]),)) for x in (q, k, v))
    causal, window = mask_hint.static.kind == "causal", mask_hint.static.window
    # [B, T, N, H] and [B, S, K, H] as JAX expects them: key heads are not repeated.
    if q.shape[1] == 1 and not mask_hint.static.aligned:
        out = _one_query(q, k, wide, k_end[:, 0] - k_start[:, 0], scale)
    elif sinks is not None:
        out = attend_with_sinks(q, k, wide, sinks, scale=scale, causal=causal, window=window)
    else:
        # This function counts the keys before the query; our windows include the query's own key.
        before = None if window is None else (window - 1, 0)
        options = {"scale": scale, "is_causal": causal, "local_window_size": before}
        out = jax.nn.dot_product_attention(q, k, wide, **options, implementation="cudnn")
    return out[..., : v.shape[-1]], None


def _one_query(
    q: Float[Array, "B 1 N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], length: Int[Array, " B"], scale
) -> Float[Array, "B 1 N H"]:
    """Attends to the first `length` keys of each row; a row without keys gets zeros."""
    options: dict[str, Any] = {
        "query_seq_lengths": jnp.ones_like(length),
        "key_value_seq_lengths": jnp.maximum(length, 1),
    }
    out = jax.nn.dot_product_attention(q, k, v, scale=scale, **options, implementation="cudnn")
    return jnp.where(length[:, None, None, None] > 0, out, 0)
