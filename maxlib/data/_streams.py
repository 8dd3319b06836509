"""Sources that are read in order: the base class of streams, and WebDataset's tar files."""

import copy
import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import grain
import numpy as np

from maxlib.data._documents import Document, token_ids
from maxlib.data._reader import FromIterators, check_num_documents, check_same
from maxlib.data._storage import File, Paths, find_files

_NAMES = {"txt": "text", "npy": "tokens"} | dict.fromkeys(("jpg", "jpeg", "png", "webp"), "image")
State = dict[str, Any]


class Stream:
    """Base class of sources that are read in order; a loader's shards slice them. A subclass defines `open`."""

    _transforms: tuple[Callable[[Document], Any], ...] = ()

    def map(self, transform: Callable[[Document], Any]) -> "Stream":
        """Transforms each document of the stream."""
        new = copy.copy(self)
        new._transforms = (*self._transforms, transform)
        return new

    def open(self, part: slice) -> grain.IterDataset[Document]:
        """Reads the documents of one of the loader's shards, before they are transformed."""
        raise NotImplementedError(f"{type(self).__name__} must define open(part)")

    def __getitem__(self, part: slice) -> grain.IterDataset[Document]:
        """Reads the documents of one of the loader's shards."""
        dataset = self.open(part)
        for transform in self._transforms:
            dataset = dataset.map(transform)
        return dataset


def check_epoch(count: int, kept: slice, ends: bool, source: Any) -> None:
    """Raises ValueError after an epoch of no records, or, unless the data `ends`, of none that a shard keeps."""
    if count <= (0 if ends else kept.start):
        raise ValueError(
            f"{source} has {count} records, of which this shard of the loader reads none (every {kept.step}th, from number "
            f"{kept.start}): use fewer shards, num_shards=."
        )


class WebDataset(Stream):
    """Samples of tar files in the format of WebDataset, read in order, also from a bucket.

        source = tokenize(WebDataset("shards/*.tar", epochs=None, seed=0), tokenizer)
        loader = Loader(lambda part: pack(source[part], length=512), batch_size=8)

    Consecutive files whose names agree up to the first dot are a sample, a document by the rest of the names: `txt`
    becomes `"text"`, `npy` (one array) `"tokens"`, `jpg`, `png` and `webp` become `"image"` (a Pillow image; the extra
    `images`), `json` a value; the bytes of others are kept. `"record"` names the file and the sample.

    Each of a loader's shards, and with it each host, reads its own tar files. If there are fewer files than shards,
    each shard reads all of them and keeps every n-th sample. Resuming is exact, and continues in the middle of a file.

    Args:
        paths: Files, folders or glob patterns.
        epochs: Number of times that the files are read; None repeats forever.
        seed: Reads the files in another order in every epoch; None reads them in order. Samples within a file are not
            shuffled: write them in random order.

    Raises:
        ValueError: when reading a damaged or compressed file, or a sample that cannot be decoded.
    """

    def __init__(self, paths: Paths, *, epochs: int | None = 1, seed: int | None = None):
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be at least 1, or None to repeat forever, got {epochs}.")
        self._files, self._epochs, self.seed = find_files(paths), epochs, seed

    def open(self, part: slice) -> grain.IterDataset[Document]:
        return FromIterators(partial(_TarIterator, self, part))

    def files_of(self, part: slice, epoch: int) -> tuple[list[File], slice]:
        """Returns a shard's files in an epoch, and which of their samples it keeps."""
        order: Any = range(len(self._files))
        if self.seed is not None:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self._files))
        first, every = part.start or 0, part.step or 1
        by_file = len(self._files) >= every
        chosen = order[first::every] if by_file else order
        return [self._files[i] for i in chosen], slice(0, None, 1) if by_file else slice(first, None, every)

    @property
    def num_files(self) -> int:
        """The number of files."""
        return len(self._files)

    def is_over(self, epoch: int) -> bool:
        """Returns True after the last epoch."""
        return self._epochs is not None and epoch >= self._epochs


