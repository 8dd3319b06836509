"""Mixture of experts on eight devices: results equal one device, and the communication between devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import adapters, nn, quantization, sharding
from maxlib.nn.experts import _parallel as exchange
from tests.nn.experts import DIM, LOSSES, MLP, E, X, call, close, in_float64, inputs, moe, value_and_gradients


def loss_and_gradients(layer, x, valid):
    trainable, rest = nn.partition(layer)

    def loss(trainable, x):
        y, aux = nn.combine(trainable, rest)(x, nn.make_context(*valid.shape, valid=valid))
        return jnp.sum(jnp.sin(y)) + sum(v for k, v in aux.items() if k.startswith("loss/")), (y, aux)

    return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(trainable, x))


def test_eight_devices_equal_one():
    spread = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), sharding.FSDP_TP)
    layer, x = moe(bias=True, losses=LOSSES, weight_order="EIO"), inputs(B=8)
    valid = jnp.arange(7)[None] < jnp.arange(8)[:, None]
    want = loss_and_gradients(layer, x, valid)
    with sharding.use(spread):
        got = loss_and_gradients(jax.device_put(layer, sharding.shardings(layer, spread)), x, valid)
    close(got, want)


SPLIT_EXPERTS = {
    "one on each device": (dict(expert=8), sharding.EP, (1, MLP, DIM)),
    "two on each device": (dict(expert=4, data=2), sharding.EP, (2, MLP, DIM)),
    "in parts": (dict(expert=2, fsdp=2, tensor=2), sharding.PRESETS["ep_tp"], (4, MLP // 2, DIM // 2)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "two on each device" else pytest.mark.full) for name in SPLIT_EXPERTS],
)
def test_experts_split_over_devices_equal_the_loop(name):
    """Values and gradients."""
    degrees, rules, part = SPLIT_EXPERTS[name]
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)), bias=True)
    mesh, x, valid = sharding.make_mesh(**degrees), inputs(B=8), np.arange(7)[None] < np.arange(8)[:, None]
    context = lambda: nn.make_context(*valid.shape, valid=jnp.asarray(valid))
    want = jax.device_get(value_and_gradients(lambda layer, x: layer.reference(x, context()), layer, x))
    layout = sharding.Layout(mesh, rules)
    split = jax.device_put(layer, sharding.shardings(layer, layout))
    assert split.gate.w[...].addressable_shards[0].data.shape == part
    with sharding.use(layout):
        got = value_and_gradients(lambda layer, x: layer(x, context())[0], split, x)
    close(jax.device_get(got), want)


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, fill=jnp.nan
):
    """Emulates `jax.lax.ragged_all_to_all`, which XLA lacks on CPUs: every device gathers everything and takes the rows
    sent to it.
    """
    devices, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    slices = len(input_offsets) // devices
    mine = lambda a: jax.lax.dynamic_slice_in_dim(jax.lax.all_gather(a, axis_name), me * slices, slices, 1)
    start, size, there = (jnp.expand_dims(mine(a), 2) for a in (input_offsets, send_sizes, output_offsets))
    row = jnp.arange(operand.shape[0])[None, None]
    rows = jax.vmap(lambda a, at: a[at])(jax.lax.all_gather(operand, axis_name), (start + row) % operand.shape[0])
    at = jnp.where(row < size, there + row, output.shape[0])
    # What no row is sent to is undefined on accelerators.
    return jnp.full_like(output, fill).at[at.reshape(-1)].set(rows.reshape(-1, *operand.shape[1:]), mode="drop")


FULL = [pytest.param(how, marks=pytest.mark.full) for how in ("dense", "ragged", "ragged in larger buffers")]


@pytest.fixture(params=["ragged in tiles", *FULL])
def exchanging(request, monkeypatch):
    """The rules of an exchange; a ragged one on CPUs, of single rows or of whole tiles however few rows there are, with
    buffers for about equal shares or, as these are too small, for twice as many.
    """
    how, _, words = request.param.partition(" in ")
    if words == "tiles":
        monkeypatch.setattr(exchange, "_tile", lambda choices, num_experts: exchange.TILE)
    if words == "larger buffers":
        monkeypatch.setattr(sharding.ExpertParallel, "even", 0.5)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(exchange, "CAN_RAGGED", ("cpu",))
    return sharding.EP | sharding.ExpertParallel(exchange=how)


def differentiated(run):
    """Of a loss of the results, the value and the gradients."""
    return jax.jit(jax.value_and_grad(lambda m, x: jnp.sum(jnp.sin(run(m, x))), argnums=(0, 1)))


def test_dropless_whether_experts_share_evenly_or_two_get_everything(exchanging):
    """The usual exchange and the one for the worst case, in one program; which one runs is for the data to say."""
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)), bias=True)
    mesh, x = sharding.make_mesh(expert=2, data=2, devices=jax.devices()[:4]), inputs(B=4, T=16)
    layout = sharding.Layout(mesh, exchanging)
    split = jax.device_put(layer, sharding.shardings(layer, layout))
    valid = np.arange(16)[None] < 14 + np.arange(4)[:, None] % 3
    chosen = jax.jit(lambda layer, x: layer.router(x).experts)
    context = lambda: nn.make_context(*valid.shape, valid=jnp.asarray(valid))
    gradients = differentiated(lambda m, x: m(x, context())[0])
    looped = differentiated(lambda m, x: m.reference(x, context()))
    for even in (True, False):
        for experts in (layer, split):
            experts.router.gate.w[...] = (
                experts.router.gate.w[...] * even
            )  # equal scores: the first experts win everywhere
        assert (np.bincount(np.ravel(chosen(layer, x))).max() == 4 * 16) != even
        with sharding.use(layout):
            got = gradients(split, x)
        close(jax.device_get(got), jax.device_get(looped(layer, x)))


def with_nvfp4(layer):
    return quantization.for_training(layer, [quantization.Rule(quantization.TRAINING["nvfp4"])])


def with_dora(layer):
    rules = [adapters.Rule(adapters.LoRA(2, 4, dora=True), kinds=("expert",))]
    return adapters.add(layer, rules, rngs=nnx.Rngs(2))


@pytest.mark.parametrize("change", [with_nvfp4, with_dora])
def test_what_no_row_is_sent_to_changes_nothing(change, monkeypatch):
    """A scale of all rows, and the gradient of an expert's gains, leave it out: it may be NaN."""
    layer = change(moe(mlp_dim=32, make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1))))
    x = inputs(B=4, T=16)
    monkeypatch.setattr(exchange, "CAN_RAGGED", ("cpu",))
    ragged = sharding.EP | sharding.ExpertParallel(exchange="ragged")
    layout = sharding.Layout(sharding.make_mesh(expert=2, data=2, devices=jax.devices()[:4]), ragged)
    trainable, rest = nn.partition(jax.device_put(layer, sharding.shardings(layer, layout)))
    results = []
    for fill in (0.0, jnp.nan):
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", functools.partial(ragged_all_to_all, fill=fill))
        with sharding.use(layout):
            loss = lambda trainable, x: jnp.sum(jnp.sin(nn.combine(trainable, rest)(x)[0]))
            results.append(jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(trainable, x)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def exchanges_of_a_gradient(layer, behind, policy) -> int:
    """Counts the exchanges between devices in the gradient of a rematerialized layer and what is behind it."""

    def loss(layer, x):
        run = lambda x: behind(layer(x, nn.make_context(*x.shape[:2]))[0])
        return jnp.sum(jnp.sin(x + nn.remat.rematerialised(run, nn.remat.remat_policy(policy), prevent_cse=True)(x)))

    with sharding.use(sharding.Layout(sharding.make_mesh(expert=2, devices=jax.devices()[:2]), sharding.EP)):
        return str(jax.jit(jax.grad(loss)).trace(layer, inputs(B=2, T=16)).jaxpr).count("= all_to_all[")


def test_a_norm_behind_experts_does_not_compute_them_again():
    """Its gradient needs the experts' sum; recomputed, tokens would travel a third time."""
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)))
    unit = lambda y: y / jnp.linalg.norm(y, axis=-1, keepdims=True)
    linear, kept, again = (
        exchanges_of_a_gradient(layer, *of) for of in ((lambda y: y, "full"), (unit, "full"), (unit, {}))
    )
    assert 0 < linear == kept < again


