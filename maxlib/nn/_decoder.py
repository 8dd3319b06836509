"""The wiring that decoder-only models have in common."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._context import Context, bidirectional_blocks, context, zigzag_shard, zigzag_unshard
from maxlib.nn._linear import Embed
from maxlib.nn._model import Output
from maxlib.nn.cache import Cache
from maxlib.nn.mtp import MTP, MTPOutput, draft, predict_ahead
from maxlib.nn.remat import Policy
from maxlib.nn.stack import Stack
from maxlib.nn.vision import check_placeholders, place_features
from maxlib.ops._attention import Mask
from maxlib.ops._rope import Rope
from maxlib.sharding import constrain


def check_tokens(tokens: Any) -> None:
    """Raises ValueError for anything but rows of ids; shape and dtype are known while tracing."""
    is_array = isinstance(tokens, jax.Array | np.ndarray)
    if not (is_array and tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer)):
        raise ValueError(
            "tokens must be an array of integers, rows of ids `B T`, got "
            f"{f'{tokens.dtype} of shape {tokens.shape}' if is_array else type(tokens).__name__}. "
            "A single row is jnp.asarray(ids)[None]; text has to be encoded."
        )


class Decoder(nnx.Module):
    """Decoder-only model: embedding, a stack of layers, a norm and a head (docs/decisions/0001).

    A family derives its model from it and sets the attributes in its constructor; `embed_tokens` and `enter` are there
    to be replaced. A model with another wiring does not derive from it: the contract asks for methods, not for this
    class.

    Attributes:
        head: None if it is tied to `embed`.
        masks: What its layers ask of the context, computed once.
        ropes: The same for rotary tables.
        recompute_cache_at: Length at which cached keys are rotated otherwise and have to be computed anew (LongRoPE's
            switch in Phi); None if there is none.
        softcap: Of the logits, `c * tanh(logits / c)`.
        layers_take_tokens: True if layers read ids from `ctx.tokens`.
    """

    cfg: Any
    embed: Embed
    layers: Stack
    norm: nnx.Module
    head: Embed | None = None
    masks: tuple[Mask, ...] = ()
    ropes: tuple[Rope, ...] = ()
    recompute_cache_at: int | None = None
    softcap: float | None = None
    layers_take_tokens: ClassVar[bool] = False

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
        check_tokens(tokens)
        inputs = {"positions": positions, "segment_ids": segment_ids, "valid": valid} | self.ids_for_layers(tokens)
        return self.run(self.embed_tokens(tokens, dtype), **inputs, cache=cache, remat=remat)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        return self.embed(tokens, dtype=dtype)

    def ids_for_layers(self, tokens: Int[Array, "B T"]) -> dict[str, Array]:
        """Returns what `enter` is given of the ids: nothing unless layers take them."""
        return {"tokens": tokens} if self.layers_take_tokens else {}

    def run(self, x: Float[Array, "B T D"], *, cache: Cache | None, remat: Policy, **inputs: Any) -> Output:
        """Computes the normed hidden states from vectors; inputs: those of `nn.context`."""
        x, ctx = self.enter(x, cache=cache, **inputs)
        x, layers, aux = self.layers(x, ctx, cache and cache.layers, remat=remat)
        return Output(self.leave(x, ctx), cache and cache.advanced(layers, ctx), aux)

    def enter(self, x: Float[Array, "B T D"], *, cache: Cache | None = None, **inputs: Any):
        """Returns what the first layer gets: `x` in its place, and the context.

        Where devices share a sequence, tokens are dealt out in zigzag order, unless a layer needs them in their own.
        """
        ctx = context(*x.shape[:2], cache=cache, masks=self.masks, ropes=self.ropes, **inputs)
        x = constrain(x, "batch", "seq", "act_embed")
        return zigzag_shard(x, ctx) if cache is None and self.layers.is_reorderable else (x, ctx)

    def leave(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T D"]:
        """Returns what the head gets of the last layer's `x`."""
        return zigzag_unshard(self.norm(x), ctx)

    def head_weight(self) -> Float[Array, "V D"]:
        return (self.head or self.embed).w[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        logits = constrain((self.head or self.embed).logits(hidden), "batch", "seq", "act_vocab")
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None
    ) -> Cache:
        """Makes an empty cache.

        Args:
            batch: Number of rows.
            capacity: Tokens that a row can hold. It changes no result.
            dtype: Of what is kept; int8 and float8 come with scales.
            rope_length: See `Cache`.
        """
        layers = self.layers.init_cache(batch, capacity, dtype)
        return Cache(layers, jnp.zeros(batch, jnp.int32), rope_length)

    @property
    def max_length(self) -> int | None:
        """Number of positions that the model was made for, None without an end."""
        return min((rope.max_length for rope in self.ropes if rope.max_length is not None), default=None)


