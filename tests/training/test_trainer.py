"""The trainer equals the bare loop, and adds what long runs need."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import checkpoint, distributed, nn, observability, ops, sharding, training, weights
from maxlib.distributed import _timeouts as deadlines
from tests.training import tiny

OPTIMIZER = training.adamw(1e-2, mask=training.decay_mask(tiny.model()))
SGD, ADAMW = optax.sgd(0.1), training.adamw(1e-3, mask=None)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    tiny.share_steps(monkeypatch)


def trainer(model=tiny.model, **options):
    options = {"optimizer": OPTIMIZER, "loader": tiny.Loader(), "loss": tiny.loss} | options
    return training.Trainer(model, options.pop("optimizer"), options.pop("loader"), **options)


def same(a, b):
    return all(np.array_equal(a[path], b[path]) for path in a)


@functools.cache
def bare_step():
    return tiny.jit_step(training.make_train_step(tiny.loss, OPTIMIZER))


def by_hand(steps):
    """The bare loop."""
    state, step, loader = training.make_state(tiny.model(), OPTIMIZER), bare_step(), tiny.Loader()
    for _ in range(steps):
        state, metrics = step(state, next(loader))
    return state, metrics


def test_it_is_the_bare_loop_and_leaves_the_model_alone(tmp_path):
    model, seen = tiny.model(), []
    before = {path: np.asarray(v.get_value()) for path, v in nn.variables(model).items()}
    ours = trainer(
        model,
        directory=tmp_path,
        evaluation=training.Evaluation(tiny.Loader(3), every=4),
        log_schedule=lambda step: 0.5,
    )
    ours.callbacks += [(1, lambda trainer: seen.append(trainer.step)), (5, lambda trainer: seen.append(-trainer.step))]
    ours.fit(3)
    kept = ours.model  # a notebook may hold on to it
    last = ours.fit(6)
    state, metrics = by_hand(6)
    assert same(state.trainable, ours.state.trainable) and ours.step == 6
    assert last["loss"] == metrics["loss"] and 1.0 < last["eval/loss"] < 6.0 and last["eval/num_targets"] == 3 * 8 * 12
    assert same(before, {path: v.get_value() for path, v in nn.variables(model).items()})
    assert not same(nn.partition(kept)[0], state.trainable)
    assert (tmp_path / "goodput.jsonl").stat().st_size > 0
    rows = observability.read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval/loss" in row] == [3, 4, 6]
    assert seen == [1, 2, 3, 4, 5, -5, 6]
    assert rows[0]["learning_rate"] == 0.5 and rows[-2]["mfu"] > 0


def test_on_a_mesh(tmp_path):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    layout = sharding.Layout(mesh)
    ours = trainer(
        loss=functools.partial(tiny.loss),
        layout=layout,
        loader=training.Prefetch(tiny.Loader(), layout=layout),
        evaluation=training.Evaluation(tiny.Loader(1)),
    )
    last = ours.fit(3)
    assert last["data/wait_seconds"] > 0 and ours.loader.get_state() == {"0": {"next": 3}}
    state, metrics = by_hand(3)
    assert float(last["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5) and "eval/loss" in last
    for path, value in state.trainable.items():
        np.testing.assert_allclose(ours.state.trainable[path], value, atol=1e-4)
    assert not ours.state.trainable["layers.body.0.mlp.up.w"].sharding.is_fully_replicated


def test_evaluation_reads_so_many_batches_from_the_start_each_time():
    few, short = (
        trainer(evaluation=training.Evaluation(tiny.Loader(count), batches=batches))
        for count, batches in ((5, 2), (2, None))
    )
    want = short.evaluate()
    assert few.evaluate() == want == few.evaluate() and want["eval/num_targets"] == 2 * 8 * 12


@pytest.mark.full  # test_objectives has the gradients themselves
def test_in_a_1f1b_pipeline():
    """The gradients that the trainer is given are those of autodiff; evaluation runs in the same pipeline."""
    rules = sharding.DP | sharding.Pipeline("stage", microbatches=4)
    mesh = sharding.make_mesh(stage=2, devices=jax.devices()[:2])
    loss, optimizer = training.one_f_one_b(tiny.loss), optax.sgd(0.1)
    piped = {"layout": sharding.Layout(mesh, rules), "loss": loss, "evaluation": training.Evaluation(tiny.Loader(1))}
    ours, alone = (trainer(tiny.llama, optimizer=optimizer, **more) for more in (piped, {}))
    last, want = ours.fit(2), alone.fit(2)
    assert last["eval/loss"] < 5
    for name in ("loss", "nll"):
        assert float(last[name]) == pytest.approx(float(want[name]), rel=1e-5), name
    for path, value in alone.state.trainable.items():
        np.testing.assert_allclose(ours.state.trainable[path], value, atol=1e-5, err_msg=path)


def test_gradients_of_the_loss_are_those_it_takes():
    """Halved ones move the parameters half as far."""
    ours, want = trainer(optimizer=SGD, loss=Halved()), trainer(optimizer=SGD)
    start = {path: np.asarray(value) for path, value in want.state.trainable.items()}
    assert float(ours.fit(1)["loss"]) == pytest.approx(float(want.fit(1)["loss"]), rel=1e-6)
    for path, value in want.state.trainable.items():
        np.testing.assert_allclose(2 * (ours.state.trainable[path] - start[path]), value - start[path], atol=1e-6)


class Halved:
    """A loss that finds its own gradient."""

    def __call__(self, model, batch, key):
        return tiny.loss(model, batch, key)

    def gradients(self, trainable, rest, batch, key):
        def mean(trainable):
            value, stats = tiny.loss(nn.combine(trainable, rest), batch, key)
            return value / stats.num_targets, stats

        (value, stats), grads = jax.value_and_grad(mean, has_aux=True)(trainable)
        return jax.tree.map(lambda g: g / 2, grads), value, stats


def test_a_pipelines_microbatches_are_not_cut_again():
    with pytest.raises(TypeError, match="computes its own gradient from the whole batch. Omit accumulate"):
        training.accumulate(training.one_f_one_b(tiny.loss), 2)


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path):
    make = lambda loader: trainer(
        directory=tmp_path, loader=loader, checkpointer=checkpoint.Checkpointer(tmp_path / "checkpoints", every=2)
    )
    first = make(tiny.Loader())
    first.fit(3)
    second = make(tiny.Loader())
    assert second.restore().startswith("step 3 of this run's own checkpoint")
    second.fit(6)
    state, metrics = by_hand(6)
    assert same(state.trainable, second.state.trainable)
    for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(second.state.opt_state), strict=True):
        assert np.array_equal(a, b)
    rows = observability.read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert np.float32(rows[-1]["loss"]) == np.float32(metrics["loss"])
    assert np.float32(make(tiny.Loader()).fit(6)["loss"]) == np.float32(metrics["loss"])  # nothing is left to do


def test_a_resumed_model_that_is_configured_otherwise_is_said(tmp_path):
    """Its arrays have the same shapes, so nothing else would say it."""
    rope = lambda theta: ops.Rope(12, theta=theta)
    make = lambda theta, **changes: trainer(
        lambda: tiny.llama(rope=rope(theta), **changes), checkpointer=checkpoint.Checkpointer(tmp_path), optimizer=ADAMW
    )
    first = make(1e4)
    first.save()
    first.checkpointer.close()
    again = make(1e4)
    assert again.restore().startswith("step 0")  # a warning would be an error
    again.checkpointer.close()
    with pytest.warns(
        UserWarning, match=r"configuration differs from when(.|\n)*- .*theta=10000.0(.|\n)*\+ .*theta=500000.0"
    ) as said:
        make(5e5, norm_eps=1e-3).restore()
    assert "norm_eps=0.001" in str(said[0].message) and "num_layers" not in str(said[0].message)


def test_where_a_run_begins(tmp_path, capsys):
    source = trainer(checkpointer=checkpoint.Checkpointer(tmp_path / "a", every=2))
    source.fit(2)
    assert trainer().restore().startswith("a fresh start, ")
    full = trainer(checkpointer=checkpoint.Checkpointer(tmp_path / "b"))
    assert full.restore(resume_from=tmp_path / "a").startswith("step 2 of the checkpoint in")
    assert full.step == 2 and full.loader.next == 2 and same(full.state.trainable, source.state.trainable)
    params = trainer()
    assert params.restore(params_from=tmp_path / "a").startswith("parameters from ")
    assert params.step == 0 and params.loader.next == 0 and same(params.state.trainable, source.state.trainable)
    params.fit(1)
    assert params.restore() == "nothing to restore, the state of step 1 stays" and params.step == 1
    said = params.restore(params_from=tmp_path / "a")
    assert said.endswith(", step 1 with this run's optimizer state") and params.step == 1
    own = trainer(checkpointer=checkpoint.Checkpointer(tmp_path / "a"))
    assert "own" in own.restore(resume_from=tmp_path / "nowhere", params_from=tmp_path / "nowhere")
    assert "parameters from" in capsys.readouterr().out


def test_parameters_of_a_model_that_is_configured_otherwise_are_a_warning(tmp_path):
    """All shapes are the same: nothing else would tell."""
    build = lambda theta: lambda: tiny.llama(rope=ops.Rope(12, theta=theta, max_length=64))
    make = lambda theta, **more: trainer(build(theta), optimizer=ADAMW, **more)
    export = training.ParameterExport(tmp_path / "export", every=1)
    make(1e4, checkpointer=checkpoint.Checkpointer(tmp_path / "full"), callbacks=[export]).fit(1)
    weights.save_pretrained(build(1e4)(), tmp_path / "model")
    for name in ("full", "export", "model"):
        with pytest.warns(UserWarning, match=rf"(?s){name} was saved .*- .*theta=10000.*\+ .*theta=500000"):
            make(5e5).restore(params_from=tmp_path / name)


def test_averages_begin_at_the_parameters_that_were_read(tmp_path):
    """Not at the random ones, of which a third would be left after a thousand steps."""
    trainer(checkpointer=checkpoint.Checkpointer(tmp_path)).fit(2)
    ours = trainer(lambda: tiny.Bigram(rngs=nnx.Rngs(1)), optimizer=training.ema(ADAMW))
    ours.restore(params_from=tmp_path)
    assert same(nn.partition(training.ema_model(ours.state))[0], ours.state.trainable)
    ours.fit(1)
    with pytest.raises(ValueError, match=r"at step 1 the optimizer's averages .* restore before the first step"):
        ours.restore(params_from=tmp_path)


def test_parameters_from_a_hugging_face_directory(tmp_path):
    rope = ops.Rope(12, max_length=64)
    model = tiny.llama(rope=rope)
    weights.save_pretrained(model, tmp_path / "model")
    ours = training.Trainer(
        lambda: tiny.llama(seed=1, rope=rope),
        optimizer=ADAMW,
        loader=tiny.Loader(),
        loss=tiny.loss,
    )
    ours.restore(params_from=tmp_path / "model")  # a warning would be an error
    assert same(nn.partition(model)[0], ours.state.trainable)
    other = trainer()
    with pytest.raises(ValueError, match="has a different model"):
        other.restore(params_from=tmp_path / "model")


@pytest.mark.parametrize("saved_by", ["the same filter", "another filter"])
def test_parameters_from_a_checkpoint_are_those_of_frozen_layers_too(tmp_path, saved_by):
    """Without this, a run that trains a part continues on a backbone of random numbers."""
    part = training.trainable_only("layers.*")
    checkpointer = checkpoint.Checkpointer(tmp_path)
    source = trainer(filter=part if saved_by == "the same filter" else None, checkpointer=checkpointer)
    source.fit(1)
    ours = trainer(lambda: tiny.Bigram(rngs=nnx.Rngs(1)), filter=part)
    ours.restore(params_from=tmp_path)
    want, found = nn.variables(source.model), nn.variables(ours.model)
    assert want.keys() == found.keys()
    assert all(np.array_equal(value.get_value(), found[path].get_value()) for path, value in want.items())


def test_parameters_of_a_checkpoint_without_its_base_need_that_base(tmp_path):
    part = training.trainable_only("layers.*")
    trainer(filter=part, checkpointer=checkpoint.Checkpointer(tmp_path, base="a/base")).fit(1)
    trainer(filter=part).restore(params_from=tmp_path)
    other = trainer(lambda: tiny.Bigram(rngs=nnx.Rngs(1)), filter=part)
    with pytest.raises(
        ValueError, match=r"only has the parameters trained on the base in a/base .* build the model from that base"
    ):
        other.restore(params_from=tmp_path)


def test_parameters_from_hugging_face_are_those_of_frozen_layers_too(tmp_path):
    rope = ops.Rope(12, max_length=64)
    model = tiny.llama(rope=rope)
    weights.save_pretrained(model, tmp_path / "model")
    ours = training.Trainer(
        lambda: tiny.llama(seed=1, rope=rope),
        optimizer=ADAMW,
        loader=tiny.Loader(),
        loss=tiny.loss,
        filter=training.trainable_only("layers.attn.*"),
    )
    ours.restore(params_from=tmp_path / "model")
    assert same(nn.partition(model)[0], nn.partition(ours.model)[0])


def test_the_evaluation_of_a_noisy_loss_has_no_noise():
    """However the loss is wrapped."""
    build = lambda: tiny.llama()
    noisy = functools.partial(training.with_embedding_noise(training.next_token_loss, alpha=100.0), dtype=jnp.float32)
    options = {"optimizer": SGD, "evaluation": training.Evaluation(tiny.Loader(2))}
    evaluated = lambda ours: {name: float(value) for name, value in ours.evaluate().items()}
    want = evaluated(trainer(build, **options))
    for loss in (noisy, training.accumulate(noisy, 2)):
        ours = trainer(build, loss=loss, **options)
        assert evaluated(ours) == pytest.approx(want, rel=1e-6)
    assert abs(ours.fit(1)["loss"] - trainer(build, **options).fit(1)["loss"]) > 1e-3


def test_batches_without_a_target_are_said_and_end_the_run(capsys):
    class Untaught(tiny.Loader):
        def __next__(self):
            data = super().__next__()
            return data | {"targets": np.full_like(data["targets"], -1)} if self.next > 2 else data

    ours = trainer(loader=Untaught())
    with pytest.raises(ValueError, match=r"the last 10 batches, up to step 12, have no target to learn"):
        ours.fit(20)
    assert capsys.readouterr().out.count("has no target to learn") == 1


def test_a_loss_that_is_not_finite_stops_and_names_the_last_good_checkpoint(tmp_path):
    def loss(model, batch, key):
        value, stats = tiny.loss(model, batch)
        return value * jnp.where(batch["tokens"][0, 0] == bad, jnp.nan, 1.0), stats

    bad = [tiny.batch(seed=i)["tokens"][0, 0] for i in range(1, 6)][4]
    checkpointer = checkpoint.Checkpointer(tmp_path / "checkpoints", every=2)
    ours = trainer(loss=loss, directory=tmp_path, checkpointer=checkpointer)
    with pytest.raises(
        training.DivergedError, match=r"step 5: loss nan.*last good checkpoint is that of step 4"
    ) as error:
        ours.fit(8)
    assert "the parameters of step 4 and this step's batch: forward: the loss is nan, all layers' outputs" in str(
        error.value
    )
    assert checkpointer.steps() == [2, 4]
    assert observability.read_jsonl(tmp_path / "metrics.jsonl")[-1]["loss"] is None


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


def test_the_first_layer_that_is_not_finite_is_named(tmp_path):
    def loss(model, batch, key):
        params, rest = nn.partition(model)
        up = "layers.body.0.mlp.up.w"
        bad = jnp.where(batch["tokens"][0, 0] == third, jnp.inf, 1.0)
        return tiny.loss(nn.combine(params | {up: params[up].at[1].multiply(bad)}, rest), batch)

    third = tiny.batch(seed=3)["tokens"][0, 0]
    ours = trainer(loss=loss, checkpointer=checkpoint.Checkpointer(tmp_path, every=1))
    with pytest.raises(training.DivergedError, match=r"(?s)step 3.*forward: first the output of layers.2.mlp"):
        ours.fit(5)


def test_model_flops_are_those_of_what_is_trained():
    whole, head = trainer(), trainer(filter=training.trainable_only("head.w"))
    for one in (whole, head):
        one.fit(1)
    matmul = 2 * 8 * 12 * 16 * tiny.VOCAB  # the head's forward pass
    assert whole._meter.flops - 3 * matmul == 3 * (head._meter.flops - 2 * matmul) > 0


def test_the_training_loader_is_not_evaluated():
    """It would go back to its first batch each time, and the run would see no others."""
    loader = tiny.Loader()
    for one in (loader, training.Prefetch(loader)):
        with pytest.raises(ValueError, match="evaluation has the training loader"):
            trainer(loader=loader, evaluation=training.Evaluation(one, every=2, batches=1))


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

    options = {
        "directory": tmp_path,
        "checkpointer": checkpoint.Checkpointer(tmp_path / "checkpoints"),
    }
    with pytest.raises(distributed.Interrupted) as stopped:
        trainer(**options, evaluation=training.Evaluation(Long(), every=3)).fit(100)
    assert stopped.value.code == 128 + signal.SIGTERM and options["checkpointer"].steps() == [3]
    trainer(**options, evaluation=training.Evaluation(tiny.Loader(1), every=3)).fit(4)  # makes up for it
    rows = observability.read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/loss" in row] == [3, 4]


def test_exports_are_made_in_the_background_and_made_up_for(tmp_path, capsys):
    rope = ops.Rope(12, max_length=64)
    exports = lambda: [
        training.HuggingFaceExport(tmp_path / "hf", every=2, keep=2),
        training.ParameterExport(tmp_path / "params", every=3),
    ]
    make = lambda: training.Trainer(
        lambda: tiny.llama(rope=rope),
        optimizer=ADAMW,
        loader=tiny.Loader(),
        loss=tiny.loss,
        checkpointer=checkpoint.Checkpointer(tmp_path / "checkpoints", every=2),
        callbacks=exports(),
    )
    ours = make()
    ours.fit(5)
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["4", "5"]
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
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["4", "5"]
    assert "NOT SAVED" not in capsys.readouterr().out
    params = trainer(model=lambda: tiny.llama(rope=rope), optimizer=ADAMW)
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
        trainer(loss=loss, callbacks=[export]).fit(8)
    assert [path.name for path in tmp_path.iterdir() if path.name.isdecimal()] == ["2"]


def test_an_evaluation_before_training_is_of_the_newest_checkpoint(tmp_path):
    begin = lambda: trainer(
        checkpointer=checkpoint.Checkpointer(tmp_path), evaluation=training.Evaluation(tiny.Loader(1), every=100)
    )
    want = begin().fit(3)["eval/loss"]
    again = begin()
    assert again.evaluate()["eval/loss"] == want and again.step == 3


def test_a_run_has_a_key_of_its_own():
    def loss(model, batch, key):
        value, stats = tiny.loss(model, batch)
        return value, training.Stats(stats.num_targets, {"drawn": jax.random.uniform(key) * stats.num_targets})

    drawn = [trainer(loss=loss, key=key).fit(1)["drawn"] for key in (0, 7, jax.random.key(7))]
    assert drawn[0] != drawn[1] == drawn[2]


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


def test_a_tier_gets_the_step_that_a_kill_kept_from_it(tmp_path):
    """With its metrics, by which the best one is chosen."""

    def begin():
        near, far = (checkpoint.Checkpointer(tmp_path / name, every=2) for name in ("near", "far"))
        tiers = checkpoint.Tiers(near, far)
        return trainer(checkpointer=tiers, evaluation=training.Evaluation(tiny.Loader(1), every=2))

    before = begin().fit(2)
    shutil.rmtree(tmp_path / "far" / "2")
    assert begin().fit(2)["eval/loss"] == before["eval/loss"]
    saved = [checkpoint.load(tmp_path / name)["meta"] for name in ("near", "far")]
    assert [meta["step"] for meta in saved] == [2, 2] and saved[0]["metrics"] == saved[1]["metrics"]


def test_data_that_ends_is_said(capsys):
    assert trainer(loader=tiny.Loader(2)).fit(5)["loss"] > 0
    assert "the data ended after step 2, before step 5" in capsys.readouterr().out


def test_what_the_loader_counts_is_written():
    class Counts(tiny.Loader):
        def metrics(self):
            return {"data/bad_records": 3}

    assert trainer(loader=Counts(2)).fit(1)["data/bad_records"] == 3


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


def test_rows_that_the_mesh_cannot_share():
    mesh = sharding.make_mesh(data=8)
    with pytest.raises(ValueError, match="6"):
        training.place_batch(tiny.batch(rows=6), sharding.Layout(mesh, sharding.DP))


def test_several_processes_need_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="without a layout, each of the 2 processes would train its own model"):
        training.Trainer(tiny.model, optimizer=tiny.optimizer(tiny.model()), loader=tiny.Loader())


def aliased():
    model = tiny.model()
    model.final = model.layers.prefix[0].norm
    return model


@pytest.mark.parametrize("model", [aliased, aliased()], ids=["built", "given"])
def test_a_parameter_at_two_places_is_refused(model):
    """Both would be trained, apart from each other: copies of a pytree do not know that they were one."""
    said = r"final\.scale and layers\.prefix\.0\.norm\.scale are the same parameter"
    with pytest.raises(ValueError, match=said):
        trainer(model)
    with pytest.raises(ValueError, match=said):
        training.make_state(model, SGD)


def test_several_models_are_a_pytree():
    loss = lambda models, batch, key: tiny.loss(models["student"], batch, key)
    ours = trainer({"student": tiny.model(), "other": tiny.model()}, optimizer=SGD, loss=loss)
    ours.fit(1)
    assert {path.split(".")[0] for path in ours.state.trainable} == {"student", "other"}


@pytest.mark.parametrize("every", [0, -1, True])
def test_callbacks_run_after_a_number_of_steps(every):
    with pytest.raises(TypeError, match=r"callbacks must be pairs \(every, function\)"):
        trainer(callbacks=[(every, print)])
