"""safetensors files: found, checked, read by slices, and written one tensor at a time."""

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
PROCESSOR_FILES = ("chat_template*", "*preprocessor_config.json", "processor_config.json")
QUANTIZED = "quantization.json"  # beside weights that `maxlib.quantization` wrote
# What an export, or a download of one, consists of; a directory with anything else in it is never replaced.
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
)
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
OTHER = (".gguf", ".h5", ".msgpack", ".npz", ".onnx")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; nothing of it is in memory."""

    as_stored: ClassVar[bool] = True  # whether the file has the bytes of `view`

    path: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def view(self) -> np.ndarray:
        """The tensor, mapped: what is sliced off is what is read. Let it go soon, mapped pages count as this
        process's.
        """
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        # A plain array: a memmap would keep its class, and its file, through every view and ufunc.
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))

    def part(self, take: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns `take(view)`, where `take` cuts, transposes and splits axes."""
        return take(self.view())

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fills the contiguous `out` with the bytes from `start` of this tensor on: faster than to copy mapped
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
    """Every tensor of a model directory by name, from `model.safetensors` or the files of its index.

    Raises FileNotFoundError if there are none, with what to do about other formats; ValueError for a file that is
    truncated or corrupt, an index that does not match its files, and paths that lead out of the directory.
    """
    directory = Path(directory).resolve()
    if not (directory / INDEX).exists():
        if not (directory / SINGLE).exists():
            raise FileNotFoundError(_nothing_found(directory))
        return read_header(_inside(directory, SINGLE))
    weight_map = read_index(directory / INDEX)
    if (directory / SINGLE).exists() and SINGLE not in weight_map.values():
        raise ValueError(f"{directory} has both {SINGLE} and {INDEX}, which may differ: keep the one that is meant.")
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
    """Returns whether a file system could have it: no NUL, nothing that UTF-8 cannot hold, no part over 255 bytes."""
    if not isinstance(name, str) or "\0" in name or not name.isprintable():
        return False
    return len(name) < 1024 and all(len(part.encode()) <= 255 for part in name.split("/"))


def _inside(directory: Path, name: str) -> Path:
    """The file `name` of `directory`; the blobs that a Hugging Face cache links to are its own."""
    homes = [directory, *([directory.parents[1] / "blobs"] if directory.parent.name == "snapshots" else [])]
    path = directory / name
    if Path(name).is_absolute() or not any(path.resolve().is_relative_to(home) for home in homes):
        raise ValueError(
            f"{directory}: weights must lie inside the directory, but {name!r} leads to {path.resolve()}. "
            "Copy the file in if you trust it."
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path} is named by {INDEX} but is not there. Download it too.")
    return path


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file. Raises ValueError if it is truncated, corrupt or of an unknown dtype."""
    try:
        with safe_open(path, framework="np") as file:  # checks that the tensors fill the file without gap or overlap
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}). Download it again.") from error
    with open(path, "rb") as file:
        offset = 8 + int.from_bytes(file.read(8), "little")
    stored = {}
    for name, (dtype, shape) in found.items():
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
            f"{start}, but has {', '.join(pickled)}. Such files are pickles, which can run any code when opened, so maxlib "
            "does not read them. Take the safetensors version of this model, or convert it where you trust it: "
            "transformers.AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)."
        )
    if parts := [name for name in names if name.endswith(".safetensors")]:
        return f"{start}, but has {', '.join(parts)} without an index. Download {INDEX} too, or rename a single file."
    if other := [name for name in names if name.endswith(OTHER)]:
        return f"{start}, but has {', '.join(other)}. Convert it to safetensors first, with transformers for instance."
    return f"{start}, but {'has neither' if directory.is_dir() else 'there is no such directory'}."


@dataclass(frozen=True)
class Header:
    """Name, dtype and shape of a tensor that is going to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, headers: Sequence[Header], tensors: Iterator[np.ndarray]) -> None:
    """Writes a safetensors file, with one tensor in memory at a time; `tensors` come in the order of `headers`."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for header in headers:
        span = [offset, offset := offset + header.nbytes]
        entries[header.name] = {"dtype": NAMES[header.dtype], "shape": list(header.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for header, tensor in zip(headers, tensors, strict=True):
            if tensor.shape != header.shape or tensor.dtype != header.dtype:
                raise ValueError(f"{header} was announced, but {tensor.dtype} {tensor.shape} came")
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def shard(headers: Sequence[Header], max_bytes: int) -> dict[str, list[Header]]:
    """Files of at most `max_bytes` of tensors each (or of one that is larger), in order, by name."""
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
    """Writes which tensor lies in which file."""
    weight_map = {header.name: name for name, headers in files.items() for header in headers}
    total = sum(header.nbytes for headers in files.values() for header in headers)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def is_float(dtype: Any) -> bool:
    """Returns True for a floating dtype, those of ml_dtypes included."""
    return bool(jnp.issubdtype(dtype, jnp.floating))
