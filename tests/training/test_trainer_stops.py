"""What ends a training run early: signals, losses that are not finite, data that ends or hangs."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import checkpoint, distributed, nn, observability, training
from maxlib.distributed import _timeouts as deadlines
from maxlib.training import _trainer as trainers
from tests.training import tiny
from tests.training.trainers import SGD, trainer


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    tiny.share_steps(monkeypatch)


def test_batches_without_a_target_are_said_and_end_the_run(capsys):
    class Untaught(tiny.Loader):
        def __next__(self):
            data = super().__next__()
            return data | {"targets": np.full_like(data["targets"], -1)} if self.next > 2 else data

    ours = trainer(loader=Untaught())
    with pytest.raises(ValueError, match=r"the last 10 batches, up to step 12, have no target to learn"):
        ours.fit(20)
    assert capsys.readouterr().out.count("has no target to learn") == 1


def test_a_loss_that_is_not_finite_stops_and_names_the_layer_and_the_last_good_checkpoint(tmp_path):
    def loss(model, batch, key):
        params, rest = nn.partition(model)
        up = "layers.groups.1.0.mlp.up.w"
        bad = jnp.where(batch["tokens"][0, 0] == fifth, jnp.inf, 1.0)
        return tiny.loss(nn.combine(params | {up: params[up].at[1].multiply(bad)}, rest), batch)

    fifth = tiny.batch(seed=5)["tokens"][0, 0]
    checkpointer = checkpoint.Checkpointer(tmp_path / "checkpoints", every=2)
    ours = trainer(loss=loss, optimizer=SGD, directory=tmp_path, checkpointer=checkpointer)
    with pytest.raises(training.DivergedError, match=r"step 5: loss .*last good checkpoint is that of step 4") as error:
        ours.fit(8)
    said = "the parameters of step 4 and this step's batch: forward: first the output of layers.2.mlp"
    assert said in str(error.value)
    assert checkpointer.steps() == [2, 4]
    assert observability.read_jsonl(tmp_path / "metrics.jsonl")[-1]["loss"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_first(tmp_path, number):
    checkpointer = checkpoint.Checkpointer(tmp_path / "checkpoints")
    ours = trainer(checkpointer=checkpointer, callbacks=[(3, lambda _: os.kill(os.getpid(), number))])
    before = signal.getsignal(number)
    with pytest.raises(distributed.Interrupted) as stopped:
        ours.fit(100)
    assert stopped.value.code == 128 + number
    assert checkpointer.steps() == [3] and ours.loader.next == 3
    assert signal.getsignal(number) is before


def test_a_signal_while_waiting_for_data_does_not_wait_on(tmp_path):
    class Slow(tiny.Loader):
        def __next__(self):
            if self.next == 2:
                os.kill(os.getpid(), signal.SIGINT)
                pytest.fail("the wait goes on")
            return super().__next__()

    ours = trainer(loader=Slow(), checkpointer=checkpoint.Checkpointer(tmp_path / "checkpoints"))
    with pytest.raises(distributed.Interrupted):
        ours.fit(100)
    assert ours.checkpointer.steps() == [2]


@pytest.mark.parametrize("handed_out", [False, True])
def test_a_batch_that_a_signal_cuts_off_is_not_lost(tmp_path, handed_out):
    class Cut(tiny.Loader):
        def __next__(self):
            batch = super().__next__() if handed_out else None
            if self.next >= 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return batch or super().__next__()

    ours = trainer(loader=Cut(), checkpointer=checkpoint.Checkpointer(tmp_path / "checkpoints"))
    with pytest.raises(distributed.Interrupted):
        ours.fit(100)
    assert ours.checkpointer.steps() == [ours.step] and ours.loader.next == ours.step


def test_sigterm_cuts_an_evaluation_short_and_again_is_as_once(tmp_path):
    class Long(tiny.Loader):
        def __next__(self):
            if self.next == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            assert self.next < 4
            return super().__next__()

    options = {"directory": tmp_path, "checkpointer": checkpoint.Checkpointer(tmp_path / "checkpoints")}
    with pytest.raises(distributed.Interrupted) as stopped:
        trainer(**options, evaluation=training.Evaluation(Long(), every=3)).fit(100)
    assert stopped.value.code == 128 + signal.SIGTERM and options["checkpointer"].steps() == [3]
    trainer(**options, evaluation=training.Evaluation(tiny.Loader(1), every=3)).fit(4)  # makes up for it
    rows = observability.read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/loss" in row] == [3, 4]


def test_a_run_that_skips_every_step_ends(monkeypatch):
    monkeypatch.setattr(trainers, "MOST_SKIPPED", 3)
    optimizer = training.skip_spikes(training.adamw(1e-2), warmup_steps=0, norm_factor=0.0)
    with pytest.raises(training.DivergedError, match=r"the last 3 steps, up to step 3, were skipped"):
        trainer(optimizer=optimizer).fit(8)


def test_data_that_ends_is_said(capsys):
    assert trainer(loader=tiny.Loader(2)).fit(5)["loss"] > 0
    assert "the data ended after step 2, before step 5" in capsys.readouterr().out


def test_what_hangs_dies_and_says_what_it_waited_for():
    code = "import time; from maxlib.distributed import hard_timeout\nwith hard_timeout(0.3, 'Godot'): time.sleep(60)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75
    assert "waited 0.3 s for Godot" in done.stderr and 'File "<string>", line 2' in done.stderr


def test_data_has_a_deadline(monkeypatch):
    class Hangs(tiny.Loader):
        def __next__(self):
            died.wait(30)
            return super().__next__()

    died, waited_for = threading.Event(), []
    monkeypatch.setattr(deadlines, "_report", lambda limit: (waited_for.append(limit.what), died.set()))
    ours = trainer(loader=Hangs(1))
    ours.timeout = 0.1
    ours._next(ours.loader, "training")
    assert waited_for[0] == "a batch of training data"
