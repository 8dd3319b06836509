"""A model unknown to maxlib: parallel blocks, every second one with a window, and an auxiliary loss in each.

It keeps the contracts of docs/decisions.md and nothing else.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxlib import nn, ops
from maxlib.sharding import constrain
from tests.nn.tiny import filled

VOCAB, DIM = 48, 16


class ParallelBlock(nnx.Module):
    """Attention and MLP side by side, as in GPT-J."""

    def __init__(self, mask: ops.Mask, *, rngs: nnx.Rngs):
        self.norm = nn.LayerNorm(DIM)
        self.attn = nn.Attention(DIM, num_heads=2, head_dim=8, mask=mask, rope=ops.Rope(8), rngs=rngs)
        self.mlp = nn.MLP(DIM, 32, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32), axes=())  # an integer leaf that nothing may train

    def __call__(self, x, ctx: nn.Context, cache: Any):
        h = self.norm(x)
        y, cache = self.attn(h, ctx, cache)
        x = constrain(x + y + self.mlp(h), "batch", "seq", "act_embed")
        size = jnp.mean(jnp.square(x.astype(jnp.float32)))
        return x, cache, {"loss/size": 1e-3 * size, "size": size}

    def init_cache(self, batch: int, capacity: int, dtype: Any):
        return self.attn.init_cache(batch, capacity, dtype)


class Outside(nnx.Module):
    """Odd layers see 4 tokens back."""

    softcap = 20.0

    def __init__(self, num_layers: int = 5, *, unstacked: bool = False, rngs: nnx.Rngs):
        self.embed = nn.Embed(VOCAB, DIM, rngs=rngs)
        masks = [ops.Causal() & ops.SlidingWindow(4) if i % 2 else ops.Causal() for i in range(num_layers)]
        blocks = nn.Stack(lambda mask, rngs: ParallelBlock(mask, rngs=rngs), masks, rngs=rngs)
        self.blocks = blocks.unstacked() if unstacked else blocks
        self.norm = nn.LayerNorm(DIM, bias=False)

    def __call__(
        self, tokens, *, positions=None, segment_ids=None, valid=None, cache=None, dtype=jnp.bfloat16, remat=None
    ):
        ctx = nn.make_context(*tokens.shape, positions=positions, segment_ids=segment_ids, valid=valid, cache=cache)
        x, layers, aux = self.blocks(self.embed(tokens, dtype=dtype), ctx, cache and cache.layers, remat=remat)
        return nn.Output(self.norm(x), cache and cache.advanced(layers, ctx), aux)

    def logits(self, hidden):
        return self.softcap * jnp.tanh(self.embed.logits(hidden) / self.softcap)

    def head_weight(self):
        return self.embed.w[...]

    def init_cache(self, batch, capacity, *, dtype=jnp.bfloat16, rope_length=None):
        return nn.cache.Cache(self.blocks.init_cache(batch, capacity, dtype), jnp.zeros(batch, jnp.int32), rope_length)


def outside(seed: int = 0, **layout: int) -> Outside:
    return filled(lambda: Outside(**layout, rngs=nnx.Rngs(0)), seed)
