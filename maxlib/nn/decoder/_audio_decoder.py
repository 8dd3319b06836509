"""Base class of decoders that read clips of sound, and images of any size."""

import contextlib
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn.audio._clips import Clips, check_clips, take_clips
from maxlib.nn.cache import Cache
from maxlib.nn.decoder._model import Output
from maxlib.nn.decoder._native_vision import NativeVisionDecoder
from maxlib.nn.remat import Policy
from maxlib.nn.vision._encoder import unseen
from maxlib.nn.vision._patches import Patches


@runtime_checkable
class AudioModel(Protocol):
    """Protocol of models whose `__call__` takes audio, in addition to `Model`."""

    def check_audio(self, tokens: Int[Any, "B T"], audio: Any) -> None:
        """Raises ValueError when placeholders among `tokens` and `audio` do not match, or the model does not hear."""
        ...


class AudioDecoder(NativeVisionDecoder):
    """Decoder that reads sound at placeholder tokens, if its constructor sets `audio_tower`; images as its base class.

    Its `cfg.audio` is None, or has `frame_dim` (numbers in a frame) and `num_tokens(lengths)`, the number of vectors
    for clips of so many frames. `cfg.audio_token` is the placeholder, or None. A vector takes one position, like text,
    and attends to what is before it.

    Attributes:
        audio_tower: Encoder of sound, `audio_tower(clips, dtype=, remat=) -> R C S D`: vectors of each clip, followed
            by padding.
    """

    audio_tower: Any = None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T *R"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        images: Patches | None = None,
        audio: Clips | None = None,
        cache: Cache | None = None,
        dtype: Any = jnp.bfloat16,
        remat: Policy = None,
    ) -> Output:
        """Computes the hidden states of rows of tokens, images and sound; see `NativeVisionDecoder.__call__`.

        Args:
            tokens: Ids, `B T`, with a placeholder for each vector of an image or a clip.
            positions: Positions for rotary tables.
            segment_ids: Packed document of each token.
            valid: False for padding.
            images: Images as `nn.vision.Patches`, in the order of their placeholders.
            audio: Sound as `nn.audio.Clips`, in the order of its placeholders.
            cache: Cache of earlier tokens, or None. All placeholders of a clip must be in one call.
            dtype: Dtype of the computation.
            remat: What layers keep for the backward pass.

        Raises:
            ValueError: when images or audio are given to a model without an encoder for them, or do not fit their
                placeholders (inside jit, where ids are hidden, placeholders become NaN instead).
        """
        inputs = {"positions": positions, "segment_ids": segment_ids, "valid": valid, "images": images, "audio": audio}
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
        audio: Clips | None = None,
        **inputs: Any,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Returns the vectors of tokens, images and sound, and the arguments of `enter`; see `Decoder.embed_inputs`."""
        x, inputs = super().embed_inputs(tokens, dtype=dtype, cache=cache, remat=remat, images=images, **inputs)
        self.check_audio(tokens, audio)
        if audio is None:
            waits = self.cfg.audio is not None and cache is None
            return (unseen(x, self.is_audio(tokens)) if waits else x), inputs
        audio, valid = audio.in_rows, inputs.get("valid")
        # Padding may have any id, also that of a placeholder.
        is_audio = self.is_audio(tokens) if valid is None else self.is_audio(tokens) & valid
        vectors = self.audio_tower(audio, dtype=dtype, remat=remat).astype(x.dtype)
        # [R, C] frames -> [R, C] vectors; the tower makes as many of padding too, which are not taken.
        counts = self.cfg.audio.num_tokens(jnp.asarray(audio.lengths))
        return jnp.where(is_audio[:, :, None], take_clips(is_audio, vectors, counts), x), inputs

    def is_audio(self, tokens: Int[Any, "B T"]) -> Bool[Any, "B T"]:
        """Returns True for placeholders of sound."""
        return tokens == (-1 if self.cfg.audio_token is None else self.cfg.audio_token)

    def check_audio(self, tokens: Int[Any, "B T"], audio: Any) -> None:
        """Raises ValueError as `__call__` does; generators call it before they enter jit."""
        hears, name = self.cfg.audio, type(self).__name__
        if audio is None:
            with contextlib.suppress(jax.errors.TracerArrayConversionError):
                if count := int(np.asarray(self.is_audio(tokens)).sum()):
                    none = "no audio was given" if hears else f"this {name} does not hear (its config has no audio)"
                    raise ValueError(f"the tokens have {count} audio placeholders, but {none}")
        elif hears is None:
            raise ValueError(f"this {name} does not hear (its config has no audio): call it without audio")
        elif not isinstance(audio, Clips):
            raise ValueError(
                f"audio must be nn.audio.Clips (frames and lengths), got {type(audio).__name__}; make them with "
                "nn.audio.clips(input_features, input_features_mask), or with a data.AudioProcessor"
            )
        else:
            check_clips(self.is_audio(tokens), audio, hears.frame_dim, hears.num_tokens)
