"""Attention on Hopper by maxlib's kernels: padding, and custom gradients around them.

The kernels are imported when they are first called, because Mosaic GPU takes longer to import than all of maxlib.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlib._utils.varying import vary_alike
from maxlib.kernels.attention.logits import LOG2_E, Logits
from maxlib.kernels.attention.merge import merge_sinks
from maxlib.kernels.attention.mosaic_gpu import config
from maxlib.ops._attention.chunked import chunked_gradients
from maxlib.ops._attention.reference import AttentionInputs, Results


class Spec(NamedTuple):
    """Static parameters: the maths, the tiles, and the number of real queries."""

    logits: Logits
    tiles: config.HopperAttentionTiles
    T: int


def mosaic_gpu(x: AttentionInputs, tiles: config.HopperAttentionTiles | None = None) -> Results:
    """Returns the output and the log-sum-exp of each row's logits, as `reference` does.

    Differentiable once (reverse mode) in q, k, v and sinks; the gradients are the same in every run. `tiles` are those
    of `config.attention_tiles` by default.
    """
    x = _prepared(x)
    T, sinks = x.q.shape[1], jnp.full(x.q.shape[2], -jnp.inf) if x.sinks is None else x.sinks.astype(jnp.float32)
    q, k, v, sinks, *ends = vary_alike((x.q, x.k, x.v, sinks, x.start, x.end))
    q, k, v = (_to_eights(a) for a in (q, k, v))
    ends = (jnp.pad(a, ((0, 0), (0, q.shape[1] - T)), mode="edge") for a in ends)
    tiles = tiles or config.attention_tiles(q.shape[3], v.shape[3], x.softcap is not None)
    out, lse = _attend(Spec(Logits(x.scale, x.softcap), tiles, T), q, k, v, sinks, *ends)
    return out[:, :T], lse[:, :T]


def _prepared(x: AttentionInputs) -> AttentionInputs:
    """Returns arguments with a positive scale, arrays of one dtype, and bounds within the keys."""
    q, scale = x.q, x.scale
    if scale <= 0:  # the kernels take the maximum before they scale, which needs scale > 0
        q, scale = q * jnp.sign(jnp.asarray(scale, q.dtype)), abs(scale) or 1.0
    start, end = (jnp.clip(a.astype(jnp.int32), 0, x.k.shape[1]) for a in (x.start, x.end))
    return x._replace(q=q, k=x.k.astype(q.dtype), v=x.v.astype(q.dtype), scale=scale, start=start, end=end)


def _to_eights(x):
    """Pads rows to a multiple of 8, the memory unit's tile; beyond the array it reads zeros and writes nothing."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), *[(0, 0)] * (x.ndim - 2)))


