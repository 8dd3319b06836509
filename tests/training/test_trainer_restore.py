"""Where a training run begins: a checkpoint of its own or of another run, parameters, a Hugging Face directory."""

import contextlib
import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import checkpoint, nn, observability, ops, sharding, training, weights
from maxlib.training import _restore as restoring
from tests.training import tiny
from tests.training.trainers import ADAMW, by_hand, same, trainer


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    tiny.share_steps(monkeypatch)


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path):
    make = lambda loader: trainer(
        directory=tmp_path, loader=loader, checkpointer=checkpoint.Checkpointer(tmp_path / "checkpoints", every=2)
    )
    first = make(tiny.Loader())
    first.fit(3)
    second = make(tiny.Loader())
    assert second.restore().startswith("resumed after step 3, from this run's own checkpoint")
    second.fit(6)
    state, metrics = by_hand(6)
    assert same(state.trainable, second.state.trainable)
    for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(second.state.opt_state), strict=True):
        assert np.array_equal(a, b)
    rows = observability.read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert np.float32(rows[-1]["loss"]) == np.float32(metrics["loss"])
    assert np.float32(make(tiny.Loader()).fit(6)["loss"]) == np.float32(metrics["loss"])  # nothing is left to do


def test_a_key_of_another_kind_is_resumed():
    state = training.TrainState({}, {}, (), jnp.int32(2), jax.random.key(3, impl="rbg"))
    saved: dict = {"data": None, "rest": {}}

    class Taken(checkpoint.Checkpointer):
        groupings = {"layers": [[1, 1]]}  # noqa: RUF012

        def __init__(self):
            pass

        def save(self, step, items, *, meta, **options):
            saved.update(items, meta=meta | {"step": step})

    restoring.save(Taken(), state, 2, None, {})
    new, _ = restoring._resumed(state, saved, "here")
    assert new.key.dtype == state.key.dtype and (jax.random.bits(new.key) == jax.random.bits(state.key)).all()


def test_a_resumed_run_does_not_build_the_model(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path, every=2)
    trainer(checkpointer=checkpointer).fit(2)
    values = []

    def build():
        model = tiny.model()
        jax.debug.callback(values.append, jax.tree.leaves(model)[0])  # runs if values are computed
        return model

    for directory, is_new in ((tmp_path, False), (tmp_path / "new", True)):
        resumed = trainer(build, checkpointer=checkpoint.Checkpointer(directory))
        resumed.restore()
        jax.block_until_ready(resumed.state)
        jax.effects_barrier()
        assert bool(values) == is_new
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(resumed.state))


STATES = {
    "one device": (None, training.adamw(1e-2)),
    "zero1 with scales of blocks": (sharding.DP | sharding.ZERO1, training.eight_bit_moments(training.adamw(1e-2))),
    "on the host": (sharding.FSDP | sharding.OFFLOAD_OPTIMIZER, training.adamw(1e-2)),
}


@pytest.mark.parametrize(
    "name", [pytest.param("one device", marks=pytest.mark.full), "zero1 with scales of blocks", "on the host"]
)
def test_the_abstract_state_is_that_of_make_state(name):
    strategy, optimizer = STATES[name]
    layout = None if strategy is None else sharding.Layout(sharding.make_mesh(data=2, fsdp=4), strategy)
    build = lambda: tiny.Bigram(rngs=nnx.Rngs(0))
    with contextlib.nullcontext() if layout is None else sharding.use(layout):
        state = training.make_state(build, optimizer)
    shapes = training.abstract_state(build, optimizer, layout=layout)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for (path, x), shape in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(shapes), strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype), path
        assert x.sharding.is_equivalent_to(shape.sharding, x.ndim), (path, x.sharding, shape.sharding)
        assert (x.sharding.memory_kind == "pinned_host") == (shape.sharding.memory_kind == "pinned_host"), path


def test_a_resumed_model_that_is_configured_otherwise_is_said(tmp_path):
    """Its arrays have the same shapes, so nothing else would say it."""
    build = lambda theta, **changes: lambda: tiny.filled_llama(num_layers=1, rope=ops.Rope(12, theta=theta), **changes)
    make = lambda theta, **changes: trainer(
        build(theta, **changes), checkpointer=checkpoint.Checkpointer(tmp_path), optimizer=ADAMW
    )
    saved(tmp_path, model=build(1e4), optimizer=ADAMW)
    again = make(1e4)
    assert again.restore().startswith("resumed after step 0")  # a warning would be an error
    again.checkpointer.close()
    with pytest.warns(
        UserWarning, match=r"configuration differs from when(.|\n)*- .*theta=10000.0(.|\n)*\+ .*theta=500000.0"
    ) as said:
        make(5e5, norm_eps=1e-3).restore()
    assert "norm_eps=0.001" in str(said[0].message) and "num_layers" not in str(said[0].message)


def test_where_a_run_begins(tmp_path, capsys):
    source = trainer(checkpointer=checkpoint.Checkpointer(tmp_path / "a", every=2))
    source.fit(2)
    assert trainer().restore().startswith("a new run, ")
    full = trainer(checkpointer=checkpoint.Checkpointer(tmp_path / "b"))
    assert full.restore(resume_from=tmp_path / "a").startswith("resumed after step 2, from the checkpoint in")
    assert full.step == 2 and full.loader.next == 2 and same(full.state.trainable, source.state.trainable)
    params = trainer()
    assert params.restore(params_from=tmp_path / "a").startswith("parameters from ")
    assert params.step == 0 and params.loader.next == 0 and same(params.state.trainable, source.state.trainable)
    params.fit(1)
    assert params.restore() == "nothing to restore, the state of step 1 stays" and params.step == 1
    said = params.restore(params_from=tmp_path / "a")
    assert said.endswith(", step 1 with this run's optimizer state") and params.step == 1
    resumed = trainer(checkpointer=checkpoint.Checkpointer(tmp_path / "a"))
    assert "own" in resumed.restore(resume_from=tmp_path / "nowhere", params_from=tmp_path / "nowhere")
    assert "parameters from" in capsys.readouterr().out


