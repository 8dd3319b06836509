"""NVIDIA's cuDNN through `jax.nn.dot_product_attention`, on GPUs from Ampere on: named masks over whole rows, and one
query against a cache.
"""

import functools
import inspect
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib._utils.varying import vary_alike
from maxlib.hardware import current_device, is_blackwell
from maxlib.kernels.attention.merge import merge_sinks, sinks_gradient
from maxlib.ops._attention.reference import AttentionInputs, Results


def head_width(key_dim: int, value_dim: int, device_kind: str) -> int:
    """Returns the width to which heads are padded: JAX needs one width for q, k and v, and GPUs support only some
    widths.

    Blackwell's backward kernels support head widths up to 128, and 256 (docs.nvidia.com/cudnn/operations/Attention).
    """
    width = max(key_dim, value_dim)
    return 256 if is_blackwell(device_kind) and 128 < width < 256 else width


def cudnn(x: AttentionInputs) -> Results:
    """Returns the output and None for the log-sum-exp, which JAX rounds and does not differentiate.

    Visibility comes from the named mask; only for one query against a cache are the intervals read. Heads of different
    widths are padded with zeros, which change neither the logits nor the first columns of the output.
    """
    assert x.mask_hint is not None
    static, scale, sinks = x.mask_hint.static, x.scale, x.sinks
    width = head_width(x.q.shape[-1], x.v.shape[-1], current_device()[1])
    q, k, v = (jnp.pad(a.astype(x.q.dtype), ((0, 0),) * 3 + ((0, width - a.shape[-1]),)) for a in (x.q, x.k, x.v))
    causal, window = static.kind == "causal", static.window
    # [B, T, N, H] and [B, S, K, H] as JAX expects them: key heads are not repeated.
    if q.shape[1] == 1 and not static.aligned:
        out = _one_query(q, k, v, x.end[:, 0] - x.start[:, 0], scale)
    elif sinks is not None:
        out = attend_with_sinks(q, k, v, sinks, scale=scale, causal=causal, window=window)
    else:
        # This function counts the keys before the query; our windows include the query's own key.
        before = None if window is None else (window - 1, 0)
        options = {"scale": scale, "is_causal": causal, "local_window_size": before}
        out = jax.nn.dot_product_attention(q, k, v, **options, implementation="cudnn")
    return out[..., : x.v.shape[-1]], None


