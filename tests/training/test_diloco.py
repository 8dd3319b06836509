"""DiLoCo: against data parallelism and a formula in numpy; no traffic between meetings; resumed as uninterrupted."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib import checkpoint, ops, sharding, training
from tests.nn.tiny import filled
from tests.training import tiny

ROWS, LENGTH = 8, 8
INNER, ADAMW = optax.sgd(0.1), training.adamw(1e-2)
PLAIN = optax.sgd(1.0)  # an outer step that takes the replicas' mean
PAIR = training.DiLoCo(replicas=2, every=2)


@pytest.fixture(scope="module")
def model():
    return filled(lambda: tiny.Bigram(kinds=4, rngs=nnx.Rngs(0)))


@pytest.fixture(autouse=True)
def _shared_steps(monkeypatch):
    """Equal settings share their programs, also those of Trainers."""
    tiny.share_steps(monkeypatch)
    monkeypatch.setattr(training.DiLoCo, "wrap", WRAP)


WRAP = functools.cache(training.DiLoCo.wrap)


def batches(count):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 32, (count, ROWS, LENGTH + 1)).astype(np.int32)
    return [{"tokens": jnp.asarray(x[:, :-1]), "targets": jnp.asarray(x[:, 1:])} for x in tokens]


@functools.cache
def make_step(optimizer):
    return training.make_train_step(training.NextToken(), optimizer, dtype=jnp.float32, router_bias_update_rate=0)


def run(diloco, model, data, optimizer=INNER):
    state = diloco.init(training.make_state(training.copy_model(model), optimizer))
    step = diloco.wrap(make_step(optimizer))
    losses = []
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_equal(ours, theirs, **options):
    assert ours.keys() == theirs.keys()
    for path in ours:
        np.testing.assert_allclose(ours[path], theirs[path], err_msg=path, **options)


def test_meeting_at_every_step_is_data_parallelism(model):
    """Averaged moments too: the mean of traces, which are linear in the gradients, is that of the mean gradient."""
    optimizer, data = optax.sgd(0.1, momentum=0.9), batches(2)
    diloco = training.DiLoCo(replicas=4, every=1, outer=PLAIN, average_moments=True)
    state, losses = run(diloco, model, data, optimizer)
    plain, step = training.make_state(training.copy_model(model), optimizer), training.jit_step(make_step(optimizer))
    for batch, loss in zip(data, losses, strict=True):
        plain, metrics = step(plain, batch)
        assert loss == pytest.approx(float(metrics["loss"]), abs=1e-6)
    assert_equal(state.trainable, plain.trainable, atol=1e-6)
    replicas, trace = (
        optax.tree_utils.tree_get(opt_state, "trace") for opt_state in (state.opt_state.inner, plain.opt_state)
    )
    assert_equal({path: x[3] for path, x in replicas.items()}, trace, atol=1e-6)
    with pytest.raises(ValueError, match="needs delay=0"):
        training.DiLoCo(replicas=2, every=2, delay=1, average_moments=True)


def numpy_diloco(model, data, diloco, rate, momentum):
    """Each replica by itself with a plain step, and the outer steps in numpy."""
    step = jax.jit(make_step(INNER))
    states = [training.make_state(model, INNER) for _ in range(diloco.replicas)]
    stacked = {path for path in states[0].trainable if path.startswith("layers.")}
    outer = {path: np.asarray(x, np.float64) for path, x in states[0].trainable.items()}
    trace = {path: np.zeros_like(x) for path, x in outer.items()}
    for t, batch in enumerate(data, 1):
        rows = [jax.tree.map(lambda x, r=r: np.split(x, diloco.replicas)[r], batch) for r in range(diloco.replicas)]
        states = [step(state, part)[0] for state, part in zip(states, rows, strict=True)]
        for n, sends, takes in diloco.meetings(t):
            where = {
                path: slice(n, None, diloco.fragments) if path in stacked else slice(None)
                for path in outer
                if path in stacked or n == 0
            }
            for path, part in where.items():
                if sends:
                    gone = outer[path][part] - np.mean([np.asarray(s.trainable[path])[part] for s in states], axis=0)
                    trace[path][part] = gone + momentum * trace[path][part]
                    outer[path][part] -= rate * (gone + momentum * trace[path][part])
                if takes:
                    for r, state in enumerate(states):
                        local = np.array(state.trainable[path])
                        local[part] = (1 - diloco.mix) * outer[path][part] + diloco.mix * local[part]
                        changed = state.trainable | {path: jnp.asarray(local, jnp.float32)}
                        states[r] = dataclasses.replace(state, trainable=changed)
    return outer, states


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.full), {"fragments": 2, "delay": 1, "mix": 0.25}],
    ids=["whole", "streaming"],
)
def test_three_meetings_are_those_of_numpy(model, options):
    diloco = training.DiLoCo(replicas=2, every=2, **options)
    data = batches(6 + options.get("delay", 0))
    state, _ = run(diloco, model, data)
    outer, replicas = numpy_diloco(model, data, diloco, 0.7, 0.9)
    assert_equal(state.trainable, outer, atol=1e-6)
    for r, replica in enumerate(replicas):
        assert_equal({path: x[r] for path, x in state.opt_state.params.items()}, replica.trainable, atol=1e-6)


@pytest.fixture(scope="module")
def exact(model):
    return run(PAIR, model, batches(2))[0].trainable


@pytest.mark.parametrize(
    ("dtype", "step"),
    [
        ("int8", 1 / 127),
        ("float8_e4m3fn", 2**-3),
        pytest.param("int4", 1 / 7, marks=pytest.mark.full),
        pytest.param("bfloat16", 2**-8, marks=pytest.mark.full),
    ],
)
def test_what_replicas_send_may_be_narrow(model, exact, dtype, step):
    narrow = run(training.DiLoCo(replicas=2, every=2, dtype=dtype), model, batches(2))[0].trainable
    start = training.make_state(model, INNER).trainable
    for path in exact:
        moved = np.abs(exact[path] - start[path]).max()
        # Each number is off by at most half a step.
        assert 0 < np.abs(narrow[path] - exact[path]).max() <= step * moved or not moved, path


@pytest.mark.parametrize("attends", [False, pytest.param(True, marks=pytest.mark.full)], ids=["mlps", "llama"])
def test_on_a_mesh_nothing_crosses_the_slow_network_between_meetings(model, attends):
    if attends:
        model = tiny.llama(num_layers=4, head_dim=8, rope=ops.Rope(8, max_length=16))
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    layout, data = sharding.Layout(mesh, sharding.FSDP_TP), batches(4)
    alone, losses = run(PAIR, model, data, ADAMW)
    with sharding.use(layout):
        state = PAIR.init(training.make_state(training.copy_model(model, layout), ADAMW))
        step = PAIR.wrap(make_step.__wrapped__(ADAMW))  # another layout, another step
        text = step.lower(state, training.shard_batch(data[0], layout)).compile().as_text() or ""
        for batch, loss in zip(data, losses, strict=True):
            state, metrics = step(state, training.shard_batch(batch, layout))
            assert float(metrics["loss"]) == pytest.approx(loss, abs=1e-4)
    assert_equal(state.trainable, alone.trainable, atol=2e-4)
    # Devices 0 to 3 are the first replica's.
    groups = re.findall(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\[[^ ]*)", text)
    assert groups
    for group in groups:
        assert all(len({device // 4 for device in members}) == 1 for members in devices(group)), group


def devices(text):
    """Returns the groups of devices of a collective, from both of XLA's spellings."""
    if text.startswith("{"):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]
    (shape, dims, order) = re.findall(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)[0]
    grid = np.arange(8).reshape([int(n) for n in dims.split(",")])
    grid = grid.transpose([int(n) for n in order.split(",")]) if order else grid
    return grid.reshape([int(n) for n in shape.split(",")]).tolist()


