"""Pipelines: results equal one device's, and only neighbouring stages communicate."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding, training
from maxlib.models import deepseek, gemma2, gemma3, gpt2, mixtral
from maxlib.models import llama as llama_family
from maxlib.plan._hlo import read_costs
from maxlib.training._pipelined_gradient import pipelined_gradient
from tests.nn.tiny import LLAMA, filled
from tests.sharding.test_context import batch
from tests.training.tiny import QUICKLY

PP = sharding.Pipeline("stage", microbatches=4)
AROUND = sharding.Pipeline("stage", microbatches=4, repeats=2)


def llama(num_layers=4):
    cfg = dataclasses.replace(LLAMA, num_layers=num_layers, vocab=64)
    return llama_family.Llama(cfg, rngs=nnx.Rngs(0))


def gemma(num_layers=8):
    size = {
        "vocab": 64,
        "num_layers": num_layers,
        "dim": 32,
        "mlp_dim": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    return gemma2.Gemma2(gemma2.Config(**size, window=9, rope=ops.Rope(8)), rngs=nnx.Rngs(0))


def experts(num_layers=5, num_dense=1):
    """Dense layers, then those with experts, and latent attention."""
    size = {
        "vocab": 64,
        "num_layers": num_layers,
        "num_dense": num_dense,
        "dim": 32,
        "mlp_dim": 48,
        "expert_dim": 24,
        "num_heads": 4,
    }
    latent = {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "v_dim": 8, "rope": ops.Rope(4)}
    routing = {"num_experts": 4, "num_shared": 1, "top_k": 2, "renormalize": True}
    return deepseek.DeepSeek(deepseek.Config(version=3, **size, **latent, **routing), rngs=nnx.Rngs(0))


def mixture(num_layers=4):
    size = {"vocab": 64, "dim": 32, "expert_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    cfg = mixtral.Config(**size, num_layers=num_layers, rope=ops.Rope(8), num_experts=4, top_k=2)
    return mixtral.Mixtral(cfg, rngs=nnx.Rngs(0))


def rows(count: int):
    return jax.tree.map(lambda a: np.concatenate([a] * (count // 2)), batch())


@functools.partial(jax.jit, static_argnames="remat")
def loss_and_gradients(params, rest, data, remat=None):
    loss = lambda p: training.NextToken()(nn.combine(p, rest), data, dtype=jnp.float32, remat=remat)[0]
    return jax.value_and_grad(loss)(params)


ENOUGH = {"batches over data too": 16}  # each of four microbatches has a row for each of four devices
VOCAB = {"vocab": "stage", "act_vocab": "stage"}
LONG = {"stage": 2, "context": 2, "expert": 2}
CASES = {
    "dense": (llama, {"stage": 4, "fsdp": 2}, sharding.FSDP | PP, None),
    "uneven, twice around": (lambda: llama(7), {"stage": 4, "fsdp": 2}, sharding.FSDP | AROUND, "full"),
}
MORE = {
    "a period of two": (gemma, {"stage": 4, "tensor": 2}, sharding.TP | PP, "full"),
    "a lead, experts, long sequences": (lambda: experts(6, 2), LONG, sharding.EP | sharding.CP_RING | PP, None),
    "batches over data too": (llama, {"stage": 2, "data": 2, "fsdp": 2}, sharding.FSDP | PP, None),
    "uneven, twice around, data": (lambda: llama(7), {"stage": 4, "data": 2}, sharding.DP | AROUND, "full"),
    "uneven, experts, long sequences": (lambda: experts(6), LONG, sharding.EP | sharding.CP_RING | PP, None),
    "a prefix, experts, long sequences, twice around": (experts, LONG, sharding.EP | sharding.CP_RING | AROUND, None),
    "uneven, a period of two": (lambda: gemma(10), {"stage": 4, "tensor": 2}, sharding.FSDP_TP | PP, "minimal"),
    "a period of two, twice around": (lambda: gemma(16), {"stage": 4, "tensor": 2}, sharding.TP | AROUND, "minimal"),
}
MORE["a vocabulary over stages"] = (llama, {"stage": 4, "fsdp": 2}, sharding.FSDP | PP | VOCAB, "full")


# By default one goes around twice; 1F1B once, below, with positions that are learned.
BY_DEFAULT = "uneven, twice around, data"
TWICE = [pytest.param(case, marks=() if case == BY_DEFAULT else pytest.mark.full) for case in CASES | MORE]


@pytest.mark.parametrize("case", TWICE)
def test_loss_and_gradients_are_those_of_one_device(case):
    build, degrees, rules, remat = (CASES | MORE)[case]
    model, data = filled(build), rows(ENOUGH.get(case, 8))
    want = loss_and_gradients(*nn.partition(model), data)
    mesh = sharding.make_mesh(**degrees)
    layout = sharding.Layout(mesh, rules)
    spread = jax.device_put(model, sharding.shardings(model, layout))
    with sharding.use(layout):
        arguments = *nn.partition(spread), data
        program = loss_and_gradients.lower(*arguments, remat=remat).compile(compiler_options=QUICKLY)
        got = program(*arguments)
    if case == BY_DEFAULT:
        assert_summed_once(program, mesh, want[1])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for path, gradient in want[1].items():
        np.testing.assert_allclose(got[1][path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)
    weight = nn.variables(spread)["layers.groups.0.0.attn.o.w"].get_value()
    others = {axis for place in layout.spec("heads", "head_dim", "embed") for axis in np.ravel(place or ())}
    split = mesh.shape["stage"] * math.prod(mesh.shape[axis] for axis in others)
    assert weight.addressable_shards[0].data.size == weight.size // split


def planned(num_layers, rules):
    """A model on four stages, without its arrays."""
    mesh = sharding.make_mesh(stage=4, devices=jax.devices()[:4])
    model = jax.eval_shape(lambda: llama(num_layers))
    placed = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    layout = sharding.Layout(mesh, rules)
    return layout, jax.tree.map(placed, model, sharding.shardings(model, layout))


def forward_costs(num_layers, rules):
    """Counts the communication between stages in a forward pass, by kind."""
    layout, model = planned(num_layers, rules)
    with sharding.use(layout):
        hidden = jax.jit(lambda model, tokens: model(tokens, dtype=jnp.float32).hidden)
        program = hidden.lower(model, rows(8)["tokens"]).compile(compiler_options=QUICKLY)
    collectives = read_costs(program.as_text(), dict(layout.mesh.shape)).collectives
    return {collective.kind: collective for collective in collectives if collective.axes}


ROWS = 2 * 32 * 32 * 4  # bytes of a microbatch: rows x T x D


def test_only_activations_move():
    """Weights stay where they are. Rows that the stages share come to all of them once; every tick activations move on
    by one stage, at the end those of the last to all."""
    costs = forward_costs(4, sharding.DP | PP)
    assert costs.keys() == {"collective-permute", "all-reduce", "all-gather"}
    assert costs["all-gather"].runs == 1 and costs["all-gather"].bytes == 4 * ROWS
    assert costs["collective-permute"].runs == 7 and costs["collective-permute"].bytes == 7 * ROWS
    assert costs["all-reduce"].runs == 1 and costs["all-reduce"].bytes == 4 * ROWS


def test_twice_around_layers_travel_once():
    """As often as there are stacked matrices and scales, to the stages that compute them."""
    costs = forward_costs(7, sharding.DP | AROUND)
    assert costs.keys() == {"collective-permute", "all-reduce", "all-gather", "all-to-all"}
    assert costs["all-gather"].runs == 1 and costs["all-gather"].bytes == 4 * ROWS
    assert costs["collective-permute"].runs == 11 and costs["collective-permute"].bytes == 11 * ROWS
    assert costs["all-reduce"].runs == 1 and costs["all-reduce"].bytes == 4 * ROWS
    model = jax.eval_shape(lambda: llama(7))
    stacked = [x.get_value() for path, x in nn.variables(model).items() if ".groups.0.0." in path]
    assert costs["all-to-all"].runs == len(stacked)
    assert costs["all-to-all"].bytes == sum(x.size for x in stacked) * 4 * 8 / 7 / 4  # one of 8 places is idle


@pytest.mark.full
@pytest.mark.parametrize("remat", [None, "full"])
def test_going_around_takes_no_more_memory(remat):
    """The backward pass finds each chunk's weights where they are, not in every tick; and ticks are shorter."""

    def temporaries(rules):
        layout, model = planned(8, rules)
        with sharding.use(layout):
            program = loss_and_gradients.lower(*nn.partition(model), rows(8), remat=remat).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(sharding.DP | AROUND) < 1.1 * temporaries(sharding.DP | PP)


