"""Base class of decoders that read images of any size, optionally with positions by time, row and column (M-RoPE)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn.cache import Cache
from maxlib.nn.decoder._context import Context, bidirectional_blocks
from maxlib.nn.decoder._decoder import Decoder
from maxlib.nn.decoder._model import Output
from maxlib.nn.remat import Policy
from maxlib.nn.vision._encoder import check_placeholders, unseen
from maxlib.nn.vision._patches import Patches, check_patches, mrope_positions, take_features
from maxlib.ops import MRope


class NativeVisionDecoder(Decoder):
    """Decoder that reads images of any size at placeholder tokens, if its constructor sets `tower`.

    Its `cfg.vision` is None, or has `merge`, `patch_dim`, `image_token` and `video_token` (frames of videos are
    images). If a rotary embedding is an `ops.MRope`, positions are those of `nn.vision.mrope_positions`, and a cache
    stores the difference between positions and the number of tokens, so that decoding continues correctly after an
    image. Otherwise positions count tokens. Under a mask with `ops.BidirectionalBlocks` the tokens of an image attend
    to each other.

    Attributes:
        tower: Image encoder, `tower(patches, dtype=, remat=) -> (R S D, R S n D or None)`: a vector for each
            placeholder, and the vectors added to it after each of the first n layers.
    """

    tower: Any = None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T *R"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        images: Patches | None = None,
        cache: Cache | None = None,
        dtype: Any = jnp.bfloat16,
        remat: Policy = None,
    ) -> Output:
        """Computes the hidden states of rows of tokens and images; see `Decoder.__call__` for the other arguments.

        Args:
            tokens: Ids, `B T`, with a placeholder for each square of `merge` x `merge` patches.
            positions: `B T 3` by time, row and column, computed from tokens and grids unless given; `B T` for text,
                and without an `ops.MRope`.
            segment_ids: Packed document of each token.
            valid: False for padding.
            images: Outputs of Hugging Face's processor as `nn.vision.Patches`, in the order of their placeholders.
            cache: Cache of earlier tokens, or None. All placeholders of an image must be in one call.
            dtype: Dtype of the computation.
            remat: What layers keep for the backward pass.

        Raises:
            ValueError: when images are given to a text model, when patches, grids and placeholders do not fit (inside
                jit, where ids are hidden, placeholders become NaN instead), or positions lack rows and columns.
        """
        inputs = {"positions": positions, "segment_ids": segment_ids, "valid": valid, "images": images}
        x, inputs = self.embed_inputs(tokens, dtype=dtype, cache=cache, remat=remat, **inputs)
        return self.run(x, **inputs, cache=cache, remat=remat)

    def embed_inputs(
        self,
        tokens: Int[Array, "B T"],
        *,
        dtype: Any,
        cache: Cache | None = None,
        remat: Policy = None,
        images: Patches | None = None,
        **inputs: Any,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Returns the vectors of tokens and images, and the arguments of `enter`; see `Decoder.embed_inputs`."""
        x, inputs = super().embed_inputs(tokens, dtype=dtype, **inputs)
        self.check_images(tokens, images)
        if images is None:
            vision = self.cfg.vision if cache is None else None
            return (x if vision is None else unseen(x, self.is_image(tokens))), inputs
        images, segment_ids, valid = images.in_rows, inputs.get("segment_ids"), inputs.get("valid")
        is_image = self.is_image(tokens) if valid is None else self.is_image(tokens) & valid
        if self._turns_by_axes:
            inputs["positions"] = self._positions(is_image, images, cache, **inputs)
        if any(mask != mask.without_blocks for mask in self.masks):
            inputs["bidirectional_blocks"] = bidirectional_blocks(is_image, segment_ids=segment_ids, cache=cache)
        x, inputs["features"] = self._see(x, is_image, images, dtype=dtype, remat=remat)
        return x, inputs

    def _positions(
        self, is_image, images: Patches, cache: Cache | None, *, positions=None, segment_ids=None, valid=None, **_
    ):
        """Returns the given positions, if they have rows and columns, or those by the grids of images."""
        if positions is not None:
            _check_positions(positions)
            return positions
        start = None if cache is None else cache.length + _offset(cache)
        inputs: dict[str, Any] = {"segment_ids": segment_ids, "valid": valid, "start": start}
        return mrope_positions(is_image, jnp.asarray(images.grids), self.cfg.vision.merge, **inputs)

    def _see(self, x, is_image, images: Patches, *, dtype, remat) -> tuple[Array, Array | None]:
        """Returns `x` with the vectors of images in place of placeholders, and the vectors that later layers add."""
        vectors, later = self.tower(images, dtype=dtype, remat=remat)
        # merge x merge patches become one vector.
        counts = jnp.asarray(images.grids).prod(axis=2).sum(axis=1) // self.cfg.vision.merge**2
        take = lambda features: take_features(is_image, features.astype(x.dtype), counts)
        x = jnp.where(is_image[:, :, None], take(vectors), x)
        return x, None if later is None else take(later)

    def is_image(self, tokens: Int[Any, "B T"]) -> Bool[Any, "B T"]:
        """Returns True for placeholders of images and frames."""
        return (tokens == self.cfg.vision.image_token) | (tokens == self.cfg.vision.video_token)

    def check_images(self, tokens: Int[Any, "B T"], images: Any) -> None:
        """Raises ValueError as `__call__` does; generators call it before they enter jit."""
        vision = self.cfg.vision
        if images is None:
            if vision is not None:
                check_placeholders(self.is_image(tokens), 0)
        elif vision is None:
            raise ValueError(
                f"this {type(self).__name__} reads text only (its config has no vision): call it without images"
            )
        elif not isinstance(images, Patches):
            raise ValueError(
                f"images must be nn.vision.Patches (patches and grids), got {type(images).__name__}; make them with "
                "nn.vision.patches(pixel_values, image_grid_thw); cfg.vision.patches(pixel_values, image_sizes) for Pixtral's "
                "processors, nn.vision.patches_by_position(pixel_values, image_position_ids, merge=) for Gemma 4's"
            )
        else:
            check_patches(self.is_image(tokens), images, vision.merge, vision.patch_dim)

    def layer_inputs(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "n B T D"] | None:
        """Returns the vectors added to image tokens after each of the first layers."""
        return None if ctx.features is None else jnp.moveaxis(ctx.features, 2, 0)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None
    ) -> Cache:
        """Makes an empty cache, as `Decoder.init_cache`; with M-RoPE it has a `position_offset`."""
        cache = super().init_cache(batch, capacity, dtype=dtype, rope_length=rope_length)
        counts = self.cfg.vision is not None and self._turns_by_axes
        return dataclasses.replace(cache, position_offset=jnp.zeros(batch, jnp.int32)) if counts else cache

    @property
    def _turns_by_axes(self) -> bool:
        """Returns True if positions have a time, a row and a column (M-RoPE)."""
        return any(isinstance(rope, MRope) for rope in self.ropes)


def _check_positions(positions: Array) -> None:
    """Raises ValueError for positions without a row and a column."""
    if positions.ndim != 3 or positions.shape[2] != 3:
        raise ValueError(
            "with images, positions must have three rows, time, row and column (`B T 3`), got the shape "
            f"{positions.shape}: omit them to compute them from tokens and grids (packed batches too), or make "
            "them with nn.vision.mrope_positions"
        )


def _offset(cache: Cache) -> Int[Array, " B"]:
    """Returns the `position_offset` of a cache; raises ValueError if it has none."""
    if cache.position_offset is None:
        raise ValueError(
            "the cache must have a position_offset, because positions of images do not count tokens: make it with the "
            "model's init_cache"
        )
    return cache.position_offset
