"""A hybrid model unknown to maxlib: gated linear recurrences with a state, and attention in every second layer.

`h[t] = a[t] * h[t - 1] + (1 - a[t]) * v[t]` with gates `a[t] = sigmoid(gate(x[t]) + 2)`, so a state remembers about
eight tokens; the state is float32 whatever the model's dtype, and begins anew with every document.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn, ops
from maxlib.sharding import constrain

VOCAB, DIM = 48, 16


@nn.pytree
class State(nn.cache.LayerCache):
    """State of a recurrence: one vector per row for all tokens so far, which cannot be rewound."""

    kind = "state"
    h: Any  # B D, float32


def recurrence(a, v, starts, h):
    """Computes `h[t] = a[t] h[t-1] + v[t]`, where `starts` forgets what came before. Returns all h, and the last.

    a, v: `B T D` float32. starts: `B T`. h: `B D`.
    """
    a = jnp.where(starts[:, :, None], 0.0, a)
    join = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    decay, inner = jax.lax.associative_scan(join, (a, v), axis=1)
    out = inner + decay * h[:, None]
    return out, out[:, -1]


class GatedRecurrence(nn.SequenceMixer):
    """The layer: everything that anybody asks of a recurrence is answered here."""

    op = "recurrence"

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.gate = nn.Einsum("...D,ED->...E", (dim, dim), ("heads", "embed"), rngs=rngs)
        self.value = nn.Einsum("...D,ED->...E", (dim, dim), ("heads", "embed"), rngs=rngs)
        self.out = nn.Einsum("...E,DE->...D", (dim, dim), ("embed", "heads"), rngs=rngs)
        self.dim, self.implementation = dim, None

    def __call__(self, x, ctx=None, cache=None):
        ctx = nn.make_context(*x.shape[:2]) if ctx is None else ctx
        gathered = constrain(x, "batch", None, None)  # B T D: a device that shares a sequence needs all of it
        a = jax.nn.sigmoid(self.gate(gathered).astype(jnp.float32) + 2)
        v = (1 - a) * self.value(gathered).astype(jnp.float32)
        if ctx.valid is not None:  # padding changes no state: h = 1 h + 0
            a, v = (jnp.where(ctx.valid[:, :, None], part, idle) for part, idle in ((a, 1.0), (v, 0.0)))
        before = jnp.zeros((x.shape[0], self.dim)) if cache is None else cache.h
        h, last = recurrence(a, v, ctx.is_start, before)
        return self.out(h.astype(x.dtype)), None if cache is None else State(last)

    def init_cache(self, batch, capacity, dtype=jnp.bfloat16):
        return State(jnp.zeros((batch, self.dim), jnp.float32))

    def traffic(self, split):
        """Each device gathers the whole input in every pass, and its gradient is summed over devices."""
        array_bytes = split.tokens * split.parts * self.dim * split.width
        return {"all-gather": (split.passes - 1) * array_bytes, "reduce-scatter": array_bytes}


class Block(nnx.Module):
    def __init__(self, *, attends: bool, rngs: nnx.Rngs):
        self.norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        heads = {"num_heads": 2, "head_dim": 8, "rope": ops.Rope(8)}
        self.mixer = nn.Attention(DIM, **heads, rngs=rngs) if attends else GatedRecurrence(DIM, rngs=rngs)
        self.mlp = nn.GatedMLP(DIM, 32, rngs=rngs)

    def __call__(self, x, ctx, cache=None):
        y, cache = self.mixer(self.norm(x), ctx, cache)
        x = x + y
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch, capacity, dtype=jnp.bfloat16):
        return self.mixer.init_cache(batch, capacity, dtype)


class Hybrid(nn.Decoder):
    """Recurrences, and attention in every second layer unless it is turned off."""

    def __init__(self, num_layers: int = 4, *, attention: bool = True, rngs: nnx.Rngs):
        self.embed = nn.Embed(VOCAB, DIM, rngs=rngs)
        attends = [attention and i % 2 == 1 for i in range(num_layers)]
        self.layers = nn.Stack(lambda attends, rngs: Block(attends=attends, rngs=rngs), attends, rngs=rngs)
        self.norm = nn.RMSNorm(DIM)


def hybrid(**changes: Any) -> Hybrid:
    return Hybrid(**changes, rngs=nnx.Rngs(0))