@pytest.mark.filterwarnings("ignore:nothing is split over")
def test_what_does_not_fit_is_said():
    mesh = sharding.make_mesh(stage=4, data=2)
    layout = sharding.Layout(mesh, PP)
    with pytest.raises(ValueError, match="3 repeats of layers cannot be split into 4 stages"):
        sharding.init_sharded(lambda: llama(3), layout)
    with pytest.raises(ValueError, match=r"up to 3 of 9 repeats .* repeats=2 .* use one of \[1, 3\]"):
        sharding.init_sharded(lambda: llama(9), sharding.Layout(mesh, AROUND))
    trace = lambda num_layers, rows: jax.eval_shape(lambda: llama(num_layers)(jnp.zeros((rows, 8), jnp.int32)))
    with sharding.use(layout), pytest.raises(ValueError, match="6 rows cannot be split into 4 microbatches"):
        trace(4, 6)
    message = r"each of the 2 devices of \('data',\) that share it, got 1 rows: use a batch of at least 8 rows"
    with sharding.use(sharding.Layout(mesh, sharding.DP | PP)), pytest.raises(ValueError, match=message):
        trace(4, 4)
    six = sharding.Pipeline("stage", microbatches=6, repeats=2)
    with sharding.use(sharding.Layout(mesh, six)), pytest.raises(ValueError, match="a multiple of the 4 stages, got 6"):
        trace(8, 6)
    with pytest.raises(ValueError, match="at least one microbatch"):
        sharding.Pipeline("stage", microbatches=0)
    with pytest.raises(ValueError, match="one repeat, got 1 and 0"):
        sharding.Pipeline("stage", microbatches=1, repeats=0)
    sharding.Pipeline("stage", microbatches=1, repeats=1)


