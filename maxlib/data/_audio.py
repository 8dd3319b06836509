"""Sound of chats: converts waveforms to frames, with a placeholder token for each vector of a clip.

Shapes: n samples, F frames, M numbers in a frame.
"""

import dataclasses
import functools
import json
import os
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float

from maxlib.data._images import processor_class, read_processor

if TYPE_CHECKING:
    from maxlib.nn.audio import Clips

_FRAME, _HOP, _FFT = 320, 160, 512  # 20 and 10 ms in samples, and the length of the transform
_FLOOR = 1e-3  # added to magnitudes before the logarithm
_WHISPER = {"dither": 0.0, "hop_length": _HOP, "n_fft": 400, "padding_value": 0.0, "sampling_rate": 16_000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioProcessor:
    """Makes log-mel frames of waveforms, as Hugging Face's feature extractor of Gemma 4 (E2B, E4B) does.

    A frame is 20 ms under a Hann window, every 10 ms: the logarithm of the magnitudes of its Fourier transform, summed
    into bands that are triangles on the mel scale. The first is centered on the first sample. Frames that reach beyond
    the last sample are left out. Four frames become one vector.

    Args:
        audio_token: Id of the placeholder, one for each vector.
        begin_token: Id before a clip.
        end_token: Id after a clip.
        rate: Samples per second.
        max_samples: Longest clip; 30 seconds.
        num_bands: Number M of mel bands.
    """

    audio_token: int = 258_881
    begin_token: int = 256_000
    end_token: int = 258_883
    rate: int = 16_000
    max_samples: int = 480_000
    num_bands: int = 128

    prepares: ClassVar[tuple[str, ...]] = ("Gemma4AudioFeatureExtractor",)  # its class in transformers
    # Fields of that class with the only values that are computed.
    fixed: ClassVar[Mapping[str, Any]] = {
        "dither": 0.0,
        "fft_length": _FFT,
        "fft_overdrive": False,
        "frame_length": _FRAME,
        "hop_length": _HOP,
        "input_scale_factor": 1.0,
        "max_frequency": 8000.0,
        "mel_floor": _FLOOR,
        "min_frequency": 0.0,
        "padding_value": 0.0,
        "per_bin_mean": None,
        "per_bin_stddev": None,
        "preemphasis": 0.0,
        "sampling_rate": 16_000,
    }

    @classmethod
    def from_directory(cls, directory: str | os.PathLike) -> "AudioProcessor":
        """Reads the audio processor of a Hugging Face directory from its processor files and `config.json`.

        Returns:
            The model's audio processor: an `AudioProcessor`, a `WaveformProcessor` for Gemma 4 12B, a
            `WhisperProcessor`, or a `Qwen3OmniAudioProcessor`.

        Raises:
            FileNotFoundError: when it has no such file.
            ValueError: when its model does not hear, or its sound is prepared in an unsupported way.
        """
        path, fields = read_processor(Path(directory), "feature_extractor", "sound")
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        known: tuple[type[AudioProcessor], ...] = AudioProcessor, WaveformProcessor, WhisperProcessor
        known = (Qwen3OmniAudioProcessor,) if "thinker_config" in config else known
        processor = processor_class(path, fields, "feature_extractor_type", known)
        for name, value in processor.fixed.items():
            if name in fields and fields[name] != value:
                raise ValueError(f"{path}: {name} must be {value}, got {fields[name]!r}")
        return processor._read(fields, config)

    @classmethod
    def _read(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "AudioProcessor":
        return cls(**_tokens(config), num_bands=fields.get("feature_size", 128))

    @property
    def frame_dim(self) -> int:
        """Numbers in a frame."""
        return self.num_bands

    @property
    def min_samples(self) -> int:
        """Samples of the shortest clip, which has one frame."""
        return _FRAME // 2 + 1

    def __call__(self, sound: Any) -> "Clips":
        """Returns the frames of one clip, `1 F M`, and their number, `1`.

        Args:
            sound: A .wav file, an array `n` of floats from -1 to 1 at `rate`, or `{"array": ..., "sampling_rate": ...}`
                as in Hugging Face's data sets.

        Raises:
            ValueError: for another number of samples per second, an array of another shape or type or with numbers that
                are not finite, and a clip that is shorter than a frame or longer than `max_samples`.
        """
        from maxlib.nn.audio import Clips

        samples = self._samples(sound)
        if not self.min_samples <= len(samples) <= self.max_samples:
            raise ValueError(
                f"a clip must have {self.min_samples} to {self.max_samples} samples ({self.max_samples / self.rate:g} seconds), "
                f"got {len(samples)}: cut it"
            )
        frames = self.frames(samples)
        return Clips(frames[None], np.array([len(frames)], np.int32))

    def _samples(self, sound: Any) -> Float[np.ndarray, " n"]:
        """Returns the samples of a file or an array, as float32."""
        if isinstance(sound, str | os.PathLike):
            sound = read_wave(sound)
        if isinstance(sound, Mapping):
            if sound["sampling_rate"] != self.rate:
                raise ValueError(
                    f"a clip must have {self.rate} samples per second, got {sound['sampling_rate']}: resample it"
                )
            sound = sound["array"]
        samples = np.asarray(sound)
        if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
            raise ValueError(
                f"a clip must be one channel of floats from -1 to 1, `n`, got {samples.shape} of {samples.dtype}"
            )
        if not np.isfinite(samples).all():
            raise ValueError(f"the samples of a clip must be finite, got {samples[~np.isfinite(samples)][0]}")
        return samples.astype(np.float32)

    def frames(self, samples: Float[np.ndarray, " n"]) -> Float[np.ndarray, "F M"]:
        """Returns the frames of a clip, of float32 samples."""
        padded = np.pad(samples, (_FRAME // 2, 0))
        # Hugging Face cuts windows of one more sample, and omits it.
        windows = np.lib.stride_tricks.sliding_window_view(padded, _FRAME + 1)[::_HOP, :-1]
        hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)).astype(np.float32)
        # [F, window] -> [F, frequencies] -> [F, M]
        magnitudes = np.abs(np.fft.rfft(windows * hann, n=_FFT, axis=-1))
        return np.log(magnitudes @ _mel_bands(self.num_bands, self.rate) + _FLOOR).astype(np.float32)

    def num_tokens(self, length: int) -> int:
        """Returns the number of vectors of a clip with so many frames."""
        return (length + 3) // 4

    def placeholders(self, length: int | np.integer) -> list[int]:
        """Returns the ids that stand for a clip with so many frames."""
        return [self.begin_token, *[self.audio_token] * self.num_tokens(int(length)), self.end_token]

    def join(self, clips: Sequence["Clips"]) -> "Clips":
        """Joins the clips of a document, `C F M` and `C`; there may be none."""
        from maxlib.nn.audio import stack_clips

        frames = [clip for joined in clips for clip in joined.real]
        return stack_clips(frames, len(frames), max(map(len, frames), default=0), self.frame_dim)

    def blank(self, clips: int, frames: int) -> "Clips":
        """Returns an empty row with room for `clips` clips of `frames` frames; `pad` and `pack` fill such rows."""
        from maxlib.nn.audio import stack_clips

        if clips < 1 or frames < 1:
            raise ValueError(f"a row must have room for a clip of a frame at least, got {clips} clips of {frames}")
        return stack_clips((), clips, frames, self.frame_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaveformProcessor(AudioProcessor):
    """Cuts waveforms into frames of samples, as Hugging Face's feature extractor of Gemma 4 12B does.

    The last frame is filled with zeros. Each becomes one vector; `num_bands` is not used.

    Args:
        num_samples: Number M of samples in a frame; 40 ms.
    """

    num_samples: int = 640

    prepares: ClassVar[tuple[str, ...]] = ("Gemma4UnifiedAudioFeatureExtractor",)
    fixed: ClassVar[Mapping[str, Any]] = {"padding_value": 0.0, "sampling_rate": 16_000}

    @classmethod
    def _read(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "WaveformProcessor":
        return cls(**_tokens(config), num_samples=fields.get("audio_samples_per_token", 640))

    @property
    def frame_dim(self) -> int:
        """Numbers in a frame."""
        return self.num_samples

    @property
    def min_samples(self) -> int:
        """Samples of the shortest clip."""
        return 1

    def frames(self, samples: Float[np.ndarray, " n"]) -> Float[np.ndarray, "F M"]:
        """Returns the frames of a clip, of float32 samples."""
        return np.pad(samples, (0, -len(samples) % self.num_samples)).reshape(-1, self.num_samples)

    def num_tokens(self, length: int) -> int:
        """Returns the number of vectors of a clip with so many frames."""
        return length


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperProcessor(AudioProcessor):
    """Makes log-mel frames of waveforms, as Hugging Face's feature extractor of Whisper does.

    A clip is filled with silence to 30 seconds, which the encoder reads whole, so every clip has 3000 frames: 25 ms
    every 10 ms. Bands are the logarithms of the energies of triangles of equal area on Slaney's mel scale, at most 80
    dB below the loudest. There are no placeholders. A clip is the `audio` of a row: `nn.audio.Clips` of one clip.
    """

    num_bands: int = 80

    prepares: ClassVar[tuple[str, ...]] = ("WhisperFeatureExtractor",)
    fixed: ClassVar[Mapping[str, Any]] = _WHISPER | {"chunk_length": 30}

    @classmethod
    def _read(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "WhisperProcessor":
        return cls(num_bands=fields.get("feature_size", 80))

    @property
    def min_samples(self) -> int:
        """Samples of the shortest clip."""
        return 1

    def frames(self, samples: Float[np.ndarray, " n"]) -> Float[np.ndarray, "F M"]:
        """Returns the frames of a clip, of float32 samples."""
        return self._log_mel(np.pad(samples, (0, self.max_samples - len(samples))))

    def _log_mel(self, samples: Float[np.ndarray, " n"]) -> Float[np.ndarray, "F M"]:
        """Returns the frames of samples that are mirrored at both ends."""
        padded = np.pad(samples, 200, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, 400)[::_HOP][: len(samples) // _HOP]
        hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)).astype(np.float32)
        # [F, window] -> [F, frequencies] -> [F, M]
        energies = np.abs(np.fft.rfft(windows * hann, axis=-1)) ** 2
        bands = np.log10(np.maximum(energies @ _slaney_bands(self.num_bands, self.rate), 1e-10))
        return ((np.maximum(bands, bands.max() - 8) + 4) / 4).astype(np.float32)

    def placeholders(self, length: int | np.integer) -> list[int]:
        """Raises ValueError: the decoder attends to the encoder's output, which takes no places of tokens."""
        raise ValueError(
            "Whisper hears by cross-attention, without placeholders: pass the clips as audio= of the model"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3OmniAudioProcessor(WhisperProcessor):
    """Makes frames of waveforms as `WhisperProcessor` does, but of the clip alone, without silence behind it.

    A hundred frames become 13 vectors. The template has the tokens around a clip.
    """

    num_bands: int = 128
    max_samples: int = 4_800_000

    fixed: ClassVar[Mapping[str, Any]] = _WHISPER

    @classmethod
    def _read(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "Qwen3OmniAudioProcessor":
        ids = config["thinker_config"]
        return cls(
            audio_token=ids["audio_token_id"],
            begin_token=ids["audio_start_token_id"],
            end_token=ids.get("audio_end_token_id", 151_670),
            num_bands=fields.get("feature_size", 80),
            max_samples=fields.get("n_samples", 4_800_000),
        )

    @property
    def min_samples(self) -> int:
        """Samples of the shortest clip, which is mirrored within itself."""
        return 201

    def frames(self, samples: Float[np.ndarray, " n"]) -> Float[np.ndarray, "F M"]:
        """Returns the frames of a clip, of float32 samples."""
        return self._log_mel(samples)

    def num_tokens(self, length: int) -> int:
        """Returns the number of vectors of a clip with so many frames."""
        return length // 100 * 13 + (length % 100 + 7) // 8

    def placeholders(self, length: int | np.integer) -> list[int]:
        """Returns the ids that stand for a clip with so many frames, between those of the template."""
        return [self.audio_token] * self.num_tokens(int(length))


def _tokens(config: Mapping[str, Any]) -> dict[str, int]:
    """Reads the ids of a clip from config.json; raises ValueError for a model that does not hear."""
    if config.get("audio_config") is None:
        raise ValueError("config.json must have an audio_config, without which a model does not hear")
    usual = {"audio_token": ("audio_token_id", 258_881), "begin_token": ("boa_token_id", 256_000)}
    usual |= {"end_token": ("eoa_token_index", 258_883)}
    return {name: config.get(field, value) for name, (field, value) in usual.items()}


@functools.cache
def _mel_bands(count: int, rate: int) -> Float[np.ndarray, "frequencies M"]:
    """Returns the weights of frequencies in each band: triangles between every third of equally spaced mels."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, count + 2) / 2595) - 1)  # in hertz
    steps = np.linspace(0, rate // 2, _FFT // 2 + 1)[:, None] - edges[None]  # [frequencies, count + 2]
    widths = np.diff(edges)[None]
    rising, falling = steps[:, :-2] / widths[:, :-1], -steps[:, 2:] / widths[:, 1:]
    return np.maximum(0, np.minimum(rising, falling))


@functools.cache
def _slaney_bands(count: int, rate: int) -> Float[np.ndarray, "frequencies M"]:
    """Returns the weights of frequencies in each band of Slaney's scale, 3 mels for 200 Hz up to 1000 Hz, then
    logarithmic; triangles of equal area.
    """
    per_octave = 27 / np.log(6.4)  # mels of a factor of e above 1000 Hz, which has 15
    mels = np.linspace(0, 15 + per_octave * np.log(rate / 2 / 1000), count + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) / per_octave))  # in hertz
    steps = np.linspace(0, rate // 2, 201)[:, None] - edges[None]
    widths = np.diff(edges)[None]
    triangles = np.minimum(steps[:, :-2] / widths[:, :-1], -steps[:, 2:] / widths[:, 1:])
    return np.maximum(0, triangles) * 2 / (edges[2:] - edges[:-2])


def read_wave(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a .wav file of 16 or 32 bits as `{"array": ..., "sampling_rate": ...}`; channels become their mean.

    Raises:
        ValueError: for another format.
    """
    try:
        with wave.open(os.fspath(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path}: sound must be an uncompressed .wav file, got {error}: convert it") from error
    if width not in (2, 4):
        raise ValueError(f"{path}: samples must have 16 or 32 bits, got {8 * width}: convert the file")
    if len(data) % (width * channels):
        raise ValueError(f"{path}: the last sample is cut off: the file is damaged")
    values = np.frombuffer(data, f"<i{width}").reshape(-1, channels)
    return {"array": (values / 2.0 ** (8 * width - 1)).mean(axis=1).astype(np.float32), "sampling_rate": rate}
