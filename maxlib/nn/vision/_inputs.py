"""Images as inputs of a decoder: their vectors take the places of placeholder tokens (`nn.Decoder.inputs`), whose
positions may be by time, row and column (M-RoPE).

Shapes: I images, C color channels, H rows and W columns of pixels, S vectors per image or row of patches, D width, B
rows of T tokens, R rows of patches.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from maxlib.nn.cache import Cache
from maxlib.nn.decoder._context import bidirectional_blocks, first_of_segment
from maxlib.nn.decoder._model import InputCall
from maxlib.nn.vision._patches import Patches, check_patches, placeholder_index, places, take_features


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """Images of one size, `pixel_values` of Hugging Face's processors (tiles, for Llama 4): `I C H W`.

    Args:
        tower: Image encoder, `tower(images, dtype=, remat=)`.
        projector: Maps the encoder's output to vectors of the text model's width, `I S D`.
        token: Id of the placeholder.
        num_tokens: Number S of vectors, and of placeholders, per image.
        bidirectional: True if the tokens of an image attend to each other, in layers whose mask has
            `ops.BidirectionalBlocks`.
    """

    tower: Any
    projector: Any
    token: int
    num_tokens: int
    bidirectional: bool = False
    moves_positions: bool = dataclasses.field(default=False, init=False)

    def is_placeholder(self, tokens: Int[Any, "B T"]) -> Bool[Any, "B T"]:
        """Returns True for placeholders of images."""
        return tokens == self.token

    def check(self, tokens: Int[Any, "B T"], value: Any) -> None:
        """Raises ValueError unless there are `num_tokens` placeholders per image; does nothing inside jit."""
        check_placeholders(self.is_placeholder(tokens), 0 if value is None else len(value) * self.num_tokens)

    def embed(
        self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], value: Any, call: InputCall
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Puts the vectors of images in place of their placeholders (`nn.Decoder`)."""
        is_image = self.is_placeholder(tokens)
        # [I, C, H, W] -> [I, S, D] -> [1, I S, D]: one row of images, then into x at the placeholders, [B, T, D].
        vectors = self.projector(self.tower(value, dtype=call.dtype, remat=call.remat)).reshape(1, -1, x.shape[-1])
        taken = take_features(is_image, vectors.astype(x.dtype), jnp.array(vectors.shape[1:2]))
        x = jnp.where(is_image[:, :, None], taken, x)
        if not self.bidirectional:
            return x, {}
        blocks = bidirectional_blocks(is_image, segment_ids=call.segment_ids, cache=call.cache)
        return x, {"bidirectional_blocks": blocks}