class _TarIterator(grain.DatasetIterator):
    """Iterator whose state has the epoch, the number of the file, the byte where the next sample begins in it, and the
    number of samples of the epoch before it.
    """

    def __init__(self, source: WebDataset, part: slice):
        super().__init__()
        self._source, self._part_of = source, part
        self._reader: _TarReader | None = None
        self.set_state({"epoch": 0, "file": 0, "offset": 0, "count": 0})

    def __next__(self) -> Document:
        while not self._source.is_over(self._epoch):
            if self._number == len(self._files):
                check_epoch(self._count, self._kept, self._source.is_over(self._epoch + 1), list(map(str, self._files)))
                self.set_state({"epoch": self._epoch + 1, "file": 0, "offset": 0, "count": 0})
                continue
            if self._reader is None:
                self._reader = _TarReader(self._files[self._number], self._offset)
            sample, self._offset = self._reader.sample()
            if sample is None:
                self._move(self._number + 1, 0)
                continue
            self._count += 1
            if (self._count - 1) % self._kept.step == self._kept.start:
                return _decoded(sample)
        raise StopIteration

    def get_state(self) -> State:
        place = {"epoch": self._epoch, "file": self._number, "offset": self._offset, "count": self._count}
        return place | {"seed": self._source.seed, "documents": self._source.num_files}

    def set_state(self, state: State) -> None:
        check_num_documents(state, self._source.num_files)
        check_same(state.get("seed", self._source.seed), self._source.seed, "files shuffled with the seed")
        self._epoch, self._count = state["epoch"], state["count"]
        self._files, self._kept = self._source.files_of(self._part_of, self._epoch)
        self._move(state["file"], state["offset"])

    def close(self) -> None:
        self._move(self._number, self._offset)
        super().close()

    def _move(self, number: int, offset: int) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self._number, self._offset = None, number, offset


class _TarReader:
    """Reads the samples of a tar file one after the other, from a byte at which one begins."""

    def __init__(self, file: File, offset: int):
        self._name, self._opened = str(file), file.open("rb")
        self._opened.seek(offset)
        try:
            self._tar = tarfile.TarFile(fileobj=self._opened)
            self._next = self._member()
        except tarfile.TarError as error:
            self._opened.close()
            raise self._damaged(error) from error

    def sample(self) -> tuple[dict[str, Any] | None, int]:
        """Returns the next sample, None after the last one, and the byte where the one after it begins."""
        if self._next is None:
            return None, 0
        key, sample = _split(self._next.name)[0], {}
        try:
            while self._next is not None and _split(self._next.name)[0] == key:
                data: Any = self._tar.extractfile(self._next)
                name = _split(self._next.name)[1]
                if name in sample:
                    raise ValueError(f"{self._name}: {key} has two files {name!r}.")
                sample[name] = data.read()
                self._next = self._member()
        except tarfile.TarError as error:
            raise self._damaged(error) from error
        offset = self._tar.offset if self._next is None else self._next.offset
        return sample | {"record": f"{self._name}: {key}"}, offset

    def close(self) -> None:
        self._opened.close()

    def _member(self) -> tarfile.TarInfo | None:
        """Returns the next file that belongs to a sample."""
        while (member := self._tar.next()) is not None:
            self._tar.members.clear()  # which would grow with the file  # pyright: ignore[reportAttributeAccessIssue]
            if member.isfile() and all(_split(member.name)):
                return member
        # The module tarfile takes a damaged header for the end, which is a block of zeros.
        self._opened.seek(self._tar.offset)
        if self._opened.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"there is no file and no end at byte {self._tar.offset}")
        return None

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(f"{self._name}: this is no tar file, a compressed or a damaged one: {error}")


def _split(name: str) -> tuple[str, str]:
    """Returns the sample of a file's name, up to the first dot, and the rest; "" and "" for a hidden file."""
    path = PurePosixPath(name)
    stem, _, rest = path.name.partition(".")
    return (str(path.with_name(stem)), rest.lower()) if stem else ("", "")


def _decoded(sample: dict[str, Any]) -> Document:
    document = {}
    for name, data in sample.items():
        try:
            document[_NAMES.get(name, name)] = _value(name, data) if name != "record" else data
        except (ValueError, OSError, EOFError, RecursionError) as error:
            raise ValueError(f"{sample['record']}: the file {name!r} cannot be decoded: {error}") from error
    return document


def _value(name: str, data: bytes) -> Any:
    ending = name.rpartition(".")[2]
    if ending == "json":
        return json.loads(data)
    if ending == "npy":
        array = np.load(io.BytesIO(data), allow_pickle=False)
        return token_ids(array, "The array") if name == ending else array
    kind = _NAMES.get(ending)
    if kind == "text":
        return data.decode()
    return _image(data) if kind == "image" else data


def _image(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('images need Pillow: pip install "maxlib[images]"') from error
    image = Image.open(io.BytesIO(data))
    image.load()
    return image
