"""Checkpoint tiers: a run's checkpoints in several places, such as a fast local disk and permanent storage."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

from maxlib import distributed
from maxlib.checkpoint._checkpointer import Checkpointer
from maxlib.checkpoint._errors import SaveError, UnsavedError
from maxlib.checkpoint._groupings import Groupings
from maxlib.checkpoint._local import Local
from maxlib.checkpoint._restore import first_undamaged

_log = logging.getLogger(__name__)


class Tiers:
    """Several tiers that act as one checkpointer, the fastest first; each has its own policies.

        Tiers(Local("/local/run", every=50), Checkpointer("gs://bucket/run", every=1000))

    `restore` reads the newest undamaged step of all tiers, from the first tier that has it. With several hosts, the
    directory of a `Checkpointer` must be one that all of them share; that of a `Local` is on each host.
    """

    def __init__(self, *tiers: Checkpointer | Local):
        if not tiers:
            raise ValueError("Tiers needs at least one Checkpointer.")
        self.tiers = tiers
        self._due: tuple[int, list[Checkpointer | Local]] | None = None

    def __enter__(self) -> "Tiers":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for tier in self.tiers:
            tier.__exit__(kind, error, trace)

    @property
    def directory(self) -> str:
        """Joins the tiers' directories, for messages."""
        return ", ".join(str(tier.directory) for tier in self.tiers)

    @property
    def base(self) -> Any:
        """Returns the base of the first `Checkpointer`; all tiers save the same items."""
        return next((tier.base for tier in self.tiers if isinstance(tier, Checkpointer)), None)

    @property
    def groupings(self) -> Groupings:
        """Returns the groupings that the tiers save with each step."""
        return self.tiers[0].groupings

    @groupings.setter
    def groupings(self, groupings: Groupings) -> None:
        for tier in self.tiers:
            tier.groupings = groupings

    def should_save(self, step: int) -> bool:
        """Returns whether `step` is due in any tier; its next `save` only goes to those tiers."""
        due = [tier for tier in self.tiers if tier.should_save(step)]
        self._due = (step, due) if due else None  # a save that is due in no tier goes to all
        return bool(due)

    def save(self, step: int, items: Mapping[str, Any], **options: Any) -> None:
        """Saves to the tiers found by `should_save`, or to all without it (at the end of a run); see
        `Checkpointer.save`.
        """
        due, self._due = self._due, None
        into = due[1] if due is not None and due[0] == step else self.tiers
        self._each(lambda tier: tier.save(step, items, **options), into)

    def restore(self, step: int | None = None, like: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Restores `step`, or the newest undamaged one with a warning for each that is not; see
        `Checkpointer.restore`.
        """
        try:
            self.wait()
        except SaveError as error:
            _log.error("%s", error)
        held = [(s, -i) for i, tier in enumerate(self.tiers) for s in tier.steps() if step is None or s == step]
        newest_first = sorted(distributed.allgather_json(held)[0], reverse=True)  # one list for all hosts
        reads = ((s, functools.partial(self.tiers[-i].restore, s, like, **options)) for s, i in newest_first)
        restored = first_undamaged(reads, self.directory)
        for tier in self.tiers:
            tier.adopt(restored["meta"]["step"])
        return restored

    def steps(self) -> list[int]:
        """Lists the complete steps of any tier, oldest first."""
        return sorted({step for tier in self.tiers for step in tier.steps()})

    def latest(self) -> int | None:
        """Returns the newest complete step of any tier; see `Checkpointer.latest`."""
        return max((step for tier in self.tiers if (step := tier.latest()) is not None), default=None)

    def verify(self, step: int) -> list[str]:
        """Reads a whole step in every tier that has it and names the damaged leaves."""
        return [bad for tier in self.tiers if step in tier.steps() for bad in tier.verify(step)]

    def wait(self) -> None:
        """Waits until the last saves are on disk. Raises SaveError if one failed."""
        self._each(lambda tier: tier.wait(), self.tiers)

    def settle(self) -> None:
        """Waits for the last saves without communicating with other hosts; see `Checkpointer.settle`."""
        self._each(lambda tier: tier.settle(), self.tiers)

    def unsaved(self) -> UnsavedError | None:
        """Returns the error that should end the run if no tier can be written any more; see `Checkpointer.unsaved`."""
        errors = [tier.unsaved() for tier in self.tiers]
        return errors[-1] if all(errors) else None

    def close(self) -> None:
        """Waits for the last saves and closes. Raises SaveError if one failed."""
        self._each(lambda tier: tier.close(), self.tiers)

    def _each(self, call: Any, tiers: Any) -> None:
        """Calls every tier, even after one failed, and raises the first error at the end."""
        failed: list[SaveError] = []
        for tier in tiers:
            try:
                call(tier)
            except SaveError as error:
                failed.append(error)
        if failed:
            raise failed[0]
