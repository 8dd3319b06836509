"""Reading of one shard: in order, in this process or in workers; and threads that read its batches ahead with their
states and counts, and end with the program.
"""

import atexit
import functools
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import Any

import grain
import numpy as np

from maxlib.data._bad_records import is_guarded
from maxlib.data._documents import Document


class FromIterators(grain.IterDataset):
    """A dataset whose iterators `make` creates, of documents with the names of their sources if it knows them."""

    def __init__(self, make: Callable[[], grain.DatasetIterator], names: tuple[str, ...] | None = None):
        super().__init__()
        self._make, self.names = make, names

    def __iter__(self) -> grain.DatasetIterator:
        return self._make()


_STREAM_PATIENCE = 100_000  # documents of a stream, whose number is not known


def patience(documents: Any) -> int:
    """Returns after how many documents in succession that are all left out the data counts as empty: three epochs."""
    return max(1, 3 * epoch_of(documents)) if isinstance(documents, grain.MapDataset) else _STREAM_PATIENCE


def epoch_of(documents: grain.MapDataset) -> int:
    """Returns the number of documents of an epoch."""
    return _before_repeat(documents) or len(documents)


def _before_repeat(documents: Any) -> int:
    """Returns the length of what a dataset repeats; 0 if it repeats nothing."""
    if "Repeat" in type(documents).__name__:
        return max(map(epoch_of, documents.parents))
    return max(map(_before_repeat, documents.parents), default=0)


def check_patience(left_out: int, patience: int) -> None:
    """Raises ValueError when so many documents in succession were left out."""
    if left_out >= patience:
        raise ValueError(
            f"No document in {left_out} reads: this part of the data is empty, or all of it is filtered out or dropped, "
            "such as documents that are longer than a row."
        )


class InOrder(grain.DatasetIterator):
    """Reads a dataset in order, in the calling thread, because a hanging read in a pool's thread would keep the process
    from ending. Its state is the next index, as that of grain's iterators, and the number of documents of an epoch,
    because shuffled documents lie elsewhere among others.
    """

    def __init__(self, documents: grain.MapDataset):
        super().__init__()
        self._documents, self._next, self._patience = documents, 0, patience(documents)
        self._epoch = epoch_of(documents)

    def __next__(self) -> Any:
        left_out = 0
        while True:
            document = self._read()
            self._next += 1
            if document is not None:
                return document
            left_out += 1
            check_patience(left_out, self._patience)

    def _read(self) -> Any:
        """Returns the next document, None for one that is left out. Raises StopIteration after the last one."""
        if self._next >= len(self._documents):
            raise StopIteration
        return self._documents[self._next]

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next, "documents": self._epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        check_num_documents(state, self._epoch)
        self._next = state["next_index"] if "next_index" in state else state["next"]  # of earlier mixtures


def in_order(documents: grain.MapDataset | grain.IterDataset) -> grain.IterDataset:
    """Returns documents that are read in order."""
    if isinstance(documents, grain.IterDataset):
        return documents
    return FromIterators(functools.partial(InOrder, documents))


class CountingIterator(grain.DatasetIterator):
    """An iterator stage that counts. `counts` is part of its state, so a resumed run continues the count."""

    def __init__(self, parents: Any = ()):
        super().__init__(parents)
        self.counts: Counter[str] = Counter()
        stages = _stages.get()
        if stages is not None:
            stages.append(self)


_stages: ContextVar[list[CountingIterator] | None] = ContextVar("stages", default=None)


@contextmanager
def _collected() -> Iterator[list[CountingIterator]]:
    """Collects the stages of the iterators that this thread creates in the body."""
    stages: list[CountingIterator] = []
    token = _stages.set(stages)
    try:
        yield stages
    finally:
        _stages.reset(token)


