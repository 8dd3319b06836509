"""The base class of decoder-only models whose image encoder gives a fixed number of vectors per image."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn.cache import Cache
from maxlib.nn.decoder._context import bidirectional_blocks
from maxlib.nn.decoder._decoder import Decoder
from maxlib.nn.decoder._model import Output
from maxlib.nn.remat import Policy
from maxlib.nn.vision._encoder import check_placeholders, place_features, unseen


class VisionDecoder(Decoder):
    """Decoder that reads images at placeholder tokens, if its constructor sets `tower` and `projector`.

    Its `cfg.vision` is None, or has `image_token` and `num_tokens`, the number of vectors per image. Image tokens
    attend to each other in both directions under a mask with `ops.BidirectionalBlocks`.

    Attributes:
        tower: Image encoder.
        projector: Maps the encoder's output to vectors of the text model's width.
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
        """Computes the hidden states of rows of tokens and images; see `Decoder.__call__` for the other arguments.

        Args:
            tokens: Ids, `B T`, with placeholders for images.
            positions: Positions for rotary tables.
            segment_ids: Packed document of each token.
            valid: False for padding.
            images: The `pixel_values` of Hugging Face's processor (tiles, for Llama 4), in the order of their
                placeholders.
            cache: Cache of earlier tokens, or None.
            dtype: Dtype of the computation.
            remat: What layers keep for the backward pass.

        Raises:
            ValueError: when images are given to a text model, or the number of placeholders is not `num_tokens` per
                image. Inside jit, where ids are not known, the placeholders become NaN instead.
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
        images: Float[Array, "I C H W"] | None = None,
        **inputs: Any,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Returns the vectors of tokens and images, and the arguments of `enter`; see `Decoder.embed_inputs`."""
        x, inputs = super().embed_inputs(tokens, dtype=dtype, **inputs)
        self.check_images(tokens, images)
        if images is None:
            vision = self.cfg.vision if cache is None else None
            return (x if vision is None else unseen(x, tokens == vision.image_token)), inputs
        is_image = tokens == self.cfg.vision.image_token
        # [I, C, H, W] -> [I, S, D], then into x at the placeholders, [B, T, D].
        x = place_features(x, is_image, self.projector(self.tower(images, dtype=dtype, remat=remat)))
        # Start and stop of each image, [B, T], for masks with `ops.BidirectionalBlocks`.
        blocks = bidirectional_blocks(is_image, segment_ids=inputs.get("segment_ids"), cache=cache)
        return x, inputs | {"bidirectional_blocks": blocks}

    def check_images(self, tokens: Int[Any, "B T"], images: Float[Any, "I C H W"] | None) -> None:
        """Raises ValueError as `__call__` does; generators call it before they enter jit."""
        if self.cfg.vision is not None:
            count = 0 if images is None else len(images) * self.cfg.vision.num_tokens
            check_placeholders(tokens == self.cfg.vision.image_token, count)
        elif images is not None:
            raise ValueError(
                f"this {type(self).__name__} reads text only (its config has no vision): call it without images"
            )