class VisionDecoder(Decoder):
    """Decoder that reads images where some of its tokens are placeholders, if its constructor sets the parts below.

    Its `cfg.vision` is None, or has `image_token` and `num_tokens`, the number of vectors that the projector makes of
    an image. These are read as text is, but see each other both ways under a mask with `ops.BidirectionalBlocks`.
    """

    tower: Any = None
    projector: Any = None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        images: Float[Array, "I C H W"] | None = None,
        cache: Cache | None = None,
        dtype: Any = jnp.bfloat16,
        remat: Policy = None,
    ) -> Output:
        """images: what Hugging Face's processor calls pixel_values (tiles, for Llama 4), in the order of their
        placeholders.

        Raises ValueError for images that the model cannot see, and for placeholders that are not `num_tokens` per
        image; where jit hides the ids, these become NaN instead.
        """
        check_tokens(tokens)
        self.check_images(tokens, images)
        x, sees = self.embed_tokens(tokens, dtype), None
        if images is not None:
            is_image = tokens == self.cfg.vision.image_token
            x = place_features(x, is_image, self.projector(self.tower(images, dtype=dtype, remat=remat)))
            sees = bidirectional_blocks(is_image, segment_ids=segment_ids, cache=cache)
        inputs = {"positions": positions, "segment_ids": segment_ids, "valid": valid, "bidirectional_blocks": sees}
        return self.run(x, **inputs, **self.ids_for_layers(tokens), cache=cache, remat=remat)

    def check_images(self, tokens: Int[Any, "B T"], images: Float[Any, "I C H W"] | None) -> None:
        """Raises ValueError as `__call__` does; a generator asks before it enters jit."""
        if self.cfg.vision is not None:
            count = 0 if images is None else len(images) * self.cfg.vision.num_tokens
            check_placeholders(tokens == self.cfg.vision.image_token, count)
        elif images is not None:
            raise ValueError(
                f"this {type(self).__name__} reads text only (its config has no vision): call it without images"
            )


class MTPDecoder(Decoder):
    """Decoder with modules that predict further ahead than the next token, of which the first can draft."""

    mtp: Sequence[MTP] = ()

    def predict_ahead(self, hidden: Float[Array, "B T D"], tokens: Int[Array, "B T"], **inputs: Any) -> list[MTPOutput]:
        """Predicts further ahead from the final `hidden`; inputs: `positions`, `segment_ids`, `valid`, `remat`."""
        return predict_ahead(self.mtp, self.embed, hidden, tokens, ropes=self.ropes, **inputs)

    def draft(self, hidden: Float[Array, "B T D"], tokens: Int[Array, "B T"], **inputs: Any):
        """Drafts with the first of the modules of `predict_ahead` while decoding; inputs: `cache`, `valid`."""
        return draft(self._drafter, self.embed, hidden, tokens, masks=self.masks, ropes=self.ropes, **inputs)

    def init_draft_cache(self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16) -> Cache:
        layers = self._drafter.init_cache(batch, capacity, dtype)
        return Cache(layers, jnp.zeros(batch, jnp.int32))

    @property
    def _drafter(self) -> MTP:
        if not len(self.mtp):
            raise ValueError(
                f"this {type(self).__name__} was built without a module that drafts: read it with num_mtp=1"
            )
        return self.mtp[0]
