"""Images of chats: files to patches, and a placeholder for each square of patches among the tokens."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxlib.data._sources import Document
from maxlib.tokenization._chat_template import Message

if TYPE_CHECKING:
    from maxlib.nn.vision import Patches

_FILES = ("preprocessor_config.json", "processor_config.json")  # transformers 4 and 5
_BICUBIC = 3  # the number that PIL gives it
_NARROWEST = 200  # times as long as wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Cuts images of any size into patches, as Hugging Face's processor of Qwen's models does.

    An image keeps its shape and gets sides that are multiples of `patch_size * merge`: the nearest ones, unless it then
    has more or fewer pixels than allowed. Files need Pillow.

    Args:
        image_token: Id of the placeholder, which each square of `merge` x `merge` patches has one of.
        patch_size: Side of a patch in pixels.
        merge: Side of the squares of patches.
        frames: Times that a patch shows the image, for models that also read videos.
        min_pixels: Smaller images are made larger.
        max_pixels: Larger images are made smaller.
        mean: Of each color, subtracted from values from 0 to 1.
        std: Of each color, by which the result is divided.
    """

    image_token: int
    patch_size: int = 16
    merge: int = 2
    frames: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    def from_directory(cls, directory: str | os.PathLike) -> "ImageProcessor":
        """Reads what a Hugging Face directory says of images, in the files of its processor and in `config.json`.

        Raises:
            FileNotFoundError: when it has no such file, as for a model of text.
            ValueError: when its images are prepared in another way.
        """
        directory = Path(directory)
        path = next((directory / name for name in _FILES if (directory / name).exists()), None)
        if path is None:
            raise FileNotFoundError(f"{directory} has none of {list(_FILES)}: its model reads no images")
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields = fields.get("image_processor", fields)
        _check_fields(path, fields)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        smallest, largest = (_pixels(path, fields, *names) for names in _SIZES)
        return cls(
            image_token=config["image_token_id"],
            patch_size=fields["patch_size"],
            merge=fields["merge_size"],
            frames=fields["temporal_patch_size"],
            min_pixels=smallest,
            max_pixels=largest,
            mean=tuple(fields["image_mean"]),
            std=tuple(fields["image_std"]),
        )

    @property
    def patch_dim(self) -> int:
        """Numbers in a patch."""
        return 3 * self.frames * self.patch_size**2

    def __call__(self, image: Any) -> "Patches":
        """Returns the patches of one image, `n patch_dim`, and its grid, `1 3`.

        Args:
            image: A file, an image of Pillow, or an array `H W 3` of bytes.

        Raises:
            ValueError: when the array has another shape or type, or the image is 200 times as long as wide.
        """
        from maxlib.nn import vision

        values = np.asarray(self._resized(image), np.float32) / 255  # [H, W, 3]
        values = (values - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        return vision.cut(values.transpose(2, 0, 1), self.patch_size, merge=self.merge, frames=self.frames)

    def join(self, images: Sequence["Patches"]) -> "Patches":
        """Joins the images of a document, `n patch_dim` and `i 3`; there may be none."""
        from maxlib.nn.vision import Patches

        pixels = [np.zeros((0, self.patch_dim), np.float32), *(image.pixels for image in images)]
        grids = [np.zeros((0, 3), np.int32), *(image.grids for image in images)]
        return Patches(np.concatenate(pixels), np.concatenate(grids))

    def blank(self, patches: int) -> "Patches":
        """Returns a row without an image that has room for so many patches, and for as many images as these can make;
        `pack` fills such rows.
        """
        from maxlib.nn.vision import Patches

        if patches < self.merge**2:
            raise ValueError(f"a row must have room for an image of {self.merge**2} patches at least, got {patches}")
        size = patches // self.merge**2
        return Patches(np.zeros((patches, self.patch_dim), np.float32), np.zeros((size, 3), np.int32))

    def _resized(self, image: Any) -> Any:
        try:
            from PIL import Image
        except ImportError as error:
            raise ImportError("reading images needs Pillow: pip install 'maxlib[images]'") from error

        if isinstance(image, str | os.PathLike):
            with Image.open(image) as file:
                return self._resized(file.convert("RGB"))
        if isinstance(image, np.ndarray):
            if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
                raise ValueError(f"an array must be `H W 3` of uint8, got {image.shape} of {image.dtype}")
            image = Image.fromarray(image)
        height, width = self.size(image.height, image.width)
        return image.convert("RGB").resize((width, height), resample=Image.Resampling.BICUBIC)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to."""
        if max(height, width) > _NARROWEST * min(height, width):
            raise ValueError(f"an image must be at most {_NARROWEST} times as long as wide, got {height} x {width}")
        side = self.patch_size * self.merge
        near = [round(length / side) * side for length in (height, width)]
        area = near[0] * near[1]
        if area > self.max_pixels:  # rounded down, so that it is allowed
            by = (self.max_pixels / (height * width)) ** 0.5
            near = [max(side, int(length * by / side) * side) for length in (height, width)]
        elif area < self.min_pixels:  # rounded up
            by = (self.min_pixels / (height * width)) ** 0.5
            near = [int(np.ceil(length * by / side)) * side for length in (height, width)]
        return near[0], near[1]


_SIZES = (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))


def _pixels(path: Path, fields: Mapping[str, Any], name: str, old: str) -> int:
    """Reads a number of pixels: the "edges" are areas here."""
    found = fields.get(old) or (fields.get("size") or {}).get(name)
    if not isinstance(found, int):
        raise ValueError(f"{path}: size.{name} must be a number of pixels, got {found!r}")
    return found


def _check_fields(path: Path, fields: Mapping[str, Any]) -> None:
    """Raises ValueError unless images are prepared as `ImageProcessor` does."""
    kind = str(fields.get("image_processor_type"))
    if not kind.startswith("Qwen2VLImageProcessor"):
        raise ValueError(
            f"{path}: images of any size are prepared by Qwen2VLImageProcessor, this model's by {kind}: make its Patches "
            "with its own processor"
        )
    expected = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    expected |= {"resample": _BICUBIC, "rescale_factor": 1 / 255}
    for name, value in expected.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{path}: {name} must be {value}, got {fields[name]!r}")


def find_images(document: Document) -> list[Any]:
    """Returns the images of a chat, in order; names of files start from the document's `folder`, if it has one.

    An image is a part `{"type": "image", "image": ...}` of a message's content, or one with `path` instead.

    Raises:
        ValueError: for an address on the web, and for videos.
    """
    found = [_image(part) for message in document["messages"] for part in _parts(message)]
    return [
        Path(document.get("folder", ""), image) if isinstance(image, str | os.PathLike) else image for image in found
    ]


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = {part.get("type") for part in parts if isinstance(part, Mapping)}
    if "video" in kinds:
        raise ValueError("a chat may have images, not videos: give frames as images")
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


def _image(part: Mapping[str, Any]) -> Any:
    image = next((part[name] for name in ("image", "path", "url") if part.get(name) is not None), None)
    if image is None or (isinstance(image, str) and image.startswith(("http:", "https:", "data:"))):
        raise ValueError(f"an image must be a file, under 'image' or 'path', got {image!r}: download it first")
    return image


def expand(
    tokens: np.ndarray, targets: np.ndarray, image_token: int, counts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Repeats each placeholder as often as its image has squares of patches; no placeholder is a target.

    Args:
        tokens: Ids with one placeholder for each image.
        targets: What is to be predicted from each token.
        image_token: Id of the placeholder.
        counts: Squares of each image.

    Raises:
        ValueError: when there are not as many placeholders as images.
    """
    at = np.flatnonzero(tokens == image_token)
    if len(at) != len(counts):
        raise ValueError(f"the template wrote {len(at)} image placeholders for {len(counts)} images")
    times = np.ones(len(tokens), np.int64)
    times[at] = counts
    out = np.full(times.sum(), -1, np.int32)
    out[np.cumsum(times) - 1] = targets  # the last of a placeholder predicts what comes after the image
    out[out == image_token] = -1
    return np.repeat(tokens, times), out
