"""Few queries against many keys (decoding), in plain XLA: parts of the keys in parallel, merged by their log-sum-exps.

With one query, visiting key blocks one after the other would leave most of a large device idle. Here many parts are
computed at once, as a wave (flash-decoding). Waves run one after the other over the visible keys only, so the cost is
proportional to the filled length of a cache, not its capacity.

Letters inside this file: P parts of a wave, c keys of a part, G query heads of a key head.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import lax

from maxlib.kernels.attention.merge import merge_parts, merge_sinks
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._attention.chunked import chunked_gradients
from maxlib.ops._attention.reference import AttentionInputs, Results

MAX_QUERIES = 16


@dataclasses.dataclass(frozen=True)
class SplitTiles(TileSizes):
    """Keys of a wave, which is computed at once, and of a part of it, rounded up to a divisor of the wave."""

    wave: int = 4096
    part: int = 256

    kernel: ClassVar[str] = "attention/split_kv"

    def __post_init__(self):
        self.require()


class Spec(NamedTuple):
    """Static parameters: the maths, and the number of keys in a wave and in a part."""

    scale: float
    softcap: float | None
    wave: int
    part: int


def split_kv(x: AttentionInputs, tiles: SplitTiles | None = None) -> Results:
    """Returns the output and the log-sum-exp of each row's logits, as `reference` does.

    The gradient is computed by `chunked`.
    """
    tiles = tiles or SplitTiles()
    wave = min(tiles.wave, x.k.shape[1])
    spec = Spec(x.scale, x.softcap, wave, _divisor(wave, tiles.part))
    out, lse = _attend(spec, x.q, x.k, x.v, x.start.astype(jnp.int32), x.end.astype(jnp.int32))
    return (out, lse) if x.sinks is None else merge_sinks(out, lse, x.sinks)


def _divisor(wave: int, part: int) -> int:
    """Returns the smallest divisor of `wave` that is at least `part`."""
    return next(size for size in range(min(part, wave), wave + 1) if wave % size == 0)


def _attend(spec: Spec, q, k, v, k_start, k_end):
    groups, compute = q.shape[2] // k.shape[2], jnp.promote_types(q.dtype, jnp.float32)
    rows = einops.rearrange(q, "B T (K G) H -> B K G T H", G=groups)
    # Heads first, as caches are stored: XLA drops their transposition, and a wave is read without a copy.
    k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    start, end = jnp.maximum(k_start, 0), jnp.minimum(k_end, k.shape[2])
    seen = start < end
    # Waves [first, last) contain every key that any query of the batch attends to.
    first = jnp.min(jnp.where(seen, start, k.shape[2])) // spec.wave
    last = -(-jnp.max(jnp.where(seen, end, 0)) // spec.wave)

    def step(i, before):
        # Merge the result so far as an additional part: [1, ...] and [P, ...] -> [P + 1, ...] -> [...].
        parts = _wave(spec, rows, k, v, start, end, i)
        return merge_parts(*(jnp.concatenate([x[None], y]) for x, y in zip(before, parts, strict=True)))

    out = jnp.zeros_like(rows, shape=(*rows.shape[:-1], v.shape[-1]), dtype=compute)
    nothing = out, jnp.full_like(rows, -jnp.inf, shape=rows.shape[:-1], dtype=compute)
    out, lse = lax.fori_loop(first, last, step, nothing)
    out, lse = (einops.rearrange(x, "B K G T H -> B T (K G) H") for x in (out, lse[..., None]))
    return out.astype(q.dtype), lse[..., 0]


def _wave(spec: Spec, rows, k, v, start, end, i):
    """Computes the output and log-sum-exp of each part of wave `i`, with the leading axis P."""
    # The last wave is shifted back to end with the keys; keys that it shares with the previous wave are masked below.
    first = jnp.minimum(i * spec.wave, k.shape[2] - spec.wave)
    k, v = (lax.dynamic_slice_in_dim(x, first, spec.wave, axis=2).astype(rows.dtype) for x in (k, v))
    keys, values = (einops.rearrange(x, "B K (P c) H -> B K P c H", c=spec.part) for x in (k, v))
    exact = jnp.promote_types(rows.dtype, jnp.float32)
    # Parts are a batch axis of the matmul: [B, K, G, T, H] x [B, K, P, c, H] -> [P, B, K, G, T, c].
    logits = spec.scale * jnp.einsum("BKGTH,BKPcH->PBKGTc", rows, keys, preferred_element_type=exact)
    if spec.softcap is not None:
        logits = spec.softcap * jnp.tanh(logits / spec.softcap)
    index = (first + jnp.arange(spec.wave, dtype=jnp.int32)).reshape(-1, 1, 1, spec.part)  # P 1 1 c
    visible = (index >= jnp.maximum(start, i * spec.wave)[None, ..., None]) & (index < end[None, ..., None])
    logits = jnp.where(visible[:, :, None, None], logits, -jnp.inf)
    peak = jnp.maximum(jnp.max(logits, axis=-1), jnp.finfo(exact).min)  # finite, so that -inf - peak is not NaN
    probs = jnp.exp(logits - peak[..., None])
    total = jnp.sum(probs, axis=-1)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("PBKGTc,BKPcH->PBKGTH", probs.astype(rows.dtype), values, preferred_element_type=exact)
    return out / safe[..., None], jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)


def _attend_fwd(spec: Spec, *args):
    return _attend(spec, *args), args


def _attend_bwd(spec: Spec, args, cotangents):
    return *chunked_gradients(AttentionInputs(*args, scale=spec.scale, softcap=spec.softcap), cotangents), None, None


_attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend.defvjp(_attend_fwd, _attend_bwd)
