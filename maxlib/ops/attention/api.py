"""The public attention function: checks its arguments and chooses an implementation."""


import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib.ops.attention.reference import reference


def attention(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    *,
    k_start: Int[Array, "B T"] | None = None,
    k_end: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
):
    B, T = q.shape[:2]
    k_start = jnp.zeros((B, T), jnp.int32) if k_start is None else k_start
    k_end = jnp.full((B, T), k.shape[1], jnp.int32) if k_end is None else k_end
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = reference(
        q, k, v, k_start=k_start, k_end=k_end, scale=scale, softcap=softcap, sinks=sinks, bias=bias
    )
    return (out, lse) if return_lse else out
