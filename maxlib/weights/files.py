"""safetensors files: finding, checking, reading by slices, and writing one tensor at a time."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from maxlib._utils.files import without_duplicates

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
TEMPLATES = "additional_chat_templates"
PROCESSOR_FILES = (
    "chat_template*",
    TEMPLATES,
    f"{TEMPLATES}/*.jinja",
    "*preprocessor_config.json",
    "processor_config.json",
    "*sentence_*.json",  # prompts and lengths of sentence-transformers
)
EMBEDDING_FILES = ("modules.json", "[1-9]_*/config.json", "[1-9]_*/model.safetensors")
FOLDERS = (TEMPLATES, "[1-9]_Pooling", "[1-9]_Dense", "[1-9]_Normalize")  # the only ones of an export
MAX_SHARD_BYTES = 5 * 10**9  # of a file, unless a single tensor is larger
QUANTIZED = "quantization.json"  # next to weights written by `maxlib.quantization`
# The files of an export, or of a download; a directory with any other files is never replaced.
OWN_FILES = (
    "README.md",
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    QUANTIZED,
    "adapter_config.json",
    *TOKENIZER_FILES,
    *PROCESSOR_FILES,
    *EMBEDDING_FILES,
    *FOLDERS,
)
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, not in memory."""

    as_stored: ClassVar[bool] = True  # True if the file has the bytes of `view`

    path: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def view(self) -> np.ndarray:
        """Returns the memory-mapped tensor: only slices are read. Release it soon, because mapped pages count as this
        process's memory.
        """
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        # A plain array, because every view and ufunc result of a memmap would keep its class and file.
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))

    def part(self, take: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns `take(view)`, where `take` slices, transposes and splits axes."""
        return take(self.view())

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fills the contiguous `out` with this tensor's bytes from `start` on, which is faster than copying mapped
        pages.
        """
        left = out.reshape(-1).view(np.uint8).data
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset + start)
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise ValueError(f"{self.path} ended {len(left)} bytes early while it was read; download it again.")


def find_tensors(directory: str | Path) -> dict[str, Stored]:
    """Finds every tensor of a model directory by name, in `model.safetensors` or the files of its index.

    Raises FileNotFoundError if there are none, with what to do about other formats; ValueError for a file that is
    truncated or corrupt, an index that does not match its files, and paths outside of the directory.
    """
    directory = Path(directory).resolve()
    if not (directory / INDEX).exists():
        if not (directory / SINGLE).exists():
            raise FileNotFoundError(_nothing_found(directory))
        return read_header(_inside(directory, SINGLE))
    weight_map = read_index(directory / INDEX)
    if (directory / SINGLE).exists() and SINGLE not in weight_map.values():
        raise ValueError(f"{directory} has both {SINGLE} and {INDEX}, which may differ: keep only the intended one.")
    files = {name: read_header(_inside(directory, name)) for name in sorted(set(weight_map.values()))}
    listed = {(file, tensor) for tensor, file in weight_map.items()}
    there = {(file, tensor) for file, tensors in files.items() for tensor in tensors}
    for pairs, problem in ((listed - there, "lists tensors that are not there"), (there - listed, "does not list")):
        if pairs:
            some = ", ".join(f"{tensor} ({file})" for file, tensor in sorted(pairs)[:10])
            raise ValueError(f"{directory / INDEX} {problem}: {some}. Download the index and its files again.")
    return {tensor: files[file][tensor] for tensor, file in weight_map.items()}


