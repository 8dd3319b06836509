"""What a trainer saves: checkpoints and exports, also when a save fails or a step diverges."""

import jax.numpy as jnp
import pytest

from maxlib import checkpoint, nn, ops, training, weights
from tests.training import tiny
from tests.training.trainers import SGD, same, trainer


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    tiny.share_steps(monkeypatch)


def test_a_save_that_fails_is_said_and_training_goes_on(tmp_path, capsys, monkeypatch):
    checkpointer = checkpoint.Checkpointer(tmp_path / "checkpoints", every=2)
    good = checkpointer.save

    def full_disk(step, *args, **kwargs):
        if step == 4:
            raise checkpoint.SaveError("No space left; step 2 is the last good one.", step=4)
        good(step, *args, **kwargs)

    monkeypatch.setattr(checkpointer, "save", full_disk)
    trainer(checkpointer=checkpointer).fit(6)
    out = " ".join(capsys.readouterr().out.split())
    assert "NOT SAVED: No space left; step 2 is the last good one. Training continues without saving." in out
    assert checkpointer.steps() == [2, 6]


def test_exports_are_made_in_the_background_and_made_up_for(tmp_path, capsys):
    rope = ops.Rope(12, max_length=64)
    exports = lambda: [
        training.HuggingFaceExport(tmp_path / "hf", every=2, keep=2),
        training.ParameterExport(tmp_path / "params", every=3),
    ]
    build = lambda: tiny.filled_llama(num_layers=1, rope=rope)
    make = lambda: trainer(
        build,
        optimizer=SGD,
        checkpointer=checkpoint.Checkpointer(tmp_path / "checkpoints", every=2),
        callbacks=exports(),
    )
    ours = make()
    (tmp_path / "hf" / "5").mkdir(parents=True)  # an export of another run
    ours.fit(5)
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["4", "5"]  # an old export of step 5 is replaced
    assert checkpoint.load(tmp_path / "params", {"params": ours.state.trainable})["meta"]["step"] == 5
    assert same(
        nn.partition(weights.from_pretrained(tmp_path / "hf" / "5", dtype=jnp.float32))[0], ours.state.trainable
    )
    (tmp_path / "hf" / "5").rename(tmp_path / "hf" / ".5.old-1234")  # killed between two renames
    (tmp_path / "hf" / ".6.part-1234").mkdir()
    (tmp_path / "checkpoints" / "5").rename(tmp_path / "5")
    (tmp_path / "hf" / "4").rename(tmp_path / "4")
    again = make()
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["5"]
    again.fit(4)
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["4"]  # step 5 is of a history that the run left
    assert "NOT SAVED" not in capsys.readouterr().out
    params = trainer(build, optimizer=SGD)
    assert params.restore(params_from=tmp_path / "params").startswith("parameters from")
    assert same(params.state.trainable, again.state.trainable)  # step 4 took the place of step 5, which it came before


def test_an_export_that_fails_is_said_and_training_goes_on(tmp_path, capsys):
    ours = trainer(callbacks=[training.HuggingFaceExport(tmp_path / "hf", every=2)])  # of no family
    ours.fit(3)
    assert "NOT SAVED: Step 2 could not be exported" in " ".join(capsys.readouterr().out.split())


def test_a_diverged_step_is_not_exported(tmp_path):
    """Its metrics are read one step later; an export of the step itself would replace a good one."""
    bad = tiny.batch(seed=4)["tokens"][0, 0]

    def loss(model, batch, key):
        value, stats = tiny.loss(model, batch)
        return value * jnp.where(batch["tokens"][0, 0] == bad, jnp.nan, 1.0), stats

    export = training.ParameterExport(tmp_path, every=2, keep=1)
    with pytest.raises(training.DivergedError, match="step 4: loss nan"):
        trainer(loss=loss, optimizer=SGD, callbacks=[export]).fit(8)
    assert [path.name for path in tmp_path.iterdir() if path.name.isdecimal()] == ["2"]


def test_the_last_checkpoint_has_the_last_metrics(tmp_path):
    """Also when the last step is one of those that are saved anyway, before the end."""
    kept = checkpoint.Checkpointer(tmp_path, every=2, best=checkpoint.Best("eval/loss"))
    last = trainer(checkpointer=kept, evaluation=training.Evaluation(tiny.Loader(1))).fit(2)
    assert checkpoint.read_records(tmp_path).meta["metrics"]["eval/loss"] == last["eval/loss"]


def test_the_best_checkpoint_stays(tmp_path):
    best = checkpoint.Best("eval/loss")
    ours = trainer(
        checkpointer=checkpoint.Checkpointer(tmp_path, every=1, keep=1, best=best),
        evaluation=training.Evaluation(tiny.Loader(1), every=1),
    )
    losses = {}
    ours.callbacks.append((1, lambda trainer: losses.setdefault(trainer.step, trainer.evaluate()["eval/loss"])))
    ours.fit(4)
    assert ours.checkpointer.steps() == sorted({4, min(losses, key=losses.__getitem__)})
