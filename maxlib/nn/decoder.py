"""The wiring that decoder-only models have in common."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn.cache import Cache
from maxlib.nn.context import Context, balance, context, unbalance
from maxlib.nn.linear import Embed
from maxlib.nn.model import Output
from maxlib.nn.remat import Policy
from maxlib.nn.stack import Stack
from maxlib.ops.attention import Mask
from maxlib.ops.rope import Rope
from maxlib.sharding import constrain


class Decoder(nnx.Module):
    """Ids become vectors, a stack of layers works on them, a norm ends it and a head scores them: docs/decisions/0001.

    A family derives its model from it and sets in its constructor what stands below; `embed_tokens` and `enter` are
    there to be replaced. A model with another wiring does not derive from it: the contract asks for methods, not for this class.
    """

    cfg: Any
    embed: Embed
    layers: Stack
    norm: nnx.Module
    head: Embed | None = None  # None: tied to `embed`
    masks: tuple[Mask, ...] = ()  # what its layers ask of the context, computed once
    ropes: tuple[Rope, ...] = ()
    softcap: float | None = None  # of the logits

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        cache: Cache | None = None,
        dtype: Any = jnp.bfloat16,
        remat: Policy = None,
    ) -> Output:
        x = self.embed_tokens(tokens, dtype)
        return self.run(x, positions=positions, segment_ids=segment_ids, valid=valid, cache=cache, remat=remat)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        return self.embed(tokens, dtype=dtype)

    def run(self, x: Float[Array, "B T D"], *, cache: Cache | None, remat: Policy, **inputs: Any) -> Output:
        """From vectors to the normed hidden states; inputs: those of `nn.context`."""
        x, ctx = self.enter(x, cache=cache, **inputs)
        x, layers, aux = self.layers(x, ctx, cache and cache.layers, remat=remat)
        return Output(self.leave(x, ctx), cache and cache.advanced(layers, ctx), aux)

    def enter(self, x: Float[Array, "B T D"], *, cache: Cache | None = None, **inputs: Any):
        """What the first layer gets: `x` in its place, and the context."""
        ctx = context(*x.shape[:2], cache=cache, masks=self.masks, ropes=self.ropes, **inputs)
        x = constrain(x, "batch", "seq", "act_embed")
        return balance(x, ctx) if cache is None else (x, ctx)

    def leave(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T D"]:
        """What the head gets of the last layer's `x`."""
        return unbalance(self.norm(x), ctx)

    def head_weight(self) -> Float[Array, "V D"]:
        return (self.head or self.embed).w[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        logits = constrain((self.head or self.embed).logits(hidden), "batch", "seq", "act_vocab")
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None
    ) -> Cache:
        """An empty cache for `capacity` tokens a row; `rope_length` defaults to that capacity."""
        layers = self.layers.init_cache(batch, capacity, dtype)
        return Cache(layers, jnp.zeros(batch, jnp.int32), rope_length or capacity)
