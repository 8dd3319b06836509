"""tokamax's attention for Hopper and Blackwell GPUs (the extra `maxlib[cuda]`), by its public function.

The package is imported when it is first called. Its kernels take an interval of keys per query, which that function
does not offer: it names masks, as cuDNN does.
"""

from jaxtyping import Array, Float, Int

from maxlib.ops._attention.masks import MaskHint


def tokamax(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    *,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    scale: float,
    softcap: float | None = None,
    sinks: None = None,
    bias: None = None,
    mask_hint: MaskHint,
) -> tuple[Float[Array, "B T N Hv"], None]:
    """Returns the output; the log-sum-exp is None. The mask alone says what is visible."""
    try:
        from tokamax import dot_product_attention
    except ImportError as error:
        raise ImportError("implementation='tokamax' needs the package tokamax: pip install 'maxlib[cuda]'") from error
    window = None if mask_hint.static.window is None else (mask_hint.static.window - 1, 0)
    options = {"scale": scale, "logits_soft_cap": softcap, "is_causal": mask_hint.static.kind == "causal"}
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    return dot_product_attention(q, k, v, **options, local_window_size=window, implementation="mosaic"), None
