"""NVIDIA's cuDNN through `jax.nn.dot_product_attention`: named masks over whole rows, on GPUs since Ampere."""

import jax
from jaxtyping import Array, Float, Int

from maxlib.ops._attention.masks import MaskHint


def cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    scale: float,
    softcap: None = None,
    sinks: None = None,
    bias: None = None,
    mask_hint: MaskHint,
) -> tuple[Float[Array, "B T N H"], None]:
    """Returns the output; the log-sum-exp, which JAX rounds and does not differentiate, is None.

    The mask alone says what is visible; the intervals are not read.
    """
    # JAX counts the keys before the query's own, our windows count that one too.
    window = None if mask_hint.static.window is None else (mask_hint.static.window - 1, 0)
    options = {"scale": scale, "is_causal": mask_hint.static.kind == "causal", "local_window_size": window}
    # [B, T, N, H] and [B, S, K, H], as JAX wants them: key heads are not repeated.
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, **options, implementation="cudnn"), None
