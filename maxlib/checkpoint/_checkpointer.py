"""The checkpoints of one run."""

import contextlib
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from etils import epath

from maxlib import distributed
from maxlib.checkpoint import _lock as lock
from maxlib.checkpoint import _policy as policy
from maxlib.checkpoint import _records as records
from maxlib.checkpoint import _restore as restore
from maxlib.checkpoint import _storage as storage
from maxlib.checkpoint._errors import DamagedError, InUseError, SaveError, shorten, summary
from maxlib.checkpoint._groupings import Groupings
from maxlib.checkpoint._tier import Tier, of_all_hosts

_log = logging.getLogger(__name__)


class Checkpointer(Tier):
    """Saves and restores the steps of one run in its own directory, asynchronously.

    A save is atomic. The new step is read back and compared with its checksums; only then are older steps deleted. The
    run that opened a directory last owns it: an older run stops at its next save. With several hosts, every host makes
    the same calls, and all must see the same directory.

        checkpointer = Checkpointer("runs/a/checkpoints", every=1000, keep=3)

    Args:
        directory: Path, or a URL such as "gs://bucket/run".
        every: Number of steps between saves, for `should_save`.
        seconds: Seconds between saves; both may be given. The default, with neither, is half an hour; `math.inf`
            without `every` disables periodic saves.
        keep: Number of newest steps to keep; None keeps all.
        keep_every: Also keeps every step divisible by this number.
        best: Also keeps the steps with the best metric.
        verify: True reads a step again after writing it.
        replace: True overwrites steps of an earlier history: the same step number first, and, once the step is
            complete, all later steps, from before the run went back. False raises an error for such steps.
        groupings: Groupings of the model's stacks (`nn.tree.groupings(model)`), saved with each step; restored
            steps are converted to them.
        max_failed_saves: Consecutive failed saves after which `unsaved` returns an error to end the run; None for no
            limit.
        base: Directory of the frozen weights. A Trainer then saves only trained parameters, and records this directory
            and a checksum instead of frozen weights; a resumed run must build its model from the same base.

    Raises:
        SaveError: When the directory cannot be created or written.
    """

    def __init__(
        self,
        directory: Any,
        *,
        every: int | None = None,
        seconds: float | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: policy.Best | None = None,
        verify: bool = True,
        replace: bool = False,
        groupings: Groupings | None = None,
        max_failed_saves: int | None = 3,
        base: Any = None,
    ):
        counts = {"every": every, "seconds": seconds, "keep": keep, "keep_every": keep_every, "best.n": best and best.n}
        counts["max_failed_saves"] = max_failed_saves
        if wrong := {name: value for name, value in counts.items() if value is not None and not value > 0}:
            raise ValueError(f"All of {', '.join(counts)} must be positive, got {wrong}.")
        when = policy.When(every, policy.SECONDS if every is None and seconds is None else seconds)
        super().__init__(storage.absolute(directory), when, groupings or {}, max_failed_saves)
        self.base, self._keep = base, policy.Keep(keep, keep_every, best)
        self._verify, self._replace, self._metrics = verify, replace, {}
        try:
            self._owner = lock.RunLock(self.directory)
            self._steps = storage.Steps(self.directory, clean=self._owner.first)
        except (OSError, distributed.PeerError) as error:
            raise SaveError(f"Checkpoints cannot be written to {self.directory}: {error}", step=0) from error
        self._thread = ThreadPoolExecutor(1, "maxlib-checkpoint")
        self._known: set[int] = set()  # steps that this object saved or restored
        self._left: list[int] = []  # later steps of another history, deleted once the running save is complete
        self._metric_seen = False  # or its absence has been reported
        self._damaged: set[int] = set()

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        *,
        data: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = True,
    ) -> None:
        """Starts a save and returns once the arrays may be donated; first waits for a running save.

        A step that this object has already saved or restored is not saved again, unless the directory was opened with
        `replace=True`.

        Args:
            step: Number of the step.
            items: Pytrees of arrays by name, such as `params`, `rest` and `opt`.
            data: Iterator state of each virtual shard of this host (`Loader.get_state()`).
            meta: JSON values; `format`, `step`, `layouts` (the groupings) and `metrics` are added.
            metrics: Numbers for `best`.
            overwrite: False never saves a step of this object again, even with `replace=True`; a Trainer passes it
                because its step has not changed.

        Raises:
            SaveError: When the previous save failed (this one still runs), or this save cannot start.
            ValueError: When the directory has this step, or a later one, of another history.
            InUseError: When another run has taken over the directory.
        """
        failed = self._finish()
        if step in self._known - self._damaged and not (self._replace and overwrite):
            self._prune()  # the previous run may have been killed before pruning
        else:
            self._prepare(step)
            self._look_for_metric(step, metrics or {})
            texts = {"meta": _text("meta", self._meta(step, meta, metrics)), "data": _text("data", of_all_hosts(data))}
            self._start(step, {item: records.flatten(tree) for item, tree in items.items()}, texts)
        if failed is not None:
            raise failed

    def adopt(self, step: int) -> None:
        """Marks `step`, if it exists, as saved by this run, so that it is not saved again."""
        self._known |= {step} & set(distributed.allgather_json(self.steps())[0])
        self._when.saved(step)

    def steps(self) -> list[int]:
        """Lists the complete steps, oldest first."""
        return storage.steps(self.directory)

    def has(self, step: int) -> bool:
        """Returns whether `step` is complete, or being saved; all hosts get the same answer."""
        return step in self._known or distributed.allgather_json(step in self.steps())[0]

    def latest(self) -> int | None:
        """Returns the newest complete step with intact records that is not known to be damaged, else None.

        Its arrays are read and verified when it is restored, or by `verify`.
        """
        return next((step for step in reversed(self.steps()) if self._looks_whole(step)), None)

    def verify(self, step: int) -> list[str]:
        """Reads a whole step and names its damaged leaves."""
        bad = restore.verify(self._path(step))
        self._damaged |= {step} if bad else set()
        return bad

    def _prepare(self, step: int) -> None:
        """Checks that this run still owns the directory, and moves aside steps that conflict with `step`."""
        try:
            self._make_way(step, self._held())
        except (OSError, distributed.PeerError) as error:  # the directory cannot be read or changed
            raise self._failed(step, error) from error

    def _held(self) -> list[int]:
        """Lists the complete steps, identically on all hosts. Raises InUseError if another run has taken over the
        directory.
        """
        with distributed.raise_on_all("reading its directory"):
            here = self._owner.taken(), self.steps()
        taken, steps = distributed.allgather_json(here)[0]
        if taken is not None:
            raise InUseError(taken)
        return steps

    def _start(self, step: int, items: dict[str, dict[str, Any]], texts: dict[str, str]) -> None:
        raws = {item: {n: records.snapshot(leaf) for n, leaf in leaves.items()} for item, leaves in items.items()}
        described = records.describe(items, raws)
        arrays = {
            item: {n: raw for n, raw in leaves.items() if records.is_stored(described[item][n])}
            for item, leaves in raws.items()
        }
        make_texts = {name: lambda text=text: text for name, text in texts.items()}
        self._when.saved(step)
        try:
            self._steps.save(step, arrays, {**make_texts, "manifest": lambda: records.manifest_text(described)})
        except Exception as error:  # of orbax, tensorstore or the system
            raise self._failed(step, error) from error
        self._saving = step, self._thread.submit(self._complete, step)
        self._known.add(step)

    def _complete(self, step: int) -> list[str]:
        """Waits in the background until `step` is on disk, reads it again and returns the names of damaged leaves."""
        self._steps.wait()
        bad = restore.damaged_leaves(self.directory / str(step)) if self._verify else []
        if jax.process_count() == 1 and not bad:
            self._prune()
        return bad

    def _finish(self) -> SaveError | None:
        """Waits for the running save and returns its error, if any."""
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        step, completed = saving
        try:
            with distributed.raise_on_all("writing it"):
                bad = completed.result()
        except Exception as error:  # of orbax, tensorstore or the system
            with contextlib.suppress(OSError, distributed.PeerError):
                self._held()  # another run may have deleted the files that this one was writing
            return self._failed(step, error)
        if restore.anywhere(bad):
            return self._refused(step, bad)
        self._failed_saves = 0
        if jax.process_count() > 1:
            self._prune()
        return None

    def _refused(self, step: int, bad: list[str]) -> SaveError:
        self._known.discard(step)
        aside = self._steps.set_aside(step)
        return self._failed(step, DamagedError(f"its files differ from what was saved, see {aside}:{shorten(bad)}"))

    def _failed(self, step: int, error: Exception) -> SaveError:
        self._known.discard(step)
        self._left = []
        self._steps.clean(step)
        return super()._failed(step, error)

    def _last_good(self) -> int | None:
        """Returns the newest step known to be good; only reads the disk, which may be the cause, if necessary."""
        known = self._known - self._damaged
        return max(known) if known else self.latest()

    def _prune(self) -> None:
        """Deletes the steps that the policy does not keep; damaged steps never count as kept."""
        try:
            steps = self.steps()
            left, self._left = [step for step in self._left if step in steps], []
            good = [step for step in steps if step not in self._damaged and step not in left]
            for step in good:
                if self._keep.best and step not in self._metrics:
                    self._metrics[step] = restore.metrics(self.directory / str(step))
            keep = self._keep(good, self._metrics)
            gone = left + [step for step in steps if step < max(good, default=0) and step not in keep]
            self._steps.delete(gone)
            self._forget(gone)
        except OSError as error:  # the new step is still good
            _log.warning("Old steps of %s could not be deleted: %s.", self.directory, summary(error))

    def _forget(self, gone: list[int]) -> None:
        """Forgets deleted steps, of which a long run has many."""
        self._known.difference_update(gone)
        for step in gone:
            self._metrics.pop(step, None)

    def _release(self) -> None:
        self._thread.shutdown()
        self._steps.close()
        self._owner.release()

    def _abandon(self) -> None:
        self.settle()
        self._owner.release()

    def _make_way(self, step: int, held: list[int]) -> None:
        """Renames damaged steps whose numbers the run will use. Never touches good steps."""
        if self._replace and step in held:
            self._steps.make_room(step)
        self._left = [s for s in held if s > step] if self._replace else []
        if self._left:
            _log.warning("Step %d replaces the later steps %s of %s.", step, self._left, self.directory)
        ahead = [s for s in held if s >= step and not self._replace]
        good = [s for s in ahead if s not in self._damaged]
        if good:
            raise ValueError(
                f"Step {step} cannot be saved: {self.directory} already has the steps {good} of another run. "
                "Restore the newest one, or use another directory."
            )
        for s in ahead:
            _log.warning("Step %d is damaged: kept as %s.", s, self._steps.set_aside(s))
            self._damaged.discard(s)

    def _look_for_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns once if the first saved step lacks the metric of `best`."""
        best = self._keep.best
        if best is not None and best.metric not in metrics and not self._metric_seen:
            _log.warning(
                "Step %d is saved without the metric %r of best=, so it is deleted when newer steps are saved; it has %s.",
                *(step, best.metric, sorted(metrics) or "none"),
            )
        self._metric_seen = True

    def _looks_whole(self, step: int) -> bool:
        if step in self._damaged:
            return False
        try:
            restore.open_step(self._path(step))
        except DamagedError as error:
            _log.warning("%s", error)
            self._damaged.add(step)
            return False
        return True

    def _read(self, step: int, wanted: restore.Wanted) -> dict[str, Any]:
        try:
            return restore.read(self._path(step), wanted)
        except DamagedError:
            self._damaged.add(step)
            raise

    def _path(self, step: int) -> epath.Path:
        if step not in self.steps():
            raise self._missing(step, self.steps())
        return self.directory / str(step)


def _text(name: str, content: Any) -> str:
    try:
        return records.to_text(content)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must consist of JSON types (str, int, float, bool, None, list, dict): {error}"
        ) from error