@dataclasses.dataclass(frozen=True)
class PatchInput:
    """Images of any size, as `Patches`; frames of videos are images.

    Args:
        tower: Image encoder, `tower(patches, dtype=, remat=) -> (R S D, R S n D or None)`: a vector for each
            placeholder, and the vectors added to it after each of the first n layers.
        tokens: Ids of the placeholders, of images and perhaps of frames of videos.
        merge: Side of the squares of patches that have one placeholder.
        patch_dim: Number of values in a patch.
        mrope: True for positions by time, row and column (`mrope_positions`). A cache then stores the difference
            between positions and the number of tokens, so that decoding continues correctly after an image.
        bidirectional: True if the tokens of an image attend to each other, in layers whose mask has
            `ops.BidirectionalBlocks`.
        frame_step: Time between the frames of a video, see `mrope_positions`.
        positions_per_second: Positions in a second of video, for frames whose times are `Patches.seconds`; None for
            models that read no times. `tokens` are then ids of images and of frames.
        audio_token: Id of the placeholder of sound, which may stand between frames that have times.
    """

    tower: Any
    tokens: tuple[int, ...]
    merge: int
    patch_dim: int
    mrope: bool = False
    bidirectional: bool = False
    frame_step: int | None = None
    positions_per_second: float | None = None
    audio_token: int | None = None

    @property
    def moves_positions(self) -> bool:
        """Returns True if positions do not count tokens."""
        return self.mrope

    def is_placeholder(self, tokens: Int[Any, "B T"]) -> Bool[Any, "B T"]:
        """Returns True for placeholders of images and frames."""
        is_image = tokens == self.tokens[0]
        for token in self.tokens[1:]:
            is_image |= tokens == token
        return is_image

    def check(self, tokens: Int[Any, "B T"], value: Any) -> None:
        """Raises ValueError unless patches, grids and placeholders match; inside jit only shapes are checked."""
        if value is None:
            check_placeholders(self.is_placeholder(tokens), 0)
        elif not isinstance(value, Patches):
            raise ValueError(
                f"images must be nn.vision.Patches (patches and grids), got {type(value).__name__}; make them with "
                "nn.vision.pad_patches(pixel_values, image_grid_thw); cfg.vision.patches(pixel_values, image_sizes) for "
                "Pixtral's processors, nn.vision.pad_patches_by_position(pixel_values, image_position_ids, merge=) for "
                "Gemma 4's"
            )
        else:
            check_patches(self.is_placeholder(tokens), value, self.merge, self.patch_dim)
            if self.positions_per_second is not None and value.seconds is None:
                _check_no_videos(tokens == self.tokens[1])

    def embed(
        self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], value: Any, call: InputCall
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Puts the vectors of images in place of their placeholders (`nn.Decoder`)."""
        images, is_image, arguments = value.in_rows, self.is_placeholder(tokens), {}
        segment_ids, valid, cache = call.segment_ids, call.valid, call.cache
        # Padding may have any id, also that of a placeholder.
        is_image = is_image if valid is None else is_image & valid
        if self.mrope and call.positions is None:
            start = None if cache is None else cache.length + _offset(cache)
            arguments["positions"] = mrope_positions(
                is_image,
                jnp.asarray(images.grids),
                self.merge,
                segment_ids=segment_ids,
                valid=valid,
                start=start,
                frame_step=self.frame_step,
                times=self._times(images),
                is_audio=None if self.audio_token is None else tokens == self.audio_token,
            )
        elif self.mrope:
            _check_positions(call.positions)
        if self.bidirectional:
            arguments["bidirectional_blocks"] = bidirectional_blocks(is_image, segment_ids=segment_ids, cache=cache)
        vectors, later = self.tower(images, dtype=call.dtype, remat=call.remat)
        # merge x merge patches become one vector.
        counts = jnp.asarray(images.grids).prod(axis=2).sum(axis=1) // self.merge**2
        x = jnp.where(is_image[:, :, None], take_features(is_image, vectors.astype(x.dtype), counts), x)
        if later is not None:
            arguments["features"] = take_features(is_image, later.astype(x.dtype), counts)
        return x, arguments

    def _times(self, images: Patches) -> Float[Array, "R I"] | None:
        """Returns the positions of frames after the first one of their video."""
        if self.positions_per_second is None:
            return None
        seconds = jnp.zeros(images.grids.shape[:2]) if images.seconds is None else jnp.asarray(images.seconds)
        return seconds * self.positions_per_second


def _check_positions(positions: Any) -> None:
    """Raises ValueError for positions without a row and a column."""
    if positions.ndim != 3 or positions.shape[2] != 3:
        raise ValueError(
            "with images, positions must have three rows, time, row and column (`B T 3`), got the shape "
            f"{positions.shape}: omit them to compute them from tokens and grids (packed batches too), or make "
            "them with nn.vision.mrope_positions"
        )


def _offset(cache: Cache) -> Real[Array, " B"]:
    """Returns the `position_offset` of a cache; raises ValueError if it has none."""
    if cache.position_offset is None:
        raise ValueError(
            "the cache must have a position_offset, because positions of images do not count tokens: make it with the "
            "model's init_cache"
        )
    return cache.position_offset


def _check_no_videos(is_frame: Bool[Any, "B T"]) -> None:
    """Raises ValueError for placeholders of frames, which need times; does nothing inside jit."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        if is_frame.any():
            raise ValueError(
                "the tokens have placeholders of videos, so the images need the times of frames, "
                "nn.vision.pad_patches(..., second_per_grid=): the processor's video_second_per_grid"
            )