def test_a_run_resumed_between_meetings_is_the_uninterrupted_one(model, tmp_path):
    diloco = training.DiLoCo(replicas=2, every=3, fragments=3, delay=1)

    def train(steps, directory):
        trainer = training.Trainer(
            model, ADAMW, batches(8), diloco=diloco, checkpointer=checkpoint.Checkpointer(directory), dtype=jnp.float32
        )
        trainer.fit(steps)
        return trainer.state

    uninterrupted = train(8, tmp_path / "uninterrupted")
    train(4, tmp_path / "parts")
    resumed = train(8, tmp_path / "parts")
    for a, b in zip(jax.tree.leaves(uninterrupted), jax.tree.leaves(resumed), strict=True):
        assert np.array_equal(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a,
                              jax.random.key_data(b) if jnp.issubdtype(b.dtype, jax.dtypes.prng_key) else b)  # fmt: skip

    begun = training.Trainer(model, ADAMW, batches(8), diloco=diloco, dtype=jnp.float32)
    begun.restore(params_from=tmp_path / "parts")
    params = {path: [x, x] for path, x in resumed.trainable.items()}
    assert_equal(begun.state.opt_state.params, params)
    begun.fit(1)
    with pytest.raises(ValueError, match="restore before the first step"):
        begun.restore(params_from=tmp_path / "parts")


def test_metrics_are_of_all_replicas_of_a_process(model):
    """A process has two of four replicas, each on two devices, inside the layout of a Trainer."""
    layout = sharding.Layout(sharding.make_mesh(data=4, fsdp=2), sharding.FSDP)
    step = training.DiLoCo(replicas=4, every=2).wrap(make_step(INNER))
    values = {"loss": jnp.array([1.0, 3.0, 5.0, 7.0]), "num_targets": jnp.arange(4), "finite": jnp.arange(4) != 1}

    def here(x):
        shards = jax.device_put(x, NamedSharding(layout.mesh, P("data"))).addressable_shards[:4]
        return types.SimpleNamespace(is_fully_addressable=False, addressable_shards=shards)

    with sharding.use(layout):
        metrics = step.over_here({name: here(x) for name, x in values.items()})
    assert metrics == {"loss": 2, "num_targets": 2, "finite": False}


def test_replicas_come_and_go(model):
    data = batches(2)
    state, _ = run(PAIR, model, data)
    more, grown = PAIR.resized(state, 4)
    step = more.wrap(make_step(INNER))
    for batch in data:
        grown, _ = step(grown, batch)
    fewer, shrunk = more.resized(grown, 1)
    assert fewer.replicas == 1 and {len(x) for x in shrunk.opt_state.params.values()} == {1}
    assert_equal(shrunk.trainable, grown.trainable)


def test_what_cannot_be(model):
    with pytest.raises(ValueError, match="must divide every=5"):
        training.DiLoCo(replicas=2, every=5, fragments=2)
    with pytest.raises(ValueError, match="delay must lie in"):
        training.DiLoCo(replicas=2, every=2, delay=2)
    with pytest.raises(ValueError, match="8 rows does not divide over 3 replicas"):
        run(training.DiLoCo(replicas=3, every=2), model, batches(1))
    with pytest.raises(ValueError, match="average moments of float32"):
        averaged = training.DiLoCo(replicas=2, every=2, average_moments=True)
        averaged.init(training.make_state(training.copy_model(model), training.adamw(1e-2, moments=jnp.float8_e4m3fn)))
