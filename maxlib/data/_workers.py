"""Worker processes that read and transform documents, in the same order as without them."""

from functools import partial
from typing import Any

import grain

from maxlib.data._bad_records import is_guarded
from maxlib.data._documents import Document
from maxlib.data._reader import FromIterators, check_num_documents, check_patience, epoch_of, patience


def in_workers(
    documents: grain.MapDataset[Document], num_workers: int, *, buffer: int = 16
) -> grain.IterDataset[Document]:
    """Reads and transforms documents in worker processes, for transformations that keep Python busy.

        loader = Loader(lambda part: pack(in_workers(documents[part], 4), length=512), batch_size=8, num_shards=2)

    The documents, their order and the state are those of reading without workers, so a run may be resumed with another
    number of them. Each shard of a loader has its own processes, which are started anew (`spawn`): a script that starts
    them needs `if __name__ == "__main__":`, and the documents and transformations must be picklable by cloudpickle.

    Args:
        documents: The documents, with their transformations.
        num_workers: Number of processes; with 0 documents are read in the loader's thread.
        buffer: Number of documents that each process reads ahead.

    Raises:
        ValueError: when the documents pass through `SkipBadRecords`, whose count a process cannot share.
    """
    if num_workers < 0 or buffer < 1:
        raise ValueError(f"num_workers must be at least 0 and buffer at least 1, got {num_workers} and {buffer}.")
    if is_guarded(documents):
        raise ValueError(
            "Bad records are counted in one process: let the transformations in workers return None for what they skip, "
            "or read SkipBadRecords.guard without in_workers."
        )
    return FromIterators(partial(_WorkersIterator, documents, num_workers, buffer))


class _WorkersIterator(grain.DatasetIterator):
    """Iterator whose state is the index of the next document, whatever process read the one before."""

    def __init__(self, documents: grain.MapDataset, num_workers: int, buffer: int):
        super().__init__()
        self._documents, self._num_workers, self._buffer = documents, num_workers, buffer
        self._next, self._boxes, self._patience = 0, None, patience(documents)

    def __next__(self) -> Document:
        self._boxes = self._start() if self._boxes is None else self._boxes
        left_out = 0
        while True:
            (document,) = next(self._boxes)
            self._next += 1
            if document is not None:
                return document
            left_out += 1
            check_patience(left_out, self._patience)

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next, "documents": epoch_of(self._documents)}

    def set_state(self, state: dict[str, Any]) -> None:
        check_num_documents(state, epoch_of(self._documents))
        self._stop()
        self._next = state["next_index"]

    def close(self) -> None:
        self._stop()
        super().close()

    def _start(self) -> Any:
        boxes = _Boxed(self._documents[self._next :])
        dataset = boxes.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if self._num_workers:
            from absl import flags

            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # grain asks for its own when it starts processes
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(self._num_workers, self._buffer))
        return iter(dataset)

    def _stop(self) -> None:
        if self._boxes is not None:
            self._boxes.close()
        self._boxes = None


class _Boxed(grain.MapDataset):
    """Documents in tuples: grain leaves out None, which would change the order in which workers take turns."""

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else (self._parent[index],)