def read_index(path: Path) -> dict[str, str]:
    """Reads the file of each tensor. Raises ValueError for an index that cannot be used."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
        weight_map = data["weight_map"]
        if not weight_map or not all(map(_is_file_name, weight_map.values())):
            raise ValueError("weight_map must give a file name for each tensor")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} must be a JSON object whose weight_map gives the file of each tensor, but it cannot be used "
            f"({error!r}). Download it again."
        ) from error
    return weight_map


def _is_file_name(name: Any) -> bool:
    """Returns whether this is a valid file name: no NUL, valid UTF-8, and no part over 255 bytes."""
    if not isinstance(name, str) or "\0" in name or not name.isprintable():
        return False
    return len(name) < 1024 and all(len(part.encode()) <= 255 for part in name.split("/"))


def _inside(directory: Path, name: str) -> Path:
    """Returns the file `name` of `directory`; links into the blobs of a Hugging Face cache are allowed."""
    homes = [directory, *([directory.parents[1] / "blobs"] if directory.parent.name == "snapshots" else [])]
    path = directory / name
    if Path(name).is_absolute() or not any(path.resolve().is_relative_to(home) for home in homes):
        raise ValueError(
            f"{directory}: weights must be inside the directory, but {name!r} points to {path.resolve()}. "
            "Copy the file in if you trust it."
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path} is listed in {INDEX} but does not exist. Download it too.")
    return path


def read_header(path: Path) -> dict[str, Stored]:
    """Reads the tensors of one safetensors file. Raises ValueError if it is truncated, corrupt or has an
    unknown dtype.
    """
    try:
        with safe_open(path, framework="np") as file:  # checks that the tensors fill the file without gaps or overlaps
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            shapes = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}). Download it again.") from error
    with open(path, "rb") as file:
        offset = 8 + int.from_bytes(file.read(8), "little")
    stored = {}
    for name, (dtype, shape) in shapes.items():
        if dtype not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {dtype}; known are {', '.join(DTYPES)}.")
        stored[name] = Stored(path, offset, np.dtype(DTYPES[dtype]), shape)
        offset += math.prod(shape) * stored[name].dtype.itemsize
    return stored


def _nothing_found(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    start = f"{directory} must have {SINGLE}, or {INDEX} and its files"
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        return (
            f"{start}, but has {', '.join(pickled)}. Such files are pickles, which can run any code when opened, so "
            "maxlib does not read them. Use the safetensors version of this model, or convert it if you trust it: "
            "transformers.AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)."
        )
    if parts := [name for name in names if name.endswith(".safetensors")]:
        return f"{start}, but has {', '.join(parts)} without an index. Download {INDEX} too, or rename a single file."
    if files := [name for name in names if name.endswith(".gguf")]:
        return f"{start}, but has {', '.join(files)}: weights.from_gguf reads such a file."
    return f"{start}, but {'has neither' if directory.is_dir() else 'there is no such directory'}."


@dataclass(frozen=True)
class Header:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, headers: Sequence[Header], tensors: Iterator[np.ndarray]) -> None:
    """Writes a safetensors file with one tensor in memory at a time; `tensors` are in the order of `headers`."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for header in headers:
        span = [offset, offset := offset + header.nbytes]
        entries[header.name] = {"dtype": NAMES[header.dtype], "shape": list(header.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the data
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for header, tensor in zip(headers, tensors, strict=True):
            if tensor.shape != header.shape or tensor.dtype != header.dtype:
                raise ValueError(f"{header} was announced, but {tensor.dtype} {tensor.shape} came")
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def shard(headers: Sequence[Header], max_bytes: int) -> dict[str, list[Header]]:
    """Assigns tensors to files of at most `max_bytes` each (or one larger tensor), in order; returns them by
    file name.
    """
    files: list[list[Header]] = [[]]
    size = 0
    for header in headers:
        if files[-1] and size + header.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(header)
        size += header.nbytes
    # Wide dtypes first keeps every tensor of a file aligned.
    files = [sorted(file, key=lambda h: -h.dtype.itemsize) for file in files]
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{n:05}-of-{len(files):05}.safetensors": file for n, file in enumerate(files, 1)}


def write_index(directory: Path, files: Mapping[str, Sequence[Header]]) -> None:
    """Writes the index, which maps tensors to files."""
    weight_map = {header.name: name for name, headers in files.items() for header in headers}
    total = sum(header.nbytes for headers in files.values() for header in headers)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def is_float(dtype: Any) -> bool:
    """Returns True for a floating dtype, including those of ml_dtypes."""
    return bool(jnp.issubdtype(dtype, jnp.floating))
