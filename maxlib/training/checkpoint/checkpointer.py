"""The checkpoints of one run."""

import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from maxlib import sharding
from maxlib.training.checkpoint import manifest, records, restore, storage, trees
from maxlib.training.checkpoint.errors import DamagedError, SaveError
from maxlib.training.checkpoint.relayout import Layouts

_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores the steps of one run in a directory of its own, asynchronously.

    A step appears all at once or not at all, and the newest `keep` are kept. `should_save` says yes every `every` steps. `layouts`
    are those of the model's stacks (`layouts(model)`): recorded with each step, and what a restored step is laid out to.
    In a job of several hosts every host makes the same calls.

    Raises:
      SaveError: the directory cannot be made or written.
    """

    def __init__(self, directory: Any, *, keep: int = 3, every: int | None = None, layouts: Layouts | None = None):
        if keep < 1 or (every is not None and every < 1):
            raise ValueError(f"keep and every must be at least 1, got keep={keep} and every={every}.")
        self.directory = epath.Path(directory).resolve()
        self.every, self.layouts = every, layouts or {}
        try:
            self._steps = storage.Steps(self.directory, keep)
        except OSError as error:
            raise SaveError(f"Checkpoints cannot be written to {self.directory}: {error}", step=0) from error
        self._saving: int | None = None
        self._own: set[int] = set()  # steps that this object saved or restored
        self._damaged: set[int] = set()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.close()
        except SaveError as failed:
            if error is None:
                raise
            _log.error("%s", failed)  # and let the first error be seen

    def should_save(self, step: int) -> bool:
        """Whether `step` is one of every `every`; never without it."""
        return self.every is not None and step > 0 and step % self.every == 0

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        *,
        data: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to save and returns once the arrays may be donated; waits for the save before, if that still runs.

        items: pytrees of arrays by name, such as `params`, `rest` and `opt`. data: one state of the data's iterator per virtual shard
        of this host (`Loader.get_state()`), in JSON's types. meta: anything in JSON's types; `format`, `step` and `layouts` are added.
        A step that this object has saved or restored already is left as it is.

        Raises:
          SaveError: the save before this one has failed; this one runs all the same. Or this one cannot even begin.
          ValueError: the directory has this step or a later one of another history.
        """
        failed = self._finish()
        if step in self._own:
            return _raise(failed)
        self._make_way(step)
        meta = {**(meta or {}), "format": manifest.FORMAT, "step": step, "layouts": self.layouts}
        texts = {"meta": _text("meta", meta), "data": _text("data", _of_all_hosts(dict(data or {})))}
        self._start(step, {item: trees.flatten(tree) for item, tree in items.items()}, texts)
        return _raise(failed)

    def restore(
        self,
        step: int | None = None,
        like: dict[str, Any] | None = None,
        *,
        items: tuple[str, ...] | list[str] | None = None,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Restores `step`, or the newest undamaged one with a warning for each that is not; see `load`."""
        self._wait_quietly()
        wanted = restore.Wanted(like, None if items is None else tuple(items), self.layouts, cast)
        if step is None:
            restored = restore.newest(self.directory, wanted, self._damaged)
        else:
            restored = restore.read(self._path(step), wanted)
        self._own.add(restored["meta"]["step"])
        return restored

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return storage.steps(self.directory)

    def latest(self) -> int | None:
        """The newest complete step whose records are whole and that has not been found damaged; None without one.

        Its arrays are read and verified when it is restored, or by `verify`.
        """
        return next((step for step in reversed(self.steps()) if self._looks_whole(step)), None)

    def verify(self, step: int) -> list[str]:
        """Reads all of a step and names the damaged leaves."""
        bad = restore.verify(self._path(step))
        self._damaged |= {step} if bad else set()
        return bad

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises SaveError if it has failed."""
        _raise(self._finish())

    def close(self) -> None:
        """Waits for the last save and ends. Raises SaveError if it has failed."""
        failed = self._finish()
        self._steps.close()
        _raise(failed)

    def _start(self, step: int, items: dict[str, dict[str, Any]], texts: dict[str, str]) -> None:
        raws = {item: {n: trees.snapshot(leaf) for n, leaf in leaves.items()} for item, leaves in items.items()}
        described = manifest.describe(items, raws)
        stored = lambda item, n: manifest.is_stored(described[item][n])
        arrays = {item: {n: raw for n, raw in leaves.items() if stored(item, n)} for item, leaves in raws.items()}
        make = {name: lambda text=text: text for name, text in texts.items()}
        try:
            self._steps.save(step, arrays, {**make, "manifest": lambda: manifest.finish(described)})
        except Exception as error:  # of orbax, tensorstore or the system
            raise self._failed(step, error) from error
        self._saving = step
        self._own.add(step)

    def _finish(self) -> SaveError | None:
        """Waits for the save that runs, and gives what went wrong with it."""
        step, self._saving = self._saving, None
        try:
            self._steps.wait()
        except Exception as error:  # of orbax, tensorstore or the system
            return self._failed(-1 if step is None else step, error)
        return None

    def _failed(self, step: int, error: Exception) -> SaveError:
        self._own.discard(step)
        self._steps.clean(step)
        last = self.latest()
        good = "there is no earlier one" if last is None else f"step {last} is the last good one"
        failed = SaveError(f"Step {step} could not be saved to {self.directory} ({error}); {good}.", step=step)
        failed.__cause__ = error
        return failed

    def _wait_quietly(self) -> None:
        failed = self._finish()
        if failed:
            _log.error("%s", failed)

    def _make_way(self, step: int) -> None:
        """Sets damaged steps aside that stand where the run goes now. Good ones are never touched."""
        ahead = [s for s in self.steps() if s >= step]
        good = [s for s in ahead if s not in self._damaged]
        if good:
            raise ValueError(
                f"Step {step} cannot be saved: {self.directory} already holds the steps {good} of a run that went as far. "
                "Restore the newest one, or use another directory."
            )
        for s in ahead:
            _log.warning("Step %d is damaged: kept as %s.", s, self._steps.set_aside(s))
            self._damaged.discard(s)

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

    def _path(self, step: int) -> epath.Path:
        if step not in self.steps():
            raise FileNotFoundError(f"{self.directory} has no complete step {step}; it has {self.steps()}.")
        return self.directory / str(step)


def _raise(failed: SaveError | None) -> None:
    if failed is not None:
        raise failed


def _text(name: str, content: Any) -> str:
    try:
        return records.to_text(content)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must consist of JSON's types (str, int, float, bool, None, list, dict): {error}"
        ) from error


def _of_all_hosts(data: dict[str, Any]) -> dict[str, Any]:
    """The states of all hosts' shards, joined."""
    return {shard: state for states in sharding.of_all_processes(data) for shard, state in states.items()}