def test_a_ragged_exchange_moves_no_more_rows_than_there_are(monkeypatch):
    """As lowered for a TPU: no dense exchange, and what leaves a device is a turn's choices, not padded ones."""
    monkeypatch.setattr(exchange, "CAN_RAGGED", ("cpu",))
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)))
    ragged, x = sharding.EP | sharding.ExpertParallel(exchange="ragged"), inputs(B=8, T=16)
    layout = sharding.Layout(sharding.make_mesh(expert=8), ragged)
    layer = jax.device_put(layer, sharding.shardings(layer, layout))
    with sharding.use(layout):
        traced = jax.jit(jax.grad(lambda m, x: m(x)[0].sum(), argnums=(0, 1))).trace(layer, x)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    exchanges = re.findall(r"@ragged_all_to_all\(.*: \(tensor<(\d+)x16xf32>, tensor<(\d+)x16xf32>", text)
    choices = 16 * X
    rows = {(out, choices) for out in (choices // 2, choices // 8)}  # two turns, or as many as there are devices
    rows |= {(choices // 2, 5 * choices // 8)}  # two turns with about equal shares
    assert {tuple(map(int, pair)) for pair in exchanges} == rows | {pair[::-1] for pair in rows}
    assert "all_to_all" not in text.replace("ragged_all_to_all", "")


def test_an_exchange_that_cannot_be_is_said():
    layer, ragged = moe(), sharding.EP | sharding.ExpertParallel(exchange="ragged")
    layout = sharding.Layout(sharding.make_mesh(expert=2, data=4), ragged)
    with sharding.use(layout), pytest.raises(ValueError, match="ragged on tpu and gpu, not on cpu"):
        jax.eval_shape(layer, inputs(B=8))
    with pytest.raises(ValueError, match="exchange must be 'ragged', 'dense', .* got 'some'"):
        sharding.ExpertParallel(exchange="some")


@pytest.mark.parametrize(
    ("B", "degrees"),
    [
        (1, dict(data=4, tensor=2)),
        pytest.param(4, dict(data=1, tensor=8), marks=pytest.mark.full),
    ],
)
def test_what_does_not_divide_stays_whole(B, degrees):
    layer, x = moe(bias=True), inputs(B=B)
    assert MLP % 8
    with sharding.use(sharding.Layout(sharding.make_mesh(**degrees), sharding.TP)):
        got = call(layer, x)
    close(jax.device_get(got[0]), in_float64(layer, x))


def test_no_activations_cross_the_data_axis():
    """Each device sorts its own tokens: only weights are gathered over the mesh."""
    mesh, x, layer = sharding.make_mesh(fsdp=8), inputs(B=8, T=256), moe()
    layout = sharding.Layout(mesh, sharding.FSDP)
    with sharding.use(layout):
        layer = jax.device_put(layer, sharding.shardings(layer, layout))
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp")))
        step = jax.jit(jax.grad(lambda m, x: m(x)[0].sum(), argnums=(0, 1)))
        text = step.lower(layer, x).compile().as_text()
    moved = re.findall(
        r"= \(?\w+\[([\d,]*)\].* (?:all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text
    )
    sizes = [math.prod(int(n) for n in shape.split(",")) for shape in moved]
    assert len(sizes) >= 3 and max(sizes) <= E * MLP * DIM < x.size / 8


def test_each_device_sums_the_gradient_of_biases_of_its_own_tokens():
    """In the program itself, as XLA for TPUs would gather the tokens of all devices for it."""
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)), bias=True)
    layout = sharding.Layout(sharding.make_mesh(expert=8), sharding.EP)
    with sharding.use(layout):
        layer = jax.device_put(layer, sharding.shardings(layer, layout))
        text = jax.jit(jax.grad(lambda m, x: m(x)[0].sum())).lower(layer, inputs(B=8)).as_text()
    scattered = re.findall(r"\}\) : \(tensor<(\S+)xf32>\) -> tensor<(\S+)xf32>", text)
    assert (f"8x{DIM}", f"1x{DIM}") in scattered


def test_tokens_travel_to_their_experts():
    """No expert's weights move, nor more tokens than one device has: they go in as many turns as there are devices."""
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)))
    mesh, x = sharding.make_mesh(expert=8), inputs(B=8, T=16)
    layout = sharding.Layout(mesh, sharding.EP | {"embed": None})
    layer = jax.device_put(layer, sharding.shardings(layer, layout))
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("expert")))
    with sharding.use(layout):
        run = jax.jit(lambda m, x: sharding.constrain(m(x)[0], "batch", "seq", None))
        text = run.lower(layer, x).compile().as_text()
    collectives = re.findall(r"= (.*?) (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text)
    assert {kind for shape, kind in collectives if "f32" in shape and f",{DIM}]" in shape} == {"all-to-all"}
    assert not any(f"{MLP},{DIM}]" in shape or f"{DIM},{MLP}]" in shape for shape, _ in collectives)


@pytest.mark.parametrize(
    ("platform", "axes", "how", "ragged"),
    [
        ("tpu", {"expert": 2}, None, True),
        ("tpu", {"expert": 2, "stage": 2}, None, False),  # under the vmap of a pipeline's stages
        ("tpu", {"expert": 2}, "dense", False),
        ("gpu", {"expert": 2}, None, False),
        ("gpu", {"expert": 2}, "ragged", True),
    ],
)
def test_the_platform_or_the_layout_says_how_tokens_travel(platform, axes, how, ragged, monkeypatch):
    monkeypatch.setattr(exchange, "current_device", lambda: (platform, "any"))
    assert exchange.is_ragged() is (platform == "tpu")  # without a layout
    strategy = sharding.FSDP | sharding.ExpertParallel(exchange=how)
    strategy |= sharding.strategies.Pipeline(microbatches=2) if "stage" in axes else sharding.FSDP
    with sharding.use(sharding.Layout(sharding.make_mesh(fsdp=-1, **axes), strategy)):
        assert exchange.is_ragged() is ragged
