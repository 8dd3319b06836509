"""Models that hear: sound as an input of a decoder, and clips of sound as padded frames.

The encoder of a family is next to its model, in `maxlib/models/_gemma4_audio.py`.

Shapes: R rows of clips, C clips per row, F frames per clip with padding, M numbers in a frame, S vectors per clip with
padding, B rows of T tokens, D width.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._pytree import pytree
from maxlib.nn.decoder._model import InputCall
from maxlib.nn.vision._patches import bucket, take_features


@pytree
class Clips:
    """Clips of sound of any length: `input_features` of Hugging Face's processors, and how much of them is real.

    Rows belong to rows of tokens: row `r` of `R` holds the clips of the `r`-th of `R` equal parts of the batch, in the
    order of their placeholders. Without a row axis there is one row, with the clips of the whole batch. To split a
    batch over devices or microbatches, use one row per row of tokens. `pad_clips` makes this from a processor's arrays.

    Args:
        frames: `R C F M` or `C F M`, bands of a log-mel spectrogram, or samples. Padding is last.
        lengths: `R C` or `C`, number of real frames of each clip; zero for no clip.
    """

    frames: Float[Array | np.ndarray, "*R C F M"]
    lengths: Int[Array | np.ndarray, "*R C"]

    @property
    def in_rows(self) -> "Clips":
        """Returns the same clips with an axis of rows."""
        return self if self.frames.ndim == 4 else Clips(self.frames[None], self.lengths[None])

    @property
    def real(self) -> list[Any]:
        """Returns the real frames of each clip, `n M`, without padding; for clips without an axis of rows."""
        return [clip[:size] for clip, size in zip(self.frames, self.lengths, strict=True)]


def pad_clips(frames: Any, mask: Any = None, *, counts: Sequence[int] | None = None) -> Clips:
    """Converts a processor's arrays to `Clips`, padded so that similar batches use the same compiled program.

    The number of frames is rounded up by less than a quarter, the number of clips to a power of two.

    Args:
        frames: The frames of each clip, `n M` each: `input_features` of Hugging Face's processor, or arrays of
            different lengths.
        mask: True for real frames, `clips n`: `input_features_mask`; None if all are real.
        counts: Number of clips in each row of tokens, to make one row of clips per row of tokens; None makes one row.

    Raises:
        ValueError: when there is no clip, when clips have frames of different widths, or when counts or mask do not
            have as many clips.
    """
    arrays = [np.asarray(clip, np.float32) for clip in frames]
    if not arrays or any(clip.ndim != 2 or clip.shape[1] != arrays[0].shape[-1] for clip in arrays):
        raise ValueError(
            f"frames must be one or more arrays `n M` of one width M, got the shapes {[clip.shape for clip in arrays]}"
        )
    counts = [len(arrays)] if counts is None else list(counts)
    real = (
        [np.ones(len(clip), bool) for clip in arrays]
        if mask is None
        else [np.asarray(is_real, bool) for is_real in mask]
    )
    if sum(counts) != len(arrays) or [len(is_real) for is_real in real] != [len(clip) for clip in arrays]:
        raise ValueError(
            f"counts must give each of the {len(arrays)} clips to a row, and a mask have a value for each frame; got "
            f"{counts} and masks of {[len(is_real) for is_real in real]} for {[len(clip) for clip in arrays]} frames"
        )
    arrays = [clip[is_real] for clip, is_real in zip(arrays, real, strict=True)]
    # Powers of two of clips, and frames by bucket: batches of similar sound share a program.
    shape = 1 << (max(1, *counts) - 1).bit_length(), bucket(max(map(len, arrays)))
    first = np.cumsum([0, *counts])
    rows = [stack_clips(arrays[a:b], *shape, arrays[0].shape[1]) for a, b in itertools.pairwise(first)]
    if len(rows) == 1:
        return rows[0]
    # R rows of [C, F, M] -> [R, C, F, M]
    return Clips(np.stack([row.frames for row in rows]), np.stack([row.lengths for row in rows]))


def stack_clips(clips: Sequence[np.ndarray], count: int, length: int, width: int) -> Clips:
    """Returns a row of `count` clips of `length` frames, of which `clips` are the first."""
    frames, lengths = np.zeros((count, length, width), np.float32), np.zeros(count, np.int32)
    for i, clip in enumerate(clips):
        frames[i, : len(clip)], lengths[i] = clip, len(clip)
    return Clips(frames, lengths)


@dataclasses.dataclass(frozen=True)
class AudioInput:
    """Sound at placeholder tokens (`nn.Decoder.inputs`), as `Clips`.

    A vector of a clip takes one position, like text, and attends to what is before it.

    Args:
        tower: Encoder of sound, `tower(clips, dtype=, remat=) -> R C S D`: vectors of each clip, followed by padding.
        token: Id of the placeholder.
        frame_dim: Numbers in a frame.
        num_tokens: Maps numbers of frames of clips to numbers of vectors.
    """

    tower: Any
    token: int
    frame_dim: int
    num_tokens: Callable[[Any], Any]
    moves_positions: bool = dataclasses.field(default=False, init=False)

    def is_placeholder(self, tokens: Int[Any, "B T"]) -> Bool[Any, "B T"]:
        """Returns True for placeholders of sound."""
        return tokens == self.token

    def check(self, tokens: Int[Any, "B T"], value: Any) -> None:
        """Raises ValueError unless frames, lengths and placeholders match; inside jit only shapes are checked."""
        if value is None:
            check_no_audio(self.is_placeholder(tokens), "no audio was given")
        elif not isinstance(value, Clips):
            raise ValueError(
                f"audio must be nn.audio.Clips (frames and lengths), got {type(value).__name__}; make them with "
                "nn.audio.pad_clips(input_features, input_features_mask), or with a data.AudioProcessor"
            )
        else:
            check_clips(self.is_placeholder(tokens), value, self.frame_dim, self.num_tokens)

    def embed(
        self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], value: Any, call: InputCall
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Puts the vectors of clips in place of their placeholders (`nn.Decoder`)."""
        audio, is_audio = value.in_rows, self.is_placeholder(tokens)
        # Padding may have any id, also that of a placeholder.
        is_audio = is_audio if call.valid is None else is_audio & call.valid
        vectors = self.tower(audio, dtype=call.dtype, remat=call.remat).astype(x.dtype)
        # [R, C] frames -> [R, C] vectors; the tower makes as many of padding too, which are not taken.
        counts = self.num_tokens(jnp.asarray(audio.lengths))
        is_real = jnp.arange(vectors.shape[2])[None, None] < counts[:, :, None]  # [R, C, S]
        # [R, C, S, D] -> [R, C S, D]: the real vectors first, clip after clip.
        order = jnp.argsort(~is_real.reshape(len(vectors), -1), axis=1, stable=True)
        vectors = jnp.take_along_axis(vectors.reshape(*order.shape, -1), order[:, :, None], axis=1)
        return jnp.where(is_audio[:, :, None], take_features(is_audio, vectors, counts.sum(axis=1)), x), {}


