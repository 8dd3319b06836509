"""Images of chats: converts files to patches, with a placeholder token for each square of patches."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from maxlib.data._documents import Document

if TYPE_CHECKING:
    from maxlib.nn.vision import Patches

_BICUBIC = 3  # PIL's constant
_NARROWEST = 200  # maximum aspect ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Cuts images of any size into patches, as Hugging Face's processor of Qwen's models does.

    An image keeps its aspect ratio and gets sides that are multiples of `patch_size * merge`: the nearest ones, unless
    it would then have more or fewer pixels than allowed. Pillow resizes images, as in transformers' processors if
    torchvision is not installed, and pixels equal theirs. torchvision rounds some bytes of resized images differently.

    Args:
        image_token: Id of the placeholder, one for each square of `merge` x `merge` patches.
        patch_size: Side of a patch in pixels.
        merge: Side of the squares of patches.
        frames: Number of times that a patch repeats its pixels, for models that also read videos.
        min_pixels: Smaller images are enlarged.
        max_pixels: Larger images are shrunk.
        mean: Mean of each color, subtracted from values between 0 and 1.
        std: Standard deviation of each color, by which the result is divided.
    """

    image_token: int
    patch_size: int = 16
    merge: int = 2
    frames: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    prepares: ClassVar[tuple[str, ...]] = ("Qwen2VLImageProcessor",)  # prefixes of its classes in transformers
    normalizes: ClassVar[bool] = True
    colors_last: ClassVar[bool] = False  # in a patch; False has all pixels of a color together

    def __post_init__(self):
        if not (all(map(math.isfinite, self.mean)) and all(0 < value < math.inf for value in self.std)):
            raise ValueError(f"mean must be finite and std positive, got mean={self.mean} and std={self.std}")

    @classmethod
    def from_directory(cls, directory: str | os.PathLike) -> "ImageProcessor":
        """Reads the image processor of a Hugging Face directory from its processor files and `config.json`.

        Returns:
            The model's image processor: an `ImageProcessor`, or a subclass for Pixtral, Gemma 4 or GLM-4V.

        Raises:
            FileNotFoundError: when it has no such file, as for a text model.
            ValueError: when its images are prepared in an unsupported way.
        """
        path, fields = read_processor(Path(directory), "image_processor", "images")
        known = (ImageProcessor, PixtralImageProcessor, Gemma4ImageProcessor, GLM4VImageProcessor)
        processor = processor_class(path, fields, "image_processor_type", known)
        _check_fields(path, fields, normalizes=processor.normalizes)
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        return processor._read(path, fields, config)

    @classmethod
    def _read(cls, path: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "ImageProcessor":
        """Reads the fields of the image processor in `path`, and of the model's config.json."""
        smallest, largest = (pixels_field(path, fields, *names) for names in _SIZES)
        return cls(
            image_token=config.get("thinker_config", config)["image_token_id"],
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
        """Number of values in a patch."""
        return 3 * self.frames * self.patch_size**2

    def __call__(self, image: Any) -> "Patches":
        """Returns the patches of one image, `n patch_dim`, and its grid, `1 3`.

        Args:
            image: A file, an image of Pillow, or an array `H W 3` of bytes.

        Raises:
            ValueError: when the array has another shape or type, or the aspect ratio exceeds 200.
        """
        picture = open_image(image)
        return self.cut([picture], self.size(picture.height, picture.width))

    def cut(self, pictures: Sequence[Any], size: tuple[int, int]) -> "Patches":
        """Resizes images of Pillow to one height and width, and returns their patches, with a grid for each group of
        `frames` consecutive ones; the last one fills its group.
        """
        from maxlib.nn.vision import Patches

        values = np.stack([np.asarray(resize(picture, *size), np.float32) for picture in pictures]) / 255
        values = (values - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        values = np.concatenate([values, np.repeat(values[-1:], -len(values) % self.frames, axis=0)])
        (H, W), p, m, f = size, self.patch_size, self.merge, self.frames
        # [t, f, y, m, p, x, m, p, C] -> [t, y, x, m, m, and the values of a patch]
        squares = values.reshape(-1, f, H // (p * m), m, p, W // (p * m), m, p, 3)
        squares = squares.transpose(0, 2, 5, 3, 6, *((1, 4, 7, 8) if self.colors_last else (8, 1, 4, 7)))
        grids = np.tile(np.array([[1, H // p, W // p]], np.int32), (len(squares), 1))
        return Patches(squares.reshape(-1, self.patch_dim), grids)

    def placeholders(self, grid: Sequence[int] | np.ndarray) -> list[int]:
        """Returns the ids that stand for an image with a grid of 1 frame, rows and columns of patches."""
        return [self.image_token] * (math.prod(int(n) for n in grid) // self.merge**2)

    def join(self, images: Sequence["Patches"]) -> "Patches":
        """Joins the images of a document, `n patch_dim` and `i 3`; there may be none."""
        from maxlib.nn.vision import Patches

        pixels = [np.zeros((0, self.patch_dim), np.float32), *(image.pixels for image in images)]
        grids = [np.zeros((0, 3), np.int32), *(image.grids for image in images)]
        return Patches(np.concatenate(pixels), np.concatenate(grids))

    def blank(self, patches: int) -> "Patches":
        """Returns an empty row with room for `patches` patches, and for as many images as these can make; `pack` fills
        such rows.
        """
        from maxlib.nn.vision import Patches

        if patches < self.merge**2:
            raise ValueError(f"a row must have room for an image of {self.merge**2} patches at least, got {patches}")
        size = patches // self.merge**2
        return Patches(np.zeros((patches, self.patch_dim), np.float32), np.zeros((size, 3), np.int32))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to."""
        if max(height, width) > _NARROWEST * min(height, width):
            raise ValueError(f"an image must be at most {_NARROWEST} times as long as wide, got {height} x {width}")
        side = self.patch_size * self.merge
        near = [round(length / side) * side for length in (height, width)]
        area = near[0] * near[1]
        if area > self.max_pixels:  # rounded down, to stay within the limit
            by = (self.max_pixels / (height * width)) ** 0.5
            near = [max(side, int(length * by / side) * side) for length in (height, width)]
        elif area < self.min_pixels:  # rounded up
            by = (self.min_pixels / (height * width)) ** 0.5
            near = [int(np.ceil(length * by / side)) * side for length in (height, width)]
        return near[0], near[1]


def open_image(image: Any) -> Any:
    """Returns a file, an image of Pillow or an array `H W 3` of bytes as an image of Pillow in RGB, upright as its
    metadata say.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("reading images needs Pillow: pip install 'maxlib[images]'") from error

    if isinstance(image, str | os.PathLike):
        with Image.open(image) as file:
            return ImageOps.exif_transpose(file).convert("RGB")
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise ValueError(f"an array must be `H W 3` of uint8, got {image.shape} of {image.dtype}")
        image = Image.fromarray(image)
    return ImageOps.exif_transpose(image).convert("RGB")


def resize(image: Any, height: int, width: int) -> Any:
    """Returns an image of Pillow in another size."""
    return image.resize((width, height), resample=_BICUBIC)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralImageProcessor(ImageProcessor):
    """Cuts images as Hugging Face's processor of Pixtral and of Mistral's vision models does.

    An image whose longer side exceeds `longest_edge` is shrunk; then both sides are rounded up to multiples of
    `patch_size * merge`. `break_token` follows each row of squares except the last, and `end_token` follows the image.
    `min_pixels` and `max_pixels` are not used.

    Args:
        break_token: Id between the rows of an image.
        end_token: Id after an image.
        longest_edge: Maximum number of pixels along a side, before rounding up.
    """

    break_token: int
    end_token: int
    longest_edge: int = 1540
    patch_size: int = 14
    frames: int = 1
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    prepares: ClassVar[tuple[str, ...]] = ("PixtralImageProcessor",)

    @classmethod
    def _read(cls, path: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "PixtralImageProcessor":
        from maxlib.tokenization import load_tokenizer

        # The settings of the tokens are in a separate file next to that of the images, or in an enclosing object.
        outer = path.parent / "processor_config.json"
        settings = json.loads(outer.read_text(encoding="utf-8")) if outer.exists() else {}
        merge = config.get("spatial_merge_size", 2) if config["model_type"] == "mistral3" else 1
        patch = config["vision_config"].get("patch_size", 16)
        _check_same(outer, {"patch_size": patch, "spatial_merge_size": merge}, settings)
        edge = (fields.get("size") or {"longest_edge": 1024}).get("longest_edge")
        if not isinstance(edge, int):
            raise ValueError(f"{path}: size.longest_edge must be a number of pixels, got {fields.get('size')!r}")
        tokenizer = load_tokenizer(path.parent)
        ids = {}
        for name in ("break", "end"):
            text = settings.get(f"image_{name}_token", f"[IMG_{name.upper()}]")
            if (token := tokenizer.token_to_id(text)) is None:
                raise ValueError(f"{path.parent}: the tokenizer must have {text}, which is one of an image's tokens")
            ids[f"{name}_token"] = token
        image = config.get("image_token_index", config.get("image_token_id"))
        if not isinstance(image, int):
            raise ValueError(f"{path.parent / 'config.json'}: image_token_index must be given, got {image!r}")
        return cls(
            image_token=image,
            break_token=ids["break_token"],
            end_token=ids["end_token"],
            patch_size=patch,
            merge=merge,
            longest_edge=edge,
            mean=_triple(fields, "image_mean", cls.mean),
            std=_triple(fields, "image_std", cls.std),
        )

    def placeholders(self, grid: Sequence[int] | np.ndarray) -> list[int]:
        """Returns the ids that stand for an image with a grid of 1 frame, rows and columns of patches."""
        rows, columns = (int(n) // self.merge for n in grid[1:])
        row = [self.image_token] * columns
        return [*[*row, self.break_token] * (rows - 1), *row, self.end_token]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to."""
        ratio, side = max(height / self.longest_edge, width / self.longest_edge), self.patch_size * self.merge
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not (height and width):
            raise ValueError(f"an image must be at most {self.longest_edge} times as long as wide")
        return -(-height // side) * side, -(-width // side) * side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4ImageProcessor(ImageProcessor):
    """Cuts images as Hugging Face's processor of Gemma 4 does.

    An image is resized to be as large as possible with at most `max_squares` squares of `merge` x `merge` patches, with
    sides rounded down to multiples of them. `begin_token` and `end_token` enclose its placeholders. `min_pixels` and
    `max_pixels` are not used.

    Args:
        begin_token: Id before an image.
        end_token: Id after an image.
        max_squares: Maximum number of squares, each with a placeholder.
    """

    begin_token: int
    end_token: int
    max_squares: int = 280
    merge: int = 3
    frames: int = 1
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)  # pixels stay between 0 and 1
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    prepares: ClassVar[tuple[str, ...]] = ("Gemma4ImageProcessor", "Gemma4UnifiedImageProcessor")
    normalizes: ClassVar[bool] = False
    colors_last: ClassVar[bool] = True

    @classmethod
    def _read(cls, path: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "Gemma4ImageProcessor":
        vision = config["vision_config"]
        patch, pool = vision.get("patch_size", 16), vision.get("pooling_kernel_size", 3)
        _check_same(path, {"patch_size": patch, "pooling_kernel_size": pool}, fields)
        # A patch of the 12B model is a square of the other models.
        unified = config["model_type"] == "gemma4_unified"
        usual = {"image_token_id": 258_880, "boi_token_id": 255_999, "eoi_token_id": 258_882}
        image, begin, end = (config.get(name, value) for name, value in usual.items())
        return cls(
            image_token=image,
            begin_token=begin,
            end_token=end,
            patch_size=patch * pool if unified else patch,
            merge=1 if unified else pool,
            max_squares=fields.get("max_soft_tokens", 280),
        )

    def placeholders(self, grid: Sequence[int] | np.ndarray) -> list[int]:
        """Returns the ids that stand for an image with a grid of 1 frame, rows and columns of patches."""
        return [self.begin_token, *super().placeholders(grid), self.end_token]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to."""
        return largest_size(height, width, side=self.patch_size * self.merge, count=self.max_squares)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM4VImageProcessor(ImageProcessor):
    """Cuts images as Hugging Face's processor of GLM-4.1V and GLM-4.5V does.

    It differs from Qwen's in two ways: files count the pixels of all `frames`, and an image narrower than a square is
    enlarged to one before its aspect ratio is checked.
    """

    prepares: ClassVar[tuple[str, ...]] = ("Glm4vImageProcessor",)

    @classmethod
    def _read(cls, path: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> "ImageProcessor":
        of_all = super()._read(path, fields, config)
        smallest, largest = -(-of_all.min_pixels // of_all.frames), of_all.max_pixels // of_all.frames
        return dataclasses.replace(of_all, min_pixels=smallest, max_pixels=largest)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to."""
        by = max(1.0, self.patch_size * self.merge / min(height, width))
        return super().size(int(height * by), int(width * by))


def largest_size(height: int, width: int, *, side: int, count: int) -> tuple[int, int]:
    """Returns the largest height and width of about this ratio that make at most `count` squares of a side."""
    by = math.sqrt(count * side**2 / (height * width))
    rows, columns = math.floor(by * height / side), math.floor(by * width / side)
    if not rows:  # so elongated that not even one square fits across: use a strip of one
        rows, columns = 1, min(width // height, count)
    elif not columns:
        rows, columns = min(height // width, count), 1
    return rows * side, columns * side


def _triple(fields: Mapping[str, Any], name: str, usual: tuple[float, float, float]) -> tuple[float, float, float]:
    """Reads one number per color."""
    red, green, blue = fields.get(name) or usual
    return red, green, blue


def _check_same(path: Path, wanted: Mapping[str, int], fields: Mapping[str, Any]) -> None:
    """Raises ValueError if a processor's field contradicts the model's config.json."""
    for name, value in wanted.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{path}: {name} must be {value}, as the model's config.json says, got {fields[name]!r}")


_SIZES = (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))


def pixels_field(path: Path, fields: Mapping[str, Any], name: str, old: str) -> int:
    """Reads a number of pixels: the "edges" are areas here."""
    pixels = fields.get(old) or (fields.get("size") or {}).get(name)
    if not isinstance(pixels, int):
        raise ValueError(f"{path}: size.{name} must be a number of pixels, got {pixels!r}")
    return pixels


def _check_fields(path: Path, fields: Mapping[str, Any], *, normalizes: bool) -> None:
    """Raises ValueError unless images are prepared as by `ImageProcessor`."""
    expected = dict.fromkeys(("do_resize", "do_rescale", "do_convert_rgb"), True)
    expected |= {"do_normalize": normalizes, "resample": _BICUBIC, "rescale_factor": 1 / 255}
    for name, value in expected.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{path}: {name} must be {value}, got {fields[name]!r}")


def read_processor(
    directory: Path,
    section: str,
    what: str,
    files: Sequence[str] = ("preprocessor_config.json", "processor_config.json"),
) -> tuple[Path, dict[str, Any]]:
    """Reads a Hugging Face directory's processor, and returns its file and its fields.

    Args:
        directory: The directory.
        section: Name of the processor's object in `processor_config.json`, in which transformers 5 has all of them.
        what: What it prepares, for the message.
        files: Files that may have it, the first one that exists is read.

    Raises:
        FileNotFoundError: when there is no such file.
    """
    for path in [directory / name for name in files]:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if section in fields or (fields and path.name != "processor_config.json"):
            return path, fields.get(section, fields)
    raise FileNotFoundError(f"{directory} has none of {list(files)}: its model reads no {what}")


def processor_class(path: Path, fields: Mapping[str, Any], name: str, known: Sequence[Any]) -> Any:
    """Returns the class that prepares what transformers' class in a field does; raises ValueError without one."""
    for cls in known:
        if str(fields.get(name)).startswith(cls.prepares):
            return cls
    names = ", ".join(prefix for cls in known for prefix in cls.prepares)
    raise ValueError(f"{path}: {name} must be one of {names}, got {fields.get(name)!r}: use the model's own processor")


def find_parts(document: Document, kind: str) -> list[Any]:
    """Returns the images or clips of a chat, in order; names of files start from the document's `folder`, if it has
    one.

    Args:
        document: A document with messages.
        kind: "image", "video" or "audio", whose parts are `{"type": kind, kind: ...}`, or have `path` instead.

    Raises:
        ValueError: for an address on the web.
    """
    contents = []
    for message in document["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") == kind:
                contents.append(_content(part, kind))
    folder = document.get("folder", "")
    return [Path(folder, content) if isinstance(content, str | os.PathLike) else content for content in contents]


def _content(part: Mapping[str, Any], kind: str) -> Any:
    content = next((part[name] for name in (kind, "path", "url") if part.get(name) is not None), None)
    if content is None or (isinstance(content, str) and content.startswith(("http:", "https:", "data:"))):
        raise ValueError(f"an {kind} must be a file, under '{kind}' or 'path', got {content!r}: download it first")
    return content


def expand(
    tokens: np.ndarray,
    targets: np.ndarray,
    token: int | Sequence[int],
    placeholders: Sequence[Sequence[int]],
    kind: str = "image",
) -> tuple[np.ndarray, np.ndarray]:
    """Replaces the placeholder of each image, frame or clip by its ids; none of them is a target.

    Args:
        tokens: Ids with one placeholder for each.
        targets: The target of each token.
        token: Id of the placeholder; several if there are images and frames.
        placeholders: The ids of each image or clip.
        kind: What they are, for the message.

    Raises:
        ValueError: when the number of placeholders differs from that of images or clips.
    """
    at = np.flatnonzero(np.isin(tokens, token))
    if len(at) != len(placeholders):
        what = "images" if kind == "image" else "clips"
        raise ValueError(f"the template wrote {len(at)} {kind} placeholders for {len(placeholders)} {what}")
    times = np.ones(len(tokens), np.int64)
    times[at] = [len(ids) for ids in placeholders]
    written, ends = np.repeat(tokens, times), np.cumsum(times)
    for ids, end in zip(placeholders, ends[at], strict=True):
        written[end - len(ids) : end] = ids
    out = np.full(len(written), -1, np.int32)
    out[ends - 1] = targets  # the last id of an image predicts the next token
    out[np.isin(out, token)] = -1
    return written, out
