"""Few queries against a cache of latents on Hopper, with maxlib's kernel, which reads each latent once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib._utils.varying import vary_alike
from maxlib.kernels.attention.logits import Logits
from maxlib.kernels.attention.merge import merge_sinks
from maxlib.kernels.attention.mosaic_gpu import config
from maxlib.ops._attention.chunked import chunked


class Spec(NamedTuple):
    """Static parameters: the maths, the width of values, and the tiles."""

    scale: float
    softcap: float | None
    value_dim: int
    tiles: config.HopperLatentTiles


def mosaic_gpu_mla(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S 1 Hk"],
    v: Float[Array, "B S 1 Hv"],
    *,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: None = None,
    tiles: config.HopperLatentTiles | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns the output and the log-sum-exp of each row's logits, as `reference` does.

    Only the shape of `v` matters: the values are the first channels of `k`. The gradient is computed by `chunked`, and
    that of `v` is zero.
    """
    if scale <= 0:  # the kernel takes the maximum before it scales, which needs scale > 0
        q, scale = q * jnp.sign(jnp.asarray(scale, q.dtype)), abs(scale) or 1.0
    S = k.shape[1]
    tiles = tiles or config.latent_tiles(k.shape[3])
    spec = Spec(scale, softcap, v.shape[3], tiles)
    q, k, k_start, k_end = vary_alike((q, k.astype(q.dtype), k_start, k_end))
    out, lse = _attend(spec, q, k, *(jnp.clip(x.astype(jnp.int32), 0, S) for x in (k_start, k_end)))
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


def _attend(spec: Spec, q, k, start, end):
    # Mosaic GPU takes longer to import than all of maxlib.
    from maxlib.kernels.attention.mosaic_gpu.decode import decode_latents

    # The memory unit takes multiples of 8 rows; [B, S, 1, Hk] -> [B, S, Hk]
    latents = jnp.pad(k[:, :, 0], ((0, 0), (0, -k.shape[1] % 8), (0, 0)))
    logits = Logits(spec.scale, spec.softcap)
    return decode_latents(q, latents, start, end, value_dim=spec.value_dim, logits=logits, tiles=spec.tiles)


def _attend_fwd(spec: Spec, *args):
    return _attend(spec, *args), args


def _attend_bwd(spec: Spec, args, cotangents):
    q, k, start, end = args
    options = {"k_start": start, "k_end": end, "scale": spec.scale, "softcap": spec.softcap}
    # Decoding rarely needs a gradient: use that of `chunked`, which computes the same function.
    _, vjp = jax.vjp(lambda q, k: chunked(q, k, k[..., : spec.value_dim], **options), q, k)
    return *vjp(cotangents), None, None


_attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend.defvjp(_attend_fwd, _attend_bwd)
