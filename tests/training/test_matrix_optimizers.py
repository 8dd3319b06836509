"""Muon and its variants, SOAP and schedule-free: twenty steps as in other libraries, and Muon spread over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import nn, sharding, training
from maxlib.plan._hlo import read_costs
from maxlib.training import _optimizers as optimizers
from tests.training import optimizer_goldens as goldens
from tests.training import tiny


class Matrix(nnx.Module):
    def __init__(self, rngs):
        self.proj = nn.Einsum("...I,OI->...O", (goldens.SIZE, goldens.SIZE), ("mlp", "embed"), rngs=rngs)

    def __call__(self, x, ctx, cache):
        return x + self.proj(x), cache, {}


@functools.cache
def stack():
    """The shapes of the other libraries' matrices as one stack."""
    return jax.eval_shape(lambda: nn.Stack(lambda _, rngs: Matrix(rngs), goldens.LAYERS, rngs=nnx.Rngs(0)))


def trained(optimizer):
    """The matrices after as many steps as those of the other libraries, all parameters, and the optimizer's state."""
    (path,) = nn.partition(stack())[0]
    params = {path: jnp.asarray(goldens.start())}  # layers, outputs, inputs
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(goldens.STEPS):
        grads = goldens.gradient(np.asarray(params[path]), step)
        updates, state = update({path: jnp.asarray(grads)}, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params[path]), params, state


def muon(**options):
    return training.muon(goldens.RATE, model=stack(), clip=None, **options)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamuon", lambda: muon(normalize="elements", nesterov=False, weight_decay=0.1)),
        ("normuon", lambda: muon(normalize="rows", nesterov=False, weight_decay=0.0)),
        ("soap", lambda: training.soap(goldens.RATE, model=stack(), precondition_every=5, weight_decay=0.0, clip=None)),
    ],
)
@pytest.mark.parametrize(("wide", "bound"), [(True, 1e-6), (False, 2e-6)], ids=["float64", "float32"])
def test_twenty_steps_are_those_of_pytorch_optimizer(name, make, wide, bound):
    """Twenty steps amplify the rounding of float32."""
    want = np.load(goldens.FILE)[name]
    assert np.abs(want - goldens.start()).max() > 0.08
    with jax.enable_x64(wide):
        np.testing.assert_allclose(trained(make())[0], want, rtol=0, atol=bound)


def test_twenty_steps_of_muon_are_those_of_optax():
    dims = {path: optax.contrib.MuonDimensionNumbers(*d) for path, d in optimizers.muon_dimensions(stack()).items()}
    theirs = optax.contrib.muon(goldens.RATE, consistent_rms=0.2, weight_decay=0.1, muon_weight_dimension_numbers=dims)
    np.testing.assert_allclose(trained(muon())[0], trained(theirs)[0], rtol=0, atol=1e-6)


def test_schedule_free_is_evaluated_and_exported_at_the_average():
    """The state's model is where gradients are taken; the average is the point that schedule-free promises."""
    want = np.load(goldens.FILE)
    model = nn.combine(*nn.partition(jax.jit(lambda: nn.Stack(lambda _, rngs: Matrix(rngs), 3, rngs=nnx.Rngs(0)))()))
    with jax.enable_x64(True):
        adam = optax.adamw(goldens.RATE, b1=0.0, b2=0.95, weight_decay=0.0)
        w, params, opt_state = trained(optax.contrib.schedule_free(adam, goldens.RATE, b1=0.9))
        step, key = jnp.zeros((), jnp.int32), jax.random.key(0)
        state = training.TrainState(params, nn.partition(model)[1], opt_state, step, key)
        (average,) = nn.partition(training.ema_model(state))[0].values()
    np.testing.assert_allclose(w, want["schedule_free"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(average, want["schedule_free_average"], rtol=0, atol=1e-12)
    assert np.abs(np.asarray(average) - w).max() > 1e-3


def random_like(params):
    random = np.random.default_rng(0)
    return {path: random.standard_normal(p.shape, np.float32) for path, p in params.items()}


def test_heads_may_be_matrices_of_their_own():
    model = jax.eval_shape(tiny.llama)
    params = {path: jnp.zeros(p.shape) for path, p in nn.partition(model)[0].items()}
    grads = random_like(params)
    optimizer = training.muon(0.1, model=model, split_heads=True, weight_decay=0.0, clip=None)
    updates, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, params)
    for name in ("q", "k", "v", "o"):
        u = np.asarray(updates[f"layers.groups.0.0.attn.{name}.w"])  # [L, N, H, D], of o [L, D, N, H]
        matrices = u.reshape(-1, *u.shape[2:]) if name != "o" else u.reshape(u.shape[0], u.shape[1], -1)
        values = np.linalg.svd(matrices, compute_uv=False) / (0.1 * 0.2 * max(matrices.shape[1:]) ** 0.5)
        assert np.all(np.abs(values - 0.95) < 0.35), name


@pytest.fixture
def layout():
    return sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2))