def total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Adds up counts, sorted by name."""
    sums: Counter[str] = Counter()
    for stage in counts:
        sums.update(stage)
    return dict(sorted(sums.items()))


def check_same(before: Any, here: Any, what: str) -> None:
    """Raises ValueError for a state that was taken with other settings, whose place is another one here.

    Args:
        before: The settings of the state.
        here: Those of the iterator that it should set.
        what: What has them, for the message.
    """
    if before != here:
        raise ValueError(
            f"The data state is a place in {what} {before}, but here it is {here}: some documents would come again and "
            "others never. Keep what the run began with, or start another run in a new directory."
        )


def check_num_documents(state: dict[str, Any], documents: int) -> None:
    """Raises ValueError for a state among another number of documents."""
    check_same(state.get("documents", documents), documents, "a source whose number of documents or files is")


class Reader:
    """Prefetches one shard in a daemon thread into `ready`: (batch, state and counts after it), (None, state, counts)
    at the end, or an error.

    grain's own prefetch (0.2.18) waits without a timeout and joins its thread when closed, so a hanging source would
    hang the loader without an error that names it.
    """

    def __init__(self, dataset: Callable[[], grain.IterDataset], state: Any, prefetch: int):
        self.ready: queue.SimpleQueue = queue.SimpleQueue()
        self.room = threading.Semaphore(prefetch)  # acquired before reading a batch, released when one is returned
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(dataset, state), daemon=True, name="maxlib-data")
        _running.add(self)
        self.thread.start()

    def where(self) -> str:
        """Returns the innermost frames of the thread's stack."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-4:]) if frame else "  (the thread has ended)\n"

    def _run(self, dataset: Callable, state: Any) -> None:
        try:
            self._read(dataset, state)
        except BaseException as error:  # raised in the thread that waits for the batch
            if not self.stop.is_set():
                self.ready.put(error)
        finally:
            _running.discard(self)

    def _read(self, dataset: Callable, state: Any) -> None:
        with _collected() as stages:
            iterator = iter(dataset())
        if state is not None:
            _restore(iterator, state)
        with closing(iterator):  # ends worker processes
            while self.room.acquire() and not self.stop.is_set():
                batch = next(iterator, None)
                state = _to_json(iterator.get_state()) if batch is not None else state
                self.ready.put((batch, state, total(stage.counts for stage in stages)))
                if batch is None:
                    return


_running: set[Reader] = set()


@atexit.register
def _end_threads(patience: float = 5.0) -> None:
    """Ends all readers before the interpreter exits, which may abort if a thread is in native code.

    Each reader ends after its current batch; one that takes longer than `patience` seconds is abandoned.
    """
    readers = {str(i): reader for i, reader in enumerate(tuple(_running))}
    threads = [reader.thread for reader in readers.values()]
    stop_readers(readers)
    deadline = time.perf_counter() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.perf_counter()))


def _restore(iterator: grain.DatasetIterator, state: Any) -> None:
    try:
        iterator.set_state(_from_json(state))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"The data state does not fit this pipeline ({error!r}): resume with the pipeline that it was taken from. "
            f"It is {state}."
        ) from error


def stop_readers(readers: dict) -> None:
    """Asks the threads to end, without waiting for them."""
    for reader in readers.values():
        reader.stop.set()
        reader.room.release()
    readers.clear()


def _to_json(state: Any) -> Any:
    """Copies an iterator's state into JSON types. JSON turns tuples into lists, from which grain would resume
    incorrectly, so tuples are marked.
    """
    match state:
        case None | bool() | int() | float() | str():
            return state
        case np.integer() | np.floating() | np.bool_():
            return state.item()
        case tuple():
            return {"tuple": [_to_json(x) for x in state]}
        case list():
            return [_to_json(x) for x in state]
        case dict() if all(isinstance(key, str) for key in state) and set(state) != {"tuple"}:
            return {key: _to_json(value) for key, value in state.items()}
    raise TypeError(f"An iterator's state must consist of JSON types, got {state!r}.")


def _from_json(state: Any) -> Any:
    match state:
        case {"tuple": items, **rest} if not rest:
            return tuple(_from_json(x) for x in items)
        case dict():
            return {key: _from_json(value) for key, value in state.items()}
        case list():
            return [_from_json(x) for x in state]
    return state


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
    if not num_workers:
        return in_order(documents)
    return FromIterators(functools.partial(InWorkers, documents, num_workers, buffer))


class InWorkers(InOrder):
    """Reads a dataset in order, whatever process reads a document; its state is that of `InOrder`."""

    def __init__(self, documents: grain.MapDataset, num_workers: int, buffer: int):
        super().__init__(documents)
        self._num_workers, self._buffer, self._boxes = num_workers, buffer, None

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._stop()

    def close(self) -> None:
        self._stop()
        super().close()

    def _read(self) -> Any:
        self._boxes = self._start() if self._boxes is None else self._boxes
        (document,) = next(self._boxes)
        return document

    def _start(self) -> Any:
        from absl import flags

        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain asks for its own when it starts processes
        boxes = _Boxed(self._documents[self._next :])
        dataset = boxes.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        return iter(dataset.mp_prefetch(grain.MultiprocessingOptions(self._num_workers, self._buffer)))

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