def check_placeholders(is_placeholder: Bool[Any, "B T"], count: int) -> None:
    """Raises ValueError unless `count` tokens are placeholders; does nothing inside jit, where tokens are not known."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        if (placeholders := int(is_placeholder.sum())) != count:
            raise ValueError(
                f"the tokens have {placeholders} image placeholders, but the given images make {count} vectors: the "
                "numbers must be equal; take prompt and images from one call of the processor"
            )


def mrope_positions(
    is_image: Bool[Array, "B T"],
    grids: Int[Array | np.ndarray, "*R I 3"],
    merge: int,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    start: Real[Array, " B"] | None = None,
    frame_step: int | None = None,
    times: Float[Array, "R I"] | None = None,
    is_audio: Bool[Array, "B T"] | None = None,
) -> Real[Array, "B T 3"]:
    """Computes the positions of tokens and images by time, row and column (M-RoPE).

    A text token has three equal positions, and the position grows by 1 with each token. The tokens of an image that
    begins at `p` have time `p`, and row and column `p` plus those on the merged grid. The next token is at `p` plus the
    larger side of that grid.

    With `frame_step` or `times`, images that follow each other without text are frames of a video. All of them begin at
    one position `p`, and their time is `p` plus that of the frame. Sound between them counts from `p` too. The text
    after a video is at its last token's largest position plus 1.

    Args:
        is_image: True for placeholders.
        grids: Frames (1), rows and columns of patches of each image, as in `Patches`.
        merge: Side of the squares of patches that have one placeholder.
        segment_ids: Packed document of each token, 0 for padding; positions restart in each.
        valid: False for padding.
        start: Position of each row's first token, 0 unless given.
        frame_step: Positions between the frames of a video (Qwen2-VL). None for frames with text between them
            (Qwen3-VL), or with `times`.
        times: Position of each frame after the first one of its video, 0 for images (Qwen3-Omni).
        is_audio: True for placeholders of sound, which may stand between the frames of a video; only with `times`.

    Returns:
        Positions, `B T 3`, in the dtype of `times` or int32.
    """
    grids = jnp.asarray(grids if jnp.ndim(grids) == 3 else jnp.asarray(grids)[None])
    real = jnp.ones(is_image.shape, bool) if valid is None else jnp.asarray(valid)
    real = real if segment_ids is None else real & (segment_ids > 0)
    is_image = is_image & real
    squares = grids // jnp.array([1, merge, merge], grids.dtype)[None, None]
    at = places(squares, placeholder_index(is_image, len(grids)))
    image, index, height, width = (x.reshape(is_image.shape) for x in (at.image, at.index, at.height, at.width))
    row, column = (jnp.where(is_image, x, 0) for x in jnp.divmod(index, width))
    # Step of the position to the next token; an image advances it after its last placeholder.
    inside, last, extent = is_image, index + 1 == height * width, jnp.maximum(height, width)
    time = jnp.zeros(is_image.shape, jnp.int32)
    if frame_step is not None or times is not None:
        inside = is_image if is_audio is None else is_image | (is_audio & real)
        first, last = _runs(inside, segment_ids)
        if times is None:
            assert frame_step is not None
            time = frame_step * (image - jnp.take_along_axis(image, first, axis=1))
        else:
            of_image = jnp.take_along_axis(times, jnp.minimum(at.image, times.shape[1] - 1), axis=1)
            time = of_image.reshape(is_image.shape)
        # Tokens of sound before each token of its run.
        sounds = (inside & ~is_image).astype(jnp.int32)
        before = jnp.cumsum(sounds, axis=1) - sounds
        heard = jnp.where(inside & ~is_image, before - jnp.take_along_axis(before, first, axis=1), 0)
        time, row, column = jnp.where(is_image, time, heard), row + heard, column + heard
        extent = jnp.where(is_image, jnp.maximum(extent, time + 1), time + 1)
    steps = jnp.where(inside, jnp.where(last, extent, 0), 1) * real
    before = jnp.cumsum(steps, axis=1) - steps
    if segment_ids is not None:
        before = before - jnp.take_along_axis(before, first_of_segment(segment_ids), axis=1)
    before = before if start is None else before + start[:, None]
    dtype = jnp.int32 if times is None else times.dtype
    return jnp.stack([before + time, before + row, before + column], axis=2).astype(dtype)


def _runs(
    inside: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Returns the first token of each token's run of placeholders, and which tokens are the last of one."""
    runs = inside.astype(jnp.int32) if segment_ids is None else jnp.where(inside, segment_ids, 0)
    edge = jnp.ones((len(runs), 1), bool)
    return first_of_segment(runs), jnp.concatenate([runs[:, 1:] != runs[:, :-1], edge], axis=1)