def collectives(compiled, layout):
    costs = read_costs(compiled.as_text(), dict(layout.mesh.shape))
    by_kind = {}
    for collective in costs.collectives:
        by_kind[collective.kind] = by_kind.get(collective.kind, 0) + collective.bytes
    return by_kind


@pytest.mark.parametrize("normalize", [None, pytest.param("rows", marks=pytest.mark.full)])
def test_each_matrix_is_orthogonalized_on_one_device(layout, normalize):
    """The update is that of one device. Matrices travel by all-to-alls there and back, and nothing is gathered."""
    build = jax.jit(lambda: tiny.Bigram(32, kinds=8, rngs=nnx.Rngs(0)))
    model = jax.eval_shape(build)
    optimizer = training.muon(0.1, model=model, clip=None, normalize=normalize)
    params, _ = nn.partition(build())
    grads = random_like(params)
    want, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, params)
    with sharding.use(layout):
        state = training.make_state(training.copy_model(build(), layout), optimizer)
        split = {path: jax.device_put(grads[path], p.sharding) for path, p in state.trainable.items()}
        update = jax.jit(optimizer.update).lower(split, state.opt_state, state.trainable).compile()
        got, _ = update(split, state.opt_state, state.trainable)
    for path, x in want.items():
        np.testing.assert_allclose(got[path], x, rtol=0, atol=1e-5, err_msg=path)
    dims = optimizers.muon_dimensions(model)
    local = sum(params[path].nbytes for path in dims) / 8
    moved = collectives(update, layout)
    # There and back, over each of the two axes: four times a device's part.
    assert moved.pop("all-to-all") == pytest.approx(4 * local, rel=0.01)
    # NorMuon also sums squares: a number for each row of a matrix, and one for each matrix.
    assert moved.keys() <= {"all-reduce"} and sum(moved.values()) < (0.01 if normalize is None else 0.15) * local, moved


@pytest.mark.full
def test_a_step_sends_hardly_more_than_that_of_adamw():
    layout = sharding.Layout(sharding.make_mesh(fsdp=8), sharding.FSDP)
    build = lambda: tiny.llama(dim=64, mlp_dim=192, num_heads=8, num_layers=8)
    model, sent = jax.eval_shape(build), {}
    for name, optimizer in {"adamw": training.adamw(1e-3), "muon": training.muon(1e-3, model=model)}.items():
        with sharding.use(layout):
            state = training.make_state(training.copy_model(build(), layout), optimizer)
            step = training.jit_step(training.make_train_step(training.NextToken(), optimizer))
            batch = training.shard_batch(tiny.batch(rows=8, length=32), layout)
            sent[name] = collectives(step.lower(state, batch).compile(), layout)
    totals = {name: sum(kinds.values()) for name, kinds in sent.items()}
    assert totals["muon"] <= 1.2 * totals["adamw"], sent


def test_dion_is_the_algorithm_of_its_paper():
    """In float64: power iteration, error feedback, and updates with orthogonal factors."""
    rank, beta = 3, 0.95
    optimizer = training.dion(goldens.RATE, model=stack(), rank=rank, beta=beta, weight_decay=0.1)
    (path,) = nn.partition(stack())[0]
    basis = optimizer.init({path: jnp.zeros(goldens.start().shape)})
    q = np.asarray(optax.tree.get(basis, "basis")[path], np.float64)
    w, momentum = goldens.start().astype(np.float64), np.zeros(goldens.start().shape)
    for step in range(goldens.STEPS):
        momentum += goldens.gradient(w, step)
        p = np.stack([np.linalg.qr(m @ basis)[0] for m, basis in zip(momentum, q, strict=True)])
        r = momentum.swapaxes(1, 2) @ p
        momentum -= (1 - beta) * p @ r.swapaxes(1, 2)
        q = r / (np.linalg.norm(r, axis=1, keepdims=True) + 1e-8)
        w = w - goldens.RATE * (p @ q.swapaxes(1, 2) + 0.1 * w)
    np.testing.assert_allclose(trained(optimizer)[0], w, rtol=0, atol=1e-6)
