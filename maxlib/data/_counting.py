"""Counts of a data pipeline: each stage keeps its own counts in its state, and a reader adds them up."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grain


class CountingIterator(grain.DatasetIterator):
    """An iterator stage that counts. `counts` is part of its state, so a resumed run continues the count."""

    def __init__(self, parents: Any = ()):
        super().__init__(parents)
        self.counts: Counter[str] = Counter()
        stages = _stages.get()
        if stages is not None:
            stages.append(self)


Stages = list[CountingIterator]
_stages: ContextVar[Stages | None] = ContextVar("stages", default=None)


@contextmanager
def collected() -> Iterator[Stages]:
    """Collects the stages of the iterators that this thread creates in the body."""
    stages: Stages = []
    token = _stages.set(stages)
    try:
        yield stages
    finally:
        _stages.reset(token)


def total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Adds up counts, sorted by name."""
    whole: Counter[str] = Counter()
    for some in counts:
        whole.update(some)
    return dict(sorted(whole.items()))