def _attend(spec: Spec, q, k, v, sinks, start, end):
    """Computes attention without a gradient.

    For few queries the decode kernel is used, in which more blocks of threads share the keys.
    """
    T = spec.T
    if not config.decodes(T, q.shape[2] // k.shape[2]):
        return _forward(spec, q, k, v, sinks, start, end)
    from maxlib.kernels.attention.mosaic_gpu.decode import decode

    out, lse = decode(q[:, :T], k, v, start[:, :T], end[:, :T], logits=spec.logits, tiles=spec.tiles.decode)
    return tuple(_to_eights(x) for x in merge_sinks(out, lse, sinks))


def _forward(spec: Spec, q, k, v, sinks, start, end):
    from maxlib.kernels.attention.mosaic_gpu import forward

    tiles = spec.tiles.forward
    pad = ((0, 0), (0, -q.shape[1] % tiles.rows))
    # Queries added at the end repeat the last one, so that they neither widen a tile's range nor make it partial.
    start, end = (jnp.pad(x, pad, mode="edge") for x in (start, end))
    out, lse = forward.forward(q, k, v, start, end, sinks * LOG2_E, logits=spec.logits, tiles=tiles)
    return out, jnp.swapaxes(lse, 1, 2)[:, : q.shape[1]] / LOG2_E  # [B, N, P] -> [B, T, N], base 2 -> natural


def _attend_fwd(spec: Spec, *args):
    out, lse = _forward(spec, *args)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (args, out, lse)


def _attend_bwd(spec: Spec, residuals, cotangents):
    from maxlib.kernels.attention.mosaic_gpu import backward

    (q, k, v, sinks, start, end), out, lse = residuals
    d_out, d_lse = cotangents
    # delta = sum(d_out * out) - d_lse, the row's term in the softmax's gradient: d_logits = probs * (d_probs - delta).
    seen = jnp.isfinite(lse)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    delta = jnp.where(seen, delta, 0.0)
    # The sink's probability is exp(sink - lse) and its d_probs is 0 (no value): d_sink = -sum(prob * delta).
    d_sinks = -jnp.sum(jnp.exp(sinks[None, None] - jnp.where(seen, lse, jnp.inf)) * delta, axis=(0, 1))
    # [B, T, N] -> [B, N, P] with P a multiple of 128: a kernel loads the numbers of a whole tile of queries.
    # lse = +inf gives probabilities exp(-inf) = 0 to empty rows and to the padding.
    lse, delta = _by_head(jnp.where(seen, lse * LOG2_E, jnp.inf), jnp.inf), _by_head(delta, 0.0)
    start, end = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % 128)), mode="edge") for x in (start, end))
    operands = backward.Operands(q, k, v, d_out.astype(q.dtype), lse, delta, start, end)
    # Separate kernels for dq and for dk and dv: each sums over the other's axis in registers, without atomics.
    dq = backward.queries(operands, logits=spec.logits, tiles=spec.tiles.dq)
    parts = [
        x
        for wanted, tiles in spec.tiles.keys.items()
        for x in backward.keys(operands, wanted, logits=spec.logits, tiles=tiles)
    ]
    return dq, *parts, d_sinks, None, None


def _by_head(x, fill: float):
    """Puts heads first and pads queries to a multiple of 128: `B T N` to `B N P`."""
    return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, -x.shape[1] % 128)), constant_values=fill)


_attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend.defvjp(_attend_fwd, _attend_bwd)


# ---------------------------------------------------------------------------------------------- latents


class LatentSpec(NamedTuple):
    """Static parameters: the maths, the width of values, and the tiles."""

    logits: Logits
    value_dim: int
    tiles: config.HopperLatentTiles


def mosaic_gpu_mla(x: AttentionInputs, tiles: config.HopperLatentTiles | None = None) -> Results:
    """Attends from few queries to a cache of latents, `B S 1 Hk`, each of which the kernel reads once.

    Only the shape of the values matters: they are the first channels of the keys. The gradient is computed by
    `chunked`, and that of `v` is zero.
    """
    x = _prepared(x)
    spec = LatentSpec(Logits(x.scale, x.softcap), x.v.shape[3], tiles or config.latent_tiles(x.k.shape[3]))
    out, lse = _attend_latents(spec, *vary_alike((x.q, x.k, x.start, x.end)))
    return (out, lse) if x.sinks is None else merge_sinks(out, lse, x.sinks)


def _attend_latents(spec: LatentSpec, q, k, start, end):
    from maxlib.kernels.attention.mosaic_gpu.decode import decode_latents

    # The memory unit takes multiples of 8 rows; [B, S, 1, Hk] -> [B, S, Hk]
    latents = _to_eights(k[:, :, 0])
    return decode_latents(q, latents, start, end, value_dim=spec.value_dim, logits=spec.logits, tiles=spec.tiles)


def _attend_latents_fwd(spec: LatentSpec, *args):
    return _attend_latents(spec, *args), args


def _attend_latents_bwd(spec: LatentSpec, args, cotangents):
    q, k, start, end = args
    values = k[..., : spec.value_dim]
    x = AttentionInputs(q, k, values, start, end, spec.logits.scale, spec.logits.softcap)
    dq, dk, dv = chunked_gradients(x, cotangents)
    return dq, dk.at[..., : spec.value_dim].add(dv), None, None


_attend_latents = jax.custom_vjp(_attend_latents, nondiff_argnums=(0,))
_attend_latents.defvjp(_attend_latents_fwd, _attend_latents_bwd)