def check_no_audio(is_audio: Bool[Any, "B T"], reason: str) -> None:
    """Raises ValueError if there are placeholders of sound; does nothing inside jit.

    Args:
        is_audio: True for placeholders.
        reason: Why there can be none, for the message.
    """
    with contextlib.suppress(jax.errors.TracerArrayConversionError):
        if count := int(np.asarray(is_audio).sum()):
            raise ValueError(f"the tokens have {count} audio placeholders, but {reason}")


def check_clips(is_audio: Bool[Any, "B T"], audio: Clips, width: int, num_tokens: Callable[[Any], Any]) -> None:
    """Raises ValueError unless frames, lengths and placeholders match; inside jit only shapes are checked.

    Args:
        is_audio: True for placeholders.
        audio: The clips.
        width: Numbers in a frame.
        num_tokens: Maps numbers of frames to numbers of vectors.
    """
    shapes = np.shape(audio.frames), np.shape(audio.lengths)
    rows = shapes[0][0] if len(shapes[0]) == 4 else 1
    fits = len(shapes[0]) in (3, 4) and shapes[0][-1] == width and shapes[0][:-2] == shapes[1]
    if not fits or len(is_audio) % max(rows, 1):
        raise ValueError(
            f"audio must be clips of frames of {width} numbers and their lengths, `C F {width}` and `C`, or both with a row "
            f"for each of the {len(is_audio)} rows of tokens in front; got the shapes {shapes[0]} and {shapes[1]}"
        )
    with contextlib.suppress(jax.errors.TracerArrayConversionError):
        lengths = np.asarray(audio.lengths).reshape(rows, -1)
        if lengths.min(initial=0) < 0 or lengths.max(initial=0) > shapes[0][-2]:
            raise ValueError(f"lengths must be between 0 and the {shapes[0][-2]} frames given, got {lengths.tolist()}")
        placeholders = np.asarray(is_audio).reshape(rows, -1).sum(axis=1)
        if (placeholders != (made := num_tokens(lengths).sum(axis=1))).any():
            raise ValueError(
                f"the tokens hold {placeholders.tolist()} audio placeholders by rows of clips, but clips of {lengths.tolist()} frames "
                f"make {made.tolist()} vectors: the numbers must be equal; take prompt and audio from one call of the "
                "processor"
            )