@pytest.mark.full
@pytest.mark.parametrize("build", [mixture, experts])
def test_experts_report_the_mean_over_microbatches(build):
    model, tokens = filled(build), rows(8)["tokens"]
    run = jax.jit(lambda model, tokens: model(tokens, dtype=jnp.float32).aux)
    want = run(model, tokens)
    mesh = sharding.make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    with sharding.use(sharding.Layout(mesh, sharding.DP | PP)):
        got = run(model, tokens)
    assert want.keys() == got.keys()
    np.testing.assert_allclose(got["moe/load"], want["moe/load"], atol=1e-6)


@functools.partial(jax.jit, static_argnames="remat")
def one_f_one_b(params, rest, data, remat=None):
    loss = training.NextToken()
    grads, mean, stats = pipelined_gradient(loss, params, rest, data, jax.random.key(0), dtype=jnp.float32, remat=remat)
    return mean * stats.num_targets, jax.tree.map(lambda g: g * stats.num_targets, grads), stats.sums


@pytest.mark.full
@pytest.mark.parametrize("case", CASES | MORE)
def test_one_f_one_b_gives_the_loss_and_gradients_of_one_device(case):
    build, degrees, rules, remat = (CASES | MORE)[case]
    model, data = filled(build), rows(ENOUGH.get(case, 8))
    data["targets"][:3, :9] = -1  # microbatches with other numbers of targets
    want = loss_and_gradients(*nn.partition(model), data)
    mesh = sharding.make_mesh(**degrees)
    layout = sharding.Layout(mesh, rules)
    spread = jax.device_put(model, sharding.shardings(model, layout))
    with sharding.use(layout):
        got = one_f_one_b(*nn.partition(spread), data, remat=remat)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert got[1].keys() == want[1].keys()
    for path, gradient in want[1].items():
        np.testing.assert_allclose(got[1][path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)


def test_stages_choose_together_how_tokens_travel():
    """One of both ways is computed; a choice of each stage by itself would be a select of both."""
    layout = sharding.Layout(sharding.make_mesh(stage=2, expert=4), sharding.EP | PP)
    model = jax.eval_shape(mixture)
    with sharding.use(layout):
        hidden = jax.jit(lambda model, tokens: model(tokens, dtype=jnp.float32).hidden)
        assert hidden.lower(model, rows(8)["tokens"]).as_text().count("stablehlo.case") == 1


def assert_summed_once(program, mesh, gradients) -> None:
    """Gradients are summed over data as often as there are arrays, and not in every tick."""
    sums = [
        collective
        for collective in read_costs(program.as_text(), dict(mesh.shape)).collectives
        if "data" in collective.axes
    ]
    assert {collective.kind for collective in sums} == {"all-reduce"} and sum(
        collective.runs for collective in sums
    ) <= len(gradients) + 4
    assert sum(collective.bytes for collective in sums) < 1.1 * sum(x.size for x in gradients.values()) * 4


def scaled():
    """Vectors that are scaled on entry."""
    size = {"vocab": 64, "num_layers": 2, "dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    ropes = {"rope": ops.Rope(8), "local_rope": ops.Rope(8, 100.0)}
    kinds = {"layer_types": (gemma3.GLOBAL,) * 2, "window": 9}
    return gemma3.Gemma3(gemma3.Config(**size, **ropes, **kinds), rngs=nnx.Rngs(0))


def positioned():
    """Positions that are learned, and added on entry."""
    cfg = gpt2.Config(vocab=64, num_layers=2, dim=32, mlp_dim=48, num_heads=4, num_positions=64)
    return gpt2.GPT2(cfg, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("build", [pytest.param(scaled, marks=pytest.mark.full), positioned])
def test_one_f_one_b_enters_as_the_model_does(build):
    model, data = filled(build), rows(8)
    data["targets"][:3, :9] = -1  # microbatches with other numbers of targets
    want = loss_and_gradients(*nn.partition(model), data)
    layout = sharding.Layout(sharding.make_mesh(stage=2, devices=jax.devices()[:2]), PP)
    spread = jax.device_put(model, sharding.shardings(model, layout))
    with sharding.use(layout):
        got = one_f_one_b(*nn.partition(spread), data)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    # A bias of keys has no gradient, no softmax sees it: what is computed there is noise.
    noise = 1e-7 * max(np.abs(gradient).max() for gradient in want[1].values())
    for path, gradient in want[1].items():
        np.testing.assert_allclose(got[1][path], gradient, atol=1e-5 * np.abs(gradient).max() + noise, err_msg=path)


@pytest.mark.full
def test_one_f_one_b_sums_gradients_of_bfloat16_weights_in_float32():
    """As microbatches without a pipeline are: 32 microbatches of one row would lose what is small beside the sum."""
    model, data = nn.cast(filled(lambda: llama(2)), jnp.bfloat16), rows(32)
    gradient = functools.partial(pipelined_gradient, training.NextToken(), dtype=jnp.float32)
    exact = loss_and_gradients(*nn.partition(nn.cast(model, jnp.float32)), data)[1]
    pipeline = sharding.Pipeline("stage", microbatches=32)
    layout = sharding.Layout(sharding.make_mesh(stage=2, devices=jax.devices()[:2]), pipeline)
    spread = jax.device_put(model, sharding.shardings(model, layout))
    with sharding.use(layout):
        got = jax.jit(gradient)(*nn.partition(spread), data, jax.random.key(0))
    count = got[2].num_targets
    assert all(gradient.dtype == jnp.bfloat16 for gradient in got[0].values())
    del got[0]["embed.w"]  # a lookup sums its gradient over tokens in its dtype, in a pipeline or not
    for path, gradient in got[0].items():
        off = np.linalg.norm(np.float32(gradient) * count - exact[path]) / np.linalg.norm(exact[path])
        assert off < 2**-8, (path, off)  # what rounding the result alone may do


def test_one_f_one_b_says_what_it_cannot_do():
    params, rest = nn.partition(jax.eval_shape(llama))
    with pytest.raises(ValueError, match="there is no pipeline"):
        jax.eval_shape(one_f_one_b, params, rest, rows(8))
    with (
        sharding.use(sharding.Layout(sharding.make_mesh(stage=2, data=4), sharding.DP | PP)),
        pytest.raises(ValueError, match="reads text only: call it without images"),
    ):
        jax.eval_shape(one_f_one_b, params, rest, rows(8) | {"images": jnp.zeros((1, 3, 4, 4))})
