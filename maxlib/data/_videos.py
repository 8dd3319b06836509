"""Videos of chats: chooses frames of a file, a directory or an array, and cuts them into patches.

Shapes: N frames of a video, T chosen ones, H rows and W columns of pixels.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int, UInt8

from maxlib.data._images import (
    ImageProcessor,
    largest_size,
    open_image,
    pixels_field,
    processor_class,
    read_processor,
)

if TYPE_CHECKING:
    from maxlib.nn.vision import Patches

_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_USUAL_RATE = 24.0  # of frames whose rate is not known, as in transformers


@dataclasses.dataclass(frozen=True)
class Video:
    """Frames of a video that are in memory, or files of them.

        film = data.Video(np.zeros((60, 16, 24, 3), np.uint8), fps=30.0)  # the "video" of a part of a chat

    Args:
        frames: `N H W 3` of uint8, or the frames' images or files in order.
        fps: Frames per second.
    """

    frames: UInt8[np.ndarray, "N H W 3"] | Sequence[Any]
    fps: float = _USUAL_RATE


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoProcessor(ImageProcessor):
    """Chooses frames and cuts them into patches, as Hugging Face's processor of Qwen2-VL and Qwen2.5-VL does.

    `frames` consecutive frames make one patch; a last one is repeated to fill it. Each such group of frames is an image
    of the model (`nn.vision.Patches`). `image_token` is the placeholder of videos, `min_pixels` and `max_pixels` are
    limits of a frame.

    Args:
        fps: Chosen frames per second of the video; None for no rate.
        num_frames: Number of chosen frames, instead of a rate; with neither all frames are chosen.
        min_frames: Minimum number of frames chosen by `fps`.
        max_frames: Maximum number of frames chosen by `fps`.
        max_tokens: Maximum number of tokens of a video, which its frames share equally; a frame keeps at least 1.05
            `min_pixels`. None for no limit.
    """

    fps: float | None = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    max_tokens: int | None = None

    prepares: ClassVar[tuple[str, ...]] = ("Qwen2VLVideoProcessor", "Qwen2_5_VLVideoProcessor")

    def __post_init__(self):
        super().__post_init__()
        if self.fps is not None and self.num_frames is not None:
            raise ValueError(f"choose frames by fps or by num_frames, got {self.fps} and {self.num_frames}: set one")

    @classmethod
    def from_directory(cls, directory: str | os.PathLike) -> "VideoProcessor":
        """Reads the video processor of a Hugging Face directory from its processor files and `config.json`.

        Returns:
            The model's video processor: a `VideoProcessor`, or a subclass for Qwen3-VL or Gemma 4.

        Raises:
            FileNotFoundError: when it has no such file.
            ValueError: when its videos are prepared in an unsupported way.
        """
        path, fields = read_processor(Path(directory), "video_processor", "videos", _FILES)
        known = (VideoProcessor, Qwen3VideoProcessor, Gemma4VideoProcessor)
        processor = processor_class(path, fields, "video_processor_type", known)
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        return processor._read(path, fields, config)

    @classmethod
    def _read(cls, path: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "VideoProcessor":
        samples = fields.get("do_sample_frames", issubclass(cls, Qwen3VideoProcessor))
        usual = {field.name: field.default for field in dataclasses.fields(cls)}
        return cls(
            image_token=config["video_token_id"],
            patch_size=fields.get("patch_size", usual["patch_size"]),
            merge=fields.get("merge_size", usual["merge"]),
            frames=fields.get("temporal_patch_size", usual["frames"]),
            min_pixels=pixels_field(path, fields, "shortest_edge", "min_pixels"),
            max_pixels=pixels_field(path, fields, "longest_edge", "max_pixels"),
            mean=tuple(fields["image_mean"]),
            std=tuple(fields["image_std"]),
            fps=fields.get("fps", usual["fps"]) if samples and not fields.get("num_frames") else None,
            num_frames=fields.get("num_frames") if samples else None,
            min_frames=fields.get("min_frames", usual["min_frames"]),
            max_frames=fields.get("max_frames", usual["max_frames"]),
            max_tokens=fields.get("max_video_tokens", cls._usual_tokens)
            if fields.get("cap_pixels_per_frame")
            else None,
            **cls._further(config),
        )

    _usual_tokens: ClassVar[int] = 128_000

    @classmethod
    def _further(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def sample(self, count: int, fps: float) -> Int[np.ndarray, " T"]:
        """Returns the indices of the frames to choose of a video.

        Args:
            count: Number of its frames.
            fps: Its frames per second.

        Raises:
            ValueError: when it has too few frames.
        """
        step = self.frames
        if self.num_frames is not None:
            chosen = round(self.num_frames / step) * step
        elif self.fps is not None:
            most = min(self.max_frames, count) // step * step
            chosen = math.floor(min(max(count / fps * self.fps, self.min_frames), most, count) / step) * step
        else:
            chosen = count
        if not 0 < chosen <= count:
            raise ValueError(f"{chosen} frames must be chosen of a video, which has {count}: change num_frames or fps")
        # Spaced evenly, as float32, in which transformers rounds them.
        return np.arange(0, count, count / chosen).astype(np.float32).astype(np.int64)

    def frames_of(self, video: Any) -> tuple["Patches", Float[np.ndarray, " T"]]:
        """Returns the patches of a video, a grid for each group of frames, and the times of all chosen frames.

        Args:
            video: A file, which PyAV decodes (`pip install 'maxlib[video]'`), a directory of frames in the order of
                their names, an array `N H W 3` of uint8, or a `Video`, which has a rate as well.

        Raises:
            ValueError: when there are no frames or too few, or their sizes differ.
        """
        frames, indices, fps = _chosen(video, self.sample)
        return self(frames), indices / fps

    def __call__(self, image: Sequence[Any] | np.ndarray) -> "Patches":
        """Returns the patches of the frames of one video, all of one size, and a grid for each group of them."""
        pictures = [open_image(frame) for frame in image]
        if len({picture.size for picture in pictures}) != 1:
            raise ValueError(f"the frames of a video must have one size, got {sorted({p.size for p in pictures})}")
        return self.cut(pictures, self.frame_size(len(pictures), pictures[0].height, pictures[0].width))

    def frame_size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that each of `count` chosen frames is resized to."""
        if self.max_tokens is None:
            return self.size(height, width)
        # 90 % of the tokens, in pixels, divided among the groups of frames.
        pixels = int(self.max_tokens * (self.patch_size * self.merge) ** 2 * 0.9)
        most = max(min(self.max_pixels, pixels * self.frames // count), int(self.min_pixels * 1.05))
        return dataclasses.replace(self, max_pixels=most, max_tokens=None).size(height, width)

    def text(self, times: Float[np.ndarray, " T"], name: Callable[[int], str]) -> str:
        """Returns what a chat has in place of a video: a placeholder for each group of frames.

        Args:
            times: Time of each chosen frame in seconds.
            name: Function from an id to the text of a special token.
        """
        return name(self.image_token) * -(-len(times) // self.frames)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VideoProcessor(VideoProcessor):
    """Chooses frames as Hugging Face's processor of Qwen3-VL and Qwen3.5 does, and writes the time before each group.

    `min_pixels` and `max_pixels` are limits of all chosen frames together; `max_tokens` limits one frame.

    Args:
        begin_token: Id before a group of frames.
        end_token: Id after a group of frames.
    """

    begin_token: int
    end_token: int

    prepares: ClassVar[tuple[str, ...]] = ("Qwen3VLVideoProcessor",)
    _usual_tokens: ClassVar[int] = 768

    @classmethod
    def _further(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"begin_token": config["vision_start_token_id"], "end_token": config["vision_end_token_id"]}

    def sample(self, count: int, fps: float) -> Int[np.ndarray, " T"]:
        """Returns the indices of the frames to choose, from the first to the last; see `VideoProcessor`."""
        chosen = self.num_frames
        if chosen is None:
            by_rate = count if self.fps is None else int(count / fps * self.fps)
            chosen = min(max(by_rate, self.min_frames), self.max_frames, count)
        if not 0 < chosen <= count:
            raise ValueError(f"{chosen} frames must be chosen of a video, which has {count}: change num_frames or fps")
        return np.linspace(0, count - 1, chosen).round().astype(np.int64)

    def frame_size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that each of `count` chosen frames is resized to."""
        side, most = self.patch_size * self.merge, self.max_pixels
        if self.max_tokens is not None:
            share = min(self.max_tokens * side**2, self.max_pixels // count)
            most = max(share, int(self.min_pixels * 1.05)) * count
        if min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        near = [round(length / side) * side for length in (height, width)]
        groups = round(count / self.frames) * self.frames
        if groups * math.prod(near) > most:
            by = math.sqrt(count * height * width / most)
            near = [max(side, math.floor(length / by / side) * side) for length in (height, width)]
        elif groups * math.prod(near) < self.min_pixels:
            by = math.sqrt(self.min_pixels / (count * height * width))
            near = [math.ceil(length * by / side) * side for length in (height, width)]
        return near[0], near[1]

    def text(self, times: Float[np.ndarray, " T"], name: Callable[[int], str]) -> str:
        """Returns the mean time of the first and the last frame of each group, and its placeholder."""
        groups = np.concatenate([times, np.repeat(times[-1:], -len(times) % self.frames)]).reshape(-1, self.frames)
        begin, token, end = map(name, (self.begin_token, self.image_token, self.end_token))
        return "".join(f"<{(group[0] + group[-1]) / 2:.1f} seconds>{begin}{token}{end}" for group in groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4VideoProcessor(Qwen3VideoProcessor):
    """Chooses frames as Hugging Face's processor of Gemma 4 does: 32 of up to 70 placeholders, with minutes and seconds
    before each. `fps`, `min_pixels` and `max_pixels` are not used.

    Args:
        max_squares: Maximum number of squares of a frame, each with a placeholder.
    """

    max_squares: int = 70
    merge: int = 3
    frames: int = 1
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    fps: float | None = None
    num_frames: int | None = 32

    prepares: ClassVar[tuple[str, ...]] = ("Gemma4VideoProcessor",)
    colors_last: ClassVar[bool] = True

    @classmethod
    def _read(cls, path: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "Gemma4VideoProcessor":
        vision = config["vision_config"]
        names = ("video_token_id", "boi_token_id", "eoi_token_id")
        usual = dict(zip(names, (258_884, 255_999, 258_882), strict=True))
        token, begin, end = (config.get(name, usual[name]) for name in names)
        return cls(
            image_token=token,
            begin_token=begin,
            end_token=end,
            patch_size=vision.get("patch_size", 16),
            merge=vision.get("pooling_kernel_size", 3),
            max_squares=fields.get("max_soft_tokens", 70),
            num_frames=fields.get("num_frames", 32),
        )

    def sample(self, count: int, fps: float) -> Int[np.ndarray, " T"]:
        """Returns the indices of the frames to choose, spaced evenly from the first; see `VideoProcessor`."""
        chosen = min(self.num_frames or count, count)
        return np.arange(chosen) * count // chosen

    def frame_size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that each of `count` chosen frames is resized to."""
        return largest_size(height, width, side=self.patch_size * self.merge, count=self.max_squares)

    def text(self, times: Float[np.ndarray, " T"], name: Callable[[int], str]) -> str:
        """Returns the minute and second of each frame, and its placeholder."""
        begin, token, end = map(name, (self.begin_token, self.image_token, self.end_token))
        return " ".join(f"{int(t // 60):02d}:{int(t % 60):02d} {begin}{token}{end}" for t in times)


def _chosen(
    video: Any, sample: Callable[[int, float], np.ndarray]
) -> tuple[Sequence[Any], Int[np.ndarray, " T"], float]:
    """Returns the chosen frames of a video, their indices, and its frames per second."""
    if isinstance(video, str | os.PathLike) and Path(video).is_dir():
        video = Video(sorted(path for path in Path(video).iterdir() if path.suffix.lower() in _PICTURES))
    if isinstance(video, str | os.PathLike):
        return _decoded(Path(video), sample)
    if not isinstance(video, Video):
        video = Video(video)
    if not len(video.frames):
        raise ValueError("a video must have frames, got none")
    indices = sample(len(video.frames), video.fps)
    return [video.frames[i] for i in indices], indices, video.fps


def _decoded(path: Path, sample: Callable[[int, float], np.ndarray]) -> tuple[list[np.ndarray], np.ndarray, float]:
    try:
        import av
    except ImportError as error:
        raise ImportError("reading video files needs PyAV: pip install 'maxlib[video]'") from error

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        rate = stream.average_rate or _USUAL_RATE
        # Some formats do not say how many frames there are.
        count = stream.frames or sum(1 for _ in container.decode(video=0))
    indices = sample(count, float(rate))
    wanted, frames = set(indices.tolist()), {}
    with av.open(str(path)) as container:
        for i, frame in enumerate(container.decode(video=0)):
            if i in wanted:
                frames[i] = frame.to_ndarray(format="rgb24")
    if len(frames) < len(wanted):
        raise ValueError(f"{path} says that it has {count} frames, but frame {min(wanted - frames.keys())} is missing")
    return [frames[i] for i in indices.tolist()], indices, float(rate)