def test_parameters_of_a_model_that_is_configured_otherwise_are_a_warning(tmp_path):
    """All shapes are the same: nothing else would tell."""
    build = lambda theta: lambda: tiny.filled_llama(num_layers=1, rope=ops.Rope(12, theta=theta, max_length=64))
    make = lambda theta, **more: trainer(build(theta), optimizer=ADAMW, **more)
    export = training.ParameterExport(tmp_path / "export", every=1)
    ours = make(1e4, checkpointer=checkpoint.Checkpointer(tmp_path / "full"))
    ours.save()
    ours.checkpointer.wait()
    export.save(1, ours.state)
    export.wait()
    weights.save_pretrained(ours.model, tmp_path / "model")
    for name in ("full", "export", "model"):
        with pytest.warns(UserWarning, match=rf"(?s){name} was saved .*- .*theta=10000.*\+ .*theta=500000"):
            make(5e5).restore(params_from=tmp_path / name)


def test_averages_begin_at_the_parameters_that_were_read(tmp_path):
    """Not at the random ones, of which a third would be left after a thousand steps."""
    trainer(checkpointer=checkpoint.Checkpointer(tmp_path)).fit(2)
    ours = trainer(lambda: tiny.Bigram(rngs=nnx.Rngs(1)), optimizer=training.ema(ADAMW))
    ours.restore(params_from=tmp_path)
    assert same(nn.partition(training.ema_model(ours.state))[0], ours.state.trainable)
    ours.state = dataclasses.replace(ours.state, step=jnp.int32(1))
    with pytest.raises(ValueError, match=r"at step 1 the optimizer holds averages .* restore before the first step"):
        ours.restore(params_from=tmp_path)


def test_parameters_from_a_hugging_face_directory(tmp_path):
    """Those of frozen layers too."""
    rope = ops.Rope(12, max_length=64)
    model = tiny.filled_llama(rope=rope)
    weights.save_pretrained(model, tmp_path / "model")
    ours = trainer(
        lambda: tiny.filled_llama(seed=1, rope=rope), optimizer=ADAMW, filter=training.trainable_only("layers.attn.*")
    )
    ours.restore(params_from=tmp_path / "model")  # a warning would be an error
    assert same(nn.partition(model)[0], nn.partition(ours.model)[0])
    with pytest.raises(ValueError, match="has a different model"):
        trainer().restore(params_from=tmp_path / "model")


def saved(directory, *, base=None, **options):
    """A trainer whose state before the first step is in a checkpoint."""
    source = trainer(checkpointer=checkpoint.Checkpointer(directory, base=base), **options)
    source.save()
    source.checkpointer.close()
    return source


@pytest.mark.parametrize("saved_by", ["the same filter", "another filter"])
def test_parameters_from_a_checkpoint_are_those_of_frozen_layers_too(tmp_path, saved_by):
    """Without this, a run that trains a part continues on a backbone of random numbers."""
    part = training.trainable_only("layers.*")
    source = saved(tmp_path, filter=part if saved_by == "the same filter" else None)
    ours = trainer(lambda: tiny.Bigram(rngs=nnx.Rngs(1)), filter=part)
    ours.restore(params_from=tmp_path)
    want, restored = nn.variables(source.model), nn.variables(ours.model)
    assert want.keys() == restored.keys()
    assert all(np.array_equal(value.get_value(), restored[path].get_value()) for path, value in want.items())


def test_parameters_of_a_checkpoint_without_its_base_need_that_base(tmp_path):
    part = training.trainable_only("layers.*")
    saved(tmp_path, base="a/base", filter=part)
    trainer(filter=part).restore(params_from=tmp_path)
    other = trainer(lambda: tiny.Bigram(rngs=nnx.Rngs(1)), filter=part)
    with pytest.raises(ValueError, match=r"was trained on the base in a/base .* build the model from that base"):
        other.restore(params_from=tmp_path)


def test_an_evaluation_before_training_is_of_the_newest_checkpoint(tmp_path):
    begin = lambda: trainer(
        checkpointer=checkpoint.Checkpointer(tmp_path), evaluation=training.Evaluation(tiny.Loader(1), every=100)
    )
    want = begin().fit(3)["eval/loss"]
    again = begin()
    assert again.evaluate()["eval/loss"] == want and again.step == 3


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


def test_a_run_resumes_from_its_local_tier(tmp_path):
    def begin(name):
        near = checkpoint.Local(tmp_path / name / "near", every=1)
        return trainer(checkpointer=checkpoint.Tiers(near, checkpoint.Checkpointer(tmp_path / name / "far", every=2)))

    want = begin("untouched").fit(3)["loss"]
    begin("killed").fit(2)
    shutil.rmtree(tmp_path / "killed" / "far" / "2")
    again = begin("killed")
    assert "resumed after step 2" in again.restore()
    assert again.fit(3)["loss"] == want and again.checkpointer.tiers[0].steps() == [3]
