"""Attention on TPUs: layouts, and the custom gradient around the kernels.

The kernels are imported when they are first called: importing Pallas takes longer than importing maxlib.
"""

import dataclasses
import math
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib.hardware import current_device
from maxlib.kernels.attention.logits import LOG2_E, Logits
from maxlib.kernels.attention.mosaic_tpu import config, visits
from maxlib.kernels.attention.sinks import merge_sinks
from maxlib.kernels.attention.tiles import tiles


def count_tiles(sizes: config.TPUAttentionTiles, batch: int, queries: int, keys: int, groups: int) -> int:
    """Counts the tiles of the pass that has more of them; the table holds `config.MOST_TILES`."""
    cuts = (_Cut.of(blocks, queries, keys, groups) for blocks in (sizes.forward, sizes.backward))
    return max(batch * -(-queries // cut.queries) * -(-keys // cut.keys) for cut in cuts)


class Spec(NamedTuple):
    """Static parameters: the maths, the tiles, and the TPU generation."""

    scale: float
    softcap: float | None
    chip: config.Generation
    tiles: config.TPUAttentionTiles


def mosaic_tpu(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    *,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: None = None,
    chip: config.Generation | None = None,
    tiles: config.TPUAttentionTiles | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns the output and the log-sum-exp of each row's logits, as `reference` does.

    `chip` is by default the device in use, and `tiles` are those of `config.attention_tiles`. Differentiable once
    (reverse mode) in q, k, v and sinks.
    """
    if scale <= 0:  # the kernels take the maximum before they scale, which needs scale > 0
        q, scale = q * jnp.sign(jnp.asarray(scale, q.dtype)), abs(scale) or 1.0
    chip = chip or config.generation(current_device()[1])
    spec = Spec(scale, softcap, chip, tiles or config.attention_tiles(chip, *k.shape[1:]))
    start, end = (jnp.clip(x.astype(jnp.int32), 0, k.shape[1]) for x in (k_start, k_end))
    out, lse = _attend(spec, q, k, v, start, end)
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


# ---------------------------------------------------------------------------------------------- the custom VJP


def _attend(spec: Spec, q, k, v, start, end):
    """Computes attention without a gradient; few queries use the decode kernel, which keeps the layout of keys."""
    if not config.decodes(*q.shape[1:3]):
        return _forward(spec, q, k, v, start, end)
    from maxlib.kernels.attention.mosaic_tpu.decode import decode

    options = {
        "block": _decode_block(spec.tiles.decode, *k.shape[1:3]),
        "parts": spec.chip.cores,
        "vmem": spec.chip.vmem,
    }
    return decode(q, k, v, start, end, logits=Logits(spec.scale, spec.softcap), **options)


def _decode_block(keys: int, num_keys: int, num_kv_heads: int) -> int:
    """Rounds the keys of a block to whole registers of keys times heads, or takes all keys."""
    unit = config.LANES // math.gcd(config.LANES, num_kv_heads)
    return min(-(-keys // unit) * unit, num_keys)


def _forward(spec: Spec, q, k, v, start, end):
    from maxlib.kernels.attention.mosaic_tpu.forward import forward

    cut = _Cut.of(spec.tiles.forward, q.shape[1], k.shape[1], q.shape[2] // k.shape[2])
    keys, values = (cut.blocks(x.astype(q.dtype)) for x in (k, v))
    given = cut.rows(q, k.shape[2]), keys, values, cut.ends(start), cut.ends(end)
    logits, table = Logits(spec.scale, spec.softcap), visits.table(*cut.tiles(start, end))
    out, lse = forward(*given, table, logits=logits, vmem=spec.chip.vmem)
    return cut.unrows(out), cut.unrows(jnp.swapaxes(lse, -1, -2))[..., 0] / LOG2_E


def _attend_fwd(spec: Spec, *args):
    out, lse = _forward(spec, *args)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (args, out, lse)


def _attend_bwd(spec: Spec, residuals, cotangents):
    from maxlib.kernels.attention.mosaic_tpu import backward

    (q, k, v, start, end), out, lse = residuals
    d_out, d_lse = cotangents
    seen = jnp.isfinite(lse)
    # delta = sum(d_out * out) - d_lse, the row's term in the softmax's gradient: d_logits = probs * (d_probs - delta).
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    delta = jnp.where(seen, delta, 0.0)
    lse = jnp.where(seen, lse * LOG2_E, jnp.inf)  # empty rows get probabilities exp(-inf) = 0

    cut = _Cut.of(spec.tiles.backward, q.shape[1], k.shape[1], q.shape[2] // k.shape[2])
    # [B, T, N] -> [B, K, Q, 1, R]: one number per row of a tile, along the lanes.
    vector = lambda x, fill: jnp.swapaxes(cut.rows(x[..., None], k.shape[2], fill), -1, -2)
    rows = backward.Rows(
        q=cut.rows(q, k.shape[2]),
        d_out=cut.rows(d_out.astype(q.dtype), k.shape[2]),
        lse=vector(lse, jnp.inf),
        delta=vector(delta, 0.0),
        start=cut.ends(start),
        end=cut.ends(end),
    )
    options = {"logits": Logits(spec.scale, spec.softcap), "vmem": spec.chip.vmem}
    keys, values = (cut.blocks(x.astype(q.dtype)) for x in (k, v))
    visited, full = cut.tiles(start, end)
    # dk and dv visit the same tiles column by column: [1, B, Q, C] -> [1, B, C, Q].
    turned = visits.table(jnp.swapaxes(visited, 2, 3), jnp.swapaxes(full, 2, 3))
    dq = backward.queries(rows, keys, values, visits.table(visited, full), **options)
    dk, dv = backward.keys(rows, keys, values, turned, **options)
    return cut.unrows(dq), cut.unblocks(dk).astype(k.dtype), cut.unblocks(dv).astype(v.dtype), None, None


_attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend.defvjp(_attend_fwd, _attend_bwd)


# ---------------------------------------------------------------------------------------------- layouts


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Sizes by which T queries and S keys are cut into blocks; heads that share a key head are rows of one block."""

    T: int
    S: int
    groups: int
    queries: int
    keys: int

    @classmethod
    def of(cls, blocks: config.Blocks, T: int, S: int, groups: int) -> "_Cut":
        return cls(T, S, groups, config.queries(blocks, groups, T), config.keys(blocks, S))

    def rows(self, x, num_kv_heads: int, fill: float = 0.0):
        """Cuts queries into blocks: `B T N H` to `B K Q (G t) H`."""
        x = jnp.pad(x, ((0, 0), (0, -self.T % self.queries), (0, 0), (0, 0)), constant_values=fill)
        return einops.rearrange(x, "B (Q t) (K G) H -> B K Q (G t) H", t=self.queries, K=num_kv_heads)

    def unrows(self, x):
        """Inverts `rows`: `B K Q (G t) H` to `B T N H`."""
        x = einops.rearrange(x, "B K Q (G t) H -> B (Q t) (K G) H", G=self.groups)
        return x[:, : self.T]

    def blocks(self, x):
        """Cuts keys or values into blocks: `B S K H` to `B K C c H`."""
        x = jnp.pad(x, ((0, 0), (0, -self.S % self.keys), (0, 0), (0, 0)))
        return einops.rearrange(x, "B (C c) K H -> B K C c H", c=self.keys)

    def unblocks(self, x):
        """Inverts `blocks`: `B K C c H` to `B S K H`."""
        return einops.rearrange(x, "B K C c H -> B (C c) K H")[:, : self.S]

    def pad(self, x):
        """Pads bounds `B T` to whole blocks by repeating the last query's, so that a tile's range stays the same."""
        return jnp.pad(x, ((0, 0), (0, -self.T % self.queries)), mode="edge")

    def ends(self, x):
        """Repeats bounds `B T` for each head of a key head: `B 1 Q 1 (G t)`."""
        return einops.repeat(self.pad(x), "B (Q t) -> B 1 Q 1 (G t)", t=self.queries, G=self.groups)

    def tiles(self, start, end):
        """Finds the visited tiles and the full ones, both `1 B Q C`."""
        S = self.S + -self.S % self.keys
        visited, full = tiles(self.pad(start), self.pad(end), S, self.queries, self.keys)
        return visited[None], full[None]
