"""The trainer equals the bare loop, and adds what long runs need."""

import contextlib
import functools
import gc
from typing import ClassVar

import jax
import numpy as np
import pytest

from maxlib import checkpoint, nn, observability, sharding, training
from tests.training import tiny
from tests.training.trainers import OPTIMIZER, SGD, by_hand, same, trainer


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    tiny.share_steps(monkeypatch)


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
    assert rows[0]["learning_rate"] == 0.5 and rows[-2]["model_tflops_per_second"] > 0
    assert not any("mfu" in row for row in rows)  # of a CPU


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
    assert not ours.state.trainable["layers.groups.1.0.mlp.up.w"].sharding.is_fully_replicated


def test_evaluation_reads_so_many_batches_from_the_start_each_time():
    few, short = (
        trainer(evaluation=training.Evaluation(tiny.Loader(count), batches=batches))
        for count, batches in ((5, 2), (2, None))
    )
    want = short.evaluate()
    assert few.evaluate() == want == few.evaluate() and want["eval/num_targets"] == 2 * 8 * 12


def test_evaluation_has_no_embedding_noise():
    options = {"optimizer": SGD, "evaluation": training.Evaluation(tiny.Loader(2))}
    silent, noisy = (trainer(tiny.filled_llama, neftune_alpha=alpha, **options) for alpha in (None, 100.0))
    want, got = ({name: float(value) for name, value in ours.evaluate().items()} for ours in (silent, noisy))
    assert got == pytest.approx(want, rel=1e-6)
    assert abs(noisy.fit(1)["loss"] - silent.fit(1)["loss"]) > 1e-3


def test_model_flops_are_those_of_what_is_trained():
    everything, head = trainer(), trainer(filter=training.trainable_only("head.w"))
    for run in (everything, head):
        run.fit(1)
    matmul = 2 * 8 * 12 * 16 * tiny.VOCAB  # the head's forward pass
    assert everything._meter.flops - 3 * matmul == 3 * (head._meter.flops - 2 * matmul) > 0


def test_the_training_loader_is_not_evaluated():
    """It would go back to its first batch each time, and the run would see no others."""
    loader = tiny.Loader()
    for source in (loader, training.Prefetch(loader)):
        with pytest.raises(ValueError, match="evaluation has the training loader"):
            trainer(loader=loader, evaluation=training.Evaluation(source, every=2, batches=1))


def test_a_run_has_a_key_of_its_own():
    def loss(model, batch, key):
        value, stats = tiny.loss(model, batch)
        return value, training.Stats(stats.num_targets, {"drawn": jax.random.uniform(key) * stats.num_targets})

    drawn = [trainer(loss=loss, optimizer=SGD, key=key).fit(1)["drawn"] for key in (0, 7, jax.random.key(7))]
    assert drawn[0] != drawn[1] == drawn[2]


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_collected_until_the_first_step_has_run(fails):
    class Watching(tiny.Loader):
        collects: ClassVar[list[bool]] = []

        def __next__(self):
            self.collects.append(gc.isenabled())
            if fails:
                raise OSError("no data")
            return super().__next__()

    with pytest.raises(OSError) if fails else contextlib.nullcontext():
        trainer(loader=Watching()).fit(3)
    assert Watching.collects == ([False] if fails else [False, True, True]) and gc.isenabled()


@pytest.mark.parametrize(("model", "batches"), [("fresh", "committed"), ("in part", "host")])
def test_a_step_is_compiled_once(model, batches, caplog):
    """Whether or not arrays are committed to a device, as those of a trained model and of a scored batch are."""

    class Placed(tiny.Loader):
        def __next__(self):
            batch = super().__next__()
            return batch if batches == "host" else jax.device_put(batch, jax.devices()[0])

    made, device = tiny.model(), jax.devices()[0]
    if model == "in part":
        made.head = jax.device_put(made.head, device)
    ours = trainer(made, optimizer=SGD, loader=Placed(), loss=functools.partial(tiny.loss))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        ours.fit(3)
    assert sum(record.getMessage().startswith("Compiling jit(step)") for record in caplog.records) == 1


def test_a_state_is_where_its_parameters_are():
    there = jax.devices()[1]
    state = training.make_state(jax.device_put(tiny.model(), there), SGD)
    assert all(x.committed and x.devices() == {there} for x in jax.tree.leaves(state))


def test_what_the_loader_counts_is_written():
    class Counts(tiny.Loader):
        def metrics(self):
            return {"data/bad_records": 3}

    assert trainer(loader=Counts(2)).fit(1)["data/bad_records"] == 3


def test_rows_that_the_mesh_cannot_share():
    mesh = sharding.make_mesh(data=8)
    with pytest.raises(ValueError, match="6"):
        training.shard_batch(tiny.batch(rows=6), sharding.Layout(mesh, sharding.DP))


def test_several_processes_need_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="without a layout, each of the 2 processes would train its own model"):
        training.Trainer(tiny.model, optimizer=SGD, loader=tiny.Loader())


def aliased():
    model = tiny.model()
    model.final = model.layers.groups[0][0].norm
    return model


@pytest.mark.parametrize("model", [aliased, aliased()], ids=["built", "given"])
def test_a_parameter_at_two_places_is_refused(model):
    """Both would be trained, apart from each other: copies of a pytree do not know that they were one."""
    said = r"final\.scale and layers\.groups\.0\.0\.norm\.scale are the same parameter"
    with pytest.raises(ValueError, match=said):
        trainer(model)
    with pytest.raises(ValueError, match=said):
        training.make_state(model, SGD)


def test_several_models_are_a_pytree():
    loss = lambda models, batch, key: tiny.loss(models["student"], batch, key)
    ours = trainer({"student": tiny.model(), "other": tiny.model()}, optimizer=SGD, loss=loss)
    ours.fit(1)
    assert {path.split(".")[0] for path in ours.state.trainable} == {"student", "other"}


def test_callbacks_run_after_a_number_of_steps():
    for every in (0, -1, True):
        with pytest.raises(TypeError, match=r"callbacks must be pairs \(every, function\)"):
            trainer(callbacks=[(every, print)])


def test_a_list_or_a_generator_of_batches_resumes_after_those_it_has_used(tmp_path, capsys):
    batches = [tiny.batch(seed=number) for number in (1, 2, 3, 4)]
    run = functools.partial(training.Trainer, tiny.model, OPTIMIZER, loss=tiny.loss)
    state, _ = by_hand(4)
    with checkpoint.Checkpointer(tmp_path, every=2) as checkpointer:
        run(batches, evaluation=training.Evaluation(batches[:1]), checkpointer=checkpointer).fit(2)
    out = capsys.readouterr().out
    assert out.index("compiling the step ...") < out.index("step 2/2")
    with checkpoint.Checkpointer(tmp_path, every=2) as checkpointer:
        resumed = run((batch for batch in batches), checkpointer=checkpointer)
        resumed.fit(9)
    assert "the data ended after step 4, before step 9" in capsys.readouterr().out
    assert same(state.trainable, resumed.state.trainable)