def _one_query(
    q: Float[Array, "B 1 N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], length: Int[Array, " B"], scale
) -> Float[Array, "B 1 N H"]:
    """Attends to the first `length` keys of each row; a row without keys gets zeros."""
    K = k.shape[2]
    # Each key head is a row of the batch, as caches are stored heads first: XLA drops their transposition.
    k, v = (einops.rearrange(x, "B S K H -> (B K) S 1 H") for x in (k, v))
    of_head = jnp.repeat(length, K)
    options: dict[str, Any] = {
        "query_seq_lengths": jnp.ones_like(of_head),
        "key_value_seq_lengths": jnp.maximum(of_head, 1),
    }
    q = einops.rearrange(q, "B 1 (K G) H -> (B K) 1 G H", K=K)
    out = jax.nn.dot_product_attention(q, k, v, scale=scale, **options, implementation="cudnn")
    out = einops.rearrange(out, "(B K) 1 G H -> B 1 (K G) H", K=K)
    return jnp.where(length[:, None, None, None] > 0, out, 0)


# ---------------------------------------------------------------------------------------------- sinks

# A sink s (GPT-OSS, https://arxiv.org/abs/2508.10925) is one more logit in the softmax's denominator. It scales
# attention without it, whose log-sum-exp is `lse`: out' = out exp(lse - lse') with lse' = log(exp(lse) + exp(s)).
#
# cuDNN's backward kernel computes P = exp(logits - lse), D = rowsum(d_out * out), d_logits = P (d_out v^T - D) and
# dv = P^T d_out. With a sink the formulas are the same for out' and lse', so the kernel gets these. The gradient of the
# sink is d_s = -sum(exp(s - lse') D).
#
# `jax.nn.dot_product_attention(return_residual=True)` does not suffice: it rounds lse to the dtype of the queries, and
# its gradient leaves out that of lse. So private functions of JAX are called.

INPUTS = ("query", "key", "value")
UNUSED = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")
KEPT = ("activation", "fwd_output", "grad_output")  # of the forward pass: lse, out; and d_out
OPTIONS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
KNOWN = (
    (*INPUTS, *UNUSED, *KEPT, *OPTIONS),  # jax 0.10 and 0.11
    (*INPUTS, *UNUSED, *KEPT, "score_mod_args", *OPTIONS, "score_mod"),  # jax 0.12
)


class Mask(NamedTuple):
    """Static parameters: the factor on the logits, and whether they have a causal mask, with a window or None."""

    scale: float
    causal: bool
    window: int | None

    def named(self) -> dict[str, Any]:
        """Returns the arguments of JAX's functions; their window includes the query's own key, as ours does."""
        kind = _jax().MaskType
        mask = kind.CAUSAL if self.causal else kind.NO_MASK
        return {"scale": self.scale, "mask_type": mask, "sliding_window_length": self.window}


def _jax() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


@functools.cache
def _parameters() -> tuple[str, ...]:
    """Returns the parameters of the backward pass in this version of JAX, or none if it lacks a function."""
    try:
        theirs = _jax()
        needed = ("dot_product_attention", "MaskType", "AttentionLayout", "_dot_product_attention_bwd_p_wrapper")
        parameters = inspect.signature(theirs._dot_product_attention_bwd_impl).parameters
    except (ImportError, AttributeError):
        return ()
    return tuple(parameters) if all(hasattr(theirs, name) for name in needed) else ()


def refuses_sinks() -> str | None:
    """Returns the reason why cuDNN cannot run sinks with this version of JAX, or None."""
    if _parameters() in KNOWN:
        return None
    return f"takes sinks by private functions of jax 0.10 to 0.12, and in jax {jax.__version__} they differ"


def attend_with_sinks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    sinks: Float[Array, " N"],
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> Float[Array, "B T N H"]:
    """Returns attention with a sink logit per query head; it is differentiable in all four arrays.

    Args:
        q: Queries, in bfloat16 or float16, as keys and values.
        k: Keys.
        v: Values.
        sinks: One logit per query head, without a value.
        scale: Factor on the products of queries and keys.
        causal: True if a query attends to no later key.
        window: Number of keys that a query attends to, its own included, under a causal mask; None for no limit.
    """
    return _attend(Mask(scale, causal, window), *vary_alike((q, k, v, sinks)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(mask: Mask, q, k, v, sinks):
    return _forward(mask, q, k, v, sinks)[0]


def _forward(mask: Mask, q, k, v, sinks):
    # out [B, T, N, H] and lse [B, N, T], in float32
    out, lse = _jax().dot_product_attention(q, k, v, **mask.named(), return_residual=True)
    out, lse = merge_sinks(out, jnp.swapaxes(lse, 1, 2), sinks)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, sinks, out, lse)


def _backward(mask: Mask, residuals, d_out):
    q, k, v, sinks, out, lse = residuals
    dq, dk, dv = _kernel(mask, q, k, v, jnp.swapaxes(lse, 1, 2), out, d_out)
    return dq, dk, dv, sinks_gradient(sinks, out, lse, d_out)


_attend.defvjp(_forward, _backward)


def _kernel(mask: Mask, q, k, v, lse, out, d_out):
    """Runs cuDNN's backward kernel: the gradients of q, k and v."""
    theirs = _jax()
    nothing = [jnp.zeros(0, q.dtype)] * len(UNUSED)
    options = {"seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), **mask.named()}
    options |= {"layout": theirs.AttentionLayout.BTNH.value}
    options |= {"score_mod": None} if "score_mod" in _parameters() else {}
    return theirs._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *nothing, lse, out, d_out, **options)
