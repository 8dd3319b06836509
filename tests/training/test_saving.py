"""When a trainer's checkpoints and exports wait for each other, and which steps are exported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import checkpoint, nn, ops, training, weights
from maxlib.observability import GoodputRecorder
from maxlib.post_training import WithFrozen
from maxlib.training import _saving
from tests.training import tiny


class Noted:
    """An export that records its calls and writes nothing."""

    def __init__(self, calls, name, *, due=(), there=()):
        self.calls, self.name, self._due, self._there = calls, name, due, there

    def due(self, step):
        return step in self._due

    def has(self, step):
        return step in self._there

    def save(self, step, state):
        self.calls.append(f"{self.name} {step}")

    def wait(self):
        self.calls.append(f"{self.name} waits")


class Checkpointer(checkpoint.Checkpointer):
    """A checkpointer without a directory; it has written nothing."""

    def __init__(self):
        self.base = None

    def wait(self):
        pass


STATE = training.TrainState(trainable={}, rest={}, opt_state=(), step=jnp.int32(0), key=jax.random.key(0))


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """Builds a `SaveManager` with fake parts, and the list of their calls."""
    calls: list[str] = []
    monkeypatch.setattr(_saving, "save", lambda checkpointer, state, step, data, numbers, base: calls.append(numbers))

    def make(*exports, checkpointer=True):
        parts = [Noted(calls, name, **options) for name, options in exports]
        return _saving.SaveManager(
            Checkpointer() if checkpointer else None,
            parts,
            clock=GoodputRecorder(tmp_path),
            timeout=None,
            log=pytest.fail,
        ), calls

    return make


def test_a_checkpoint_waits_for_exports_of_earlier_steps_unless_it_is_urgent(saving):
    keep, calls = saving(("a", {}), ("b", {"there": (3,)}))
    metrics = {"loss": jnp.float32(0.5), "load": jnp.ones(3)}  # a checkpoint's metrics are scalars
    keep.start(3, STATE, None, metrics)
    assert calls == ["a waits", {"loss": 0.5}]  # b has this step's already
    calls.clear()
    keep.start(4, STATE, None, metrics, urgent=True)
    assert calls == [{"loss": 0.5}]


def test_without_a_checkpointer_nothing_waits(saving):
    keep, calls = saving(("a", {}), checkpointer=False)
    keep.start(3, STATE, None, {})
    keep.settle()
    assert calls == [] and keep.last_good().startswith("There is no checkpoint")
    keep.wait()
    assert calls == ["a waits"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["due 4", "both 4"]),  # what is due is written anew
        ({"missing": True}, ["due 4"]),
        ({"last": True}, ["due 4", "none 4", "there 4"]),  # what is not due may be of an older run
        ({"last": True, "missing": True}, ["due 4", "none 4"]),
    ],
)
def test_exports_are_those_that_are_due_or_all_at_the_end(saving, options, expected):
    keep, calls = saving(
        ("due", {"due": (4,)}), ("both", {"due": (4,), "there": (4,)}), ("none", {}), ("there", {"there": (4,)})
    )
    keep.export(4, STATE, **options)
    assert calls == expected


def test_an_export_that_is_being_written_counts_as_there(tmp_path):
    export = training.HuggingFaceExport(tmp_path, every=1)
    (tmp_path / "2").mkdir()
    assert [export.has(step) for step in (2, 3)] == [True, False]
    export._running = 3, None
    assert [export.has(step) for step in (2, 3, 4)] == [True, True, False]


def test_a_run_that_went_back_keeps_its_own_exports(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "save_pretrained", lambda model, path, **options: path.mkdir())
    export = training.HuggingFaceExport(tmp_path, every=1, keep=2)
    for step in (2, 3, 7, 4):
        export._write(step, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_an_export_of_averages(tmp_path):
    optimizer = training.ema(optax.sgd(0.1), decay=0.5)
    state = training.make_state(tiny.filled_llama(num_layers=1, rope=ops.Rope(12, max_length=64)), optimizer)
    moved = {path: jnp.asarray(np.asarray(x) + 1) for path, x in state.trainable.items()}  # averages stay behind
    state = dataclasses.replace(state, trainable=moved)
    beside = training.make_state(WithFrozen(state.model, tiny.model()), optax.sgd(0.1))
    for name in ("own", "averaged", "beside"):
        export = training.HuggingFaceExport(tmp_path / name, every=1, ema=name == "averaged")
        export.save(1, beside if name == "beside" else state)
        export.wait()
    read = lambda name: nn.partition(weights.from_pretrained(tmp_path / name / "1", dtype=jnp.float32))[0]
    want = nn.partition(training.ema_model(state))[0]
    jax.tree.map(np.testing.assert_array_equal, read("averaged"), want)
    for name in ("own", "beside"):  # of a reference beside the model nothing is written
        jax.tree.map(np.testing.assert_array_equal, read(name), state.trainable)
    assert not np.array_equal(want["embed.w"], state.trainable["embed.w"])


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 1, "keep": 0}])
def test_an_export_of_no_step_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="every and keep must be at least 1"):
        training.HuggingFaceExport(tmp_path, **wrong)
    assert training.HuggingFaceExport(tmp_path, every=1, keep=1).due(1)
