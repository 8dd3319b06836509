"""Placement by axis names, errors, and results that do not depend on the mesh."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from maxlib import nn, ops, sharding, weights
from maxlib.models import llama
from tests.nn.tiny import LLAMA
from tests.training.tiny import Bigram

RULES = sharding.FSDP_TP | {"vocab": None}  # 61 tokens do not divide


def build():
    return llama.Llama(dataclasses.replace(LLAMA, num_layers=2), rngs=nnx.Rngs(0))


def on_eight() -> sharding.Layout:
    return sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), RULES)


def test_created_values_equal_one_device():
    make = lambda: Bigram(rngs=nnx.Rngs(0))
    model, alone = sharding.init_sharded(make, on_eight()), jax.jit(make)()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(alone), jax.device_get(model))


def test_parameters_live_where_the_rules_say():
    places = sharding.shardings(
        jax.eval_shape(build), sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), RULES)
    )
    spec = {path: v.get_value().spec for path, v in nn.variables(places).items()}
    assert spec["layers.groups.0.0.attn.q.w"] == P(None, "tensor", None, "fsdp")
    assert spec["layers.groups.0.0.mlp.down.w"] == P(None, "fsdp", "tensor")
    assert spec["embed.w"] == P(None, "fsdp")
    assert all(axis is None for axis in spec["layers.groups.0.0.attn_norm.scale"])


class Tied(nnx.Module):
    """A head that is a second name of the embedding, which a pytree would store as a second table."""

    def __init__(self):
        self.embed = nn.Embed(8, 4, rngs=nnx.Rngs(0))
        self.head = self.embed


def test_one_parameter_at_two_places_is_refused_before_it_becomes_two():
    with pytest.raises(ValueError, match=r"embed\.w and head\.w are the same parameter.*embed\.logits"):
        sharding.init_sharded(Tied, on_eight())
    # Equal values are no alias, nor are other variables (the streams of random numbers that dropout layers share).
    copied, shared = Tied(), nnx.RngKey(jax.random.key(0))
    copied.head = nn.Embed(8, 4, rngs=nnx.Rngs(1))
    copied.head.w.set_value(copied.embed.w[...])
    copied.one, copied.other = shared, shared
    assert len(jax.tree.leaves(sharding.init_sharded(lambda: copied, on_eight()))) == 4


@pytest.mark.filterwarnings("ignore:nothing is split over")
def test_jit_notices_other_rules():
    mesh, x = sharding.make_mesh(data=2, fsdp=2, tensor=2), jnp.zeros((4, 4))
    f = jax.jit(lambda x: sharding.constrain(x, "batch", "act_mlp"))
    assert f(x).sharding.is_fully_replicated
    with sharding.use(sharding.Layout(mesh, sharding.DP)):
        assert f(x).sharding.spec == P(("data", "fsdp"))
    with sharding.use(sharding.Layout(mesh, {"act_mlp": "tensor"})):
        assert f(x).sharding.spec == P(None, "tensor")
    assert sharding.current() is None


def test_constrain_leaves_whole_what_does_not_divide():
    with sharding.use(sharding.Layout(sharding.make_mesh(data=8), sharding.DP)):
        assert jax.jit(lambda x: sharding.constrain(x, "batch", None))(jnp.zeros((1, 4))).sharding.is_fully_replicated
    with pytest.raises(ValueError, match="one name"):
        sharding.constrain(jnp.zeros((1, 4)), "batch")


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(8, 2), *(pytest.param(*p, marks=pytest.mark.full) for p in [(3, 1), (4, 4), (4, 2), (8, 1)])],
)
def test_attention_runs_on_each_devices_own_heads(heads, kv_heads):
    mesh = sharding.make_mesh(data=2, tensor=4)
    make = lambda: nn.Attention(
        16, num_heads=heads, num_kv_heads=kv_heads, head_dim=4, rope=ops.Rope(4), sinks=True, rngs=nnx.Rngs(0)
    )
    layer, x = make(), jax.random.normal(jax.random.key(0), (4, 7, 16))
    run = lambda layer, x: jnp.sum(layer(x)[0] ** 2)
    want, want_grad = jax.jit(jax.value_and_grad(run))(layer, x)
    with sharding.use(sharding.Layout(mesh, sharding.TP)):
        got, got_grad = jax.jit(jax.value_and_grad(run))(layer, x)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(a).max())
    jax.tree.map(close, want_grad, got_grad)


def test_attention_gathers_nothing_over_heads():
    mesh = sharding.make_mesh(tensor=8)
    shape = jax.ShapeDtypeStruct((2, 64, 8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, P(None, None, "tensor")))
    bound = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    with sharding.use(sharding.Layout(mesh, sharding.TP)):
        text = jax.jit(nn.attend).lower(shape, shape, shape, bound, bound).compile().as_text()
    assert not any(op in text for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_mesh_degrees():
    assert {axis: n for axis, n in sharding.make_mesh(fsdp=-1, tensor=2).shape.items() if n > 1} == {
        "fsdp": 4,
        "tensor": 2,
    }
    assert sharding.make_mesh(data=2, devices=jax.devices()[:2]).size == 2
    with pytest.raises(ValueError, match="needs 6 devices, but there are 8"):
        sharding.make_mesh(data=3, fsdp=2)
    simulate = r"JAX has 8. To simulate them on the CPU, call jax.config.update\('jax_num_cpu_devices', 16\)"
    with pytest.raises(ValueError, match=rf"the mesh {{'fsdp': 16}} needs 16 devices or more, but {simulate}"):
        sharding.make_mesh(fsdp=16)
    with pytest.raises(ValueError, match="a multiple of 3 devices"):
        sharding.make_mesh(data=3, fsdp=-1)
    with pytest.raises(ValueError, match="at most one -1"):
        sharding.make_mesh(data=-1, fsdp=-1)


@dataclasses.dataclass(frozen=True)
class Misspelt(sharding.strategies.Strategy):
    """A strategy of one's own whose rule is for an axis that nobody declared."""

    axis: str

    def apply(self, rules):
        return rules | {self.axis: "fsdp"}


@pytest.mark.parametrize("meant", ["embed", "act_embed", "batch"])
def test_a_misspelt_axis_is_an_error_wherever_it_is_used(meant):
    """With a layout in use and without one; the nearest name is suggested."""
    name, layout, x = meant[:-2] + meant[:-3:-1], sharding.Layout(sharding.make_mesh(fsdp=8)), jnp.zeros((8, 8))
    error = functools.partial(
        pytest.raises, ValueError, match=f"no axis is named '{name}'; did you mean '{meant}'\\?.*declare"
    )
    uses = {
        "constrain": lambda: sharding.constrain(x, "seq", name),
        "if free": lambda: sharding.constrain(x, "seq", sharding.IfFree(name)),
        "an op": lambda: sharding.shard_map_by_name(jnp.sin, [("seq", name)], ("seq", name))(x),
        "its result": lambda: sharding.shard_map_by_name(jnp.sin, [("seq", None)], ("seq", name))(x),
        "axis_size": lambda: sharding.layers.axis_size(name),
        "axis_of": lambda: sharding.layers.axis_of(name),
        "gathered": lambda: sharding.layers.gather_once(x, "vocab", name),
        "rules": lambda: sharding.Layout(layout.mesh, {name: "fsdp"}),
        "rules of a strategy": lambda: sharding.Layout(layout.mesh, Misspelt(name)),
    }
    for use in uses.values():
        for run in (use, lambda use=use: jax.eval_shape(use)):
            with error():
                run()
            with sharding.use(layout), error():
                run()
    parameter = lambda: {"w": nnx.Param(x, axes=("vocab", name))}
    for wrong in (
        lambda: sharding.shardings(parameter(), layout),
        lambda: sharding.init_sharded(parameter, layout),
        lambda: sharding.Layout(layout.mesh, {name: "fsdp"}),
        lambda: sharding.FSDP | {name: None},
        lambda: layout.spec("vocab", name),
    ):
        with error():
            wrong()


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        ("mistral", "mistral-small-3.1-24b"),
        pytest.param("gemma3", "gemma3-4b", marks=pytest.mark.full),
        pytest.param("llama4", "llama4-17b-16e", marks=pytest.mark.full),
    ],
)
def test_models_with_images_have_a_place_on_a_mesh(family, preset):
    (known,) = (candidate for candidate in weights.families() if candidate.name == family)
    model = jax.eval_shape(lambda: known.model(known.presets[preset], rngs=nnx.Rngs(0)))
    shardings = sharding.shardings(model, sharding.Layout(sharding.make_mesh(fsdp=8), sharding.FSDP))
    specs = [leaf.spec for leaf in jax.tree.leaves(shardings)]
    assert sum("fsdp" in spec for spec in specs) > len(specs) / 2


def test_axes_of_ones_own_are_declared():
    mesh = sharding.make_mesh(fsdp=8)
    with pytest.raises(ValueError, match="no axis is named 'my_flux'; sharding.ARRAY_AXES lists the names"):
        sharding.Layout(mesh, {"my_flux": "fsdp"})
    sharding.declare_axes("my_flux")
    try:
        leaves = {"own": nnx.Param(jnp.zeros(8), axes=("my_flux",))}
        layout = sharding.Layout(mesh, sharding.FSDP | {"my_flux": "fsdp"})
        assert sharding.shardings(leaves, layout)["own"].get_value().spec == P("fsdp")
        sharding.declare_axes("my_flux", "embed")  # what is there stays as it is
        assert sharding.ARRAY_AXES["embed"].startswith("width")
    finally:
        del sharding.ARRAY_AXES["my_flux"]
    with pytest.raises(ValueError, match="must be an identifier, such as 'state'; got 'my axis'"):
        sharding.declare_axes("my axis")


def test_plain_rules_name_mesh_axes():
    for wrong in ({"embed": sharding.PP}, {"act_expert": sharding.ExpertParallel()}):
        with pytest.raises(
            ValueError, match=r"a rule must name mesh axes; got .* Combine strategies instead: FSDP \| \w+\("
        ):
            sharding.strategies.Rules(wrong)
    with pytest.raises(ValueError, match="must be one or several mesh axes, IfFree or None; got 'embed' -> 3"):
        sharding.strategies.Rules({"embed": 3})
    with pytest.raises(ValueError, match="only a Pipeline may shard 'layers'"):
        sharding.DP | {"layers": "stage"}


def test_strategies_mix_in_any_order():
    """What each says of an axis does not depend on who was named first; plain rules are the last word."""
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    parts = (sharding.FSDP, sharding.TP, sharding.CP_ULYSSES, sharding.PP, sharding.ZERO1)
    layouts = {sharding.Layout(mesh, sharding.strategies.join(*order)) for order in itertools.permutations(parts)}
    (first,) = layouts
    assert first.rules["attn_heads"] == ("tensor", "context") and first.rules["layers"] == "stage"
    rules = {"vocab": None, "seq": "data"} | first.strategy
    assert rules == first.strategy | {"vocab": None, "seq": "data"} and hash(rules) == hash(first.strategy | rules)
    assert sharding.Layout(mesh, rules).rules["seq"] == "data" and sharding.Layout(mesh, rules).rules["vocab"] is None
    assert first.pipeline is None  # of one stage
    both = sharding.OFFLOAD_LAYERS | sharding.OFFLOAD_OPTIMIZER
    assert both == sharding.strategies.Offload(optimizer=True, layers=True)
    assert sharding.PP | sharding.Pipeline("stage", 4) == sharding.Pipeline("stage", 4)


@pytest.mark.filterwarnings("ignore:nothing is split over")
def test_mistakes_name_the_culprit():
    mesh = sharding.make_mesh(data=2, tensor=4)
    with pytest.raises(
        ValueError,
        match=r"layers.groups.0.0.attn.k.w: dimension 'kv_heads' \(size 2\) is not divisible by mesh axis 'tensor' \(size 4\)",
    ):
        sharding.init_sharded(build, sharding.Layout(mesh, {"kv_heads": "tensor"}))
    with pytest.raises(ValueError, match=r"embed.w: its axes .* put 'vocab' and 'embed' both on the mesh axis 'data'"):
        sharding.init_sharded(build, sharding.Layout(mesh, {"vocab": "data", "embed": "data"}))
    with pytest.raises(ValueError, match=r"no mesh axis is named 'model'"):
        sharding.init_sharded(build, sharding.Layout(mesh, {"embed": "model"}))
    for call, words in {
        (mesh, "fsdp"): r"sharding.preset\('fsdp'\) makes one",
        ("fsdp", "tp"): "must be a mesh",
    }.items():
        wrong = object.__new__(sharding.Layout)  # past the types, which only tests check
        wrong.__dict__.update(mesh=call[0], strategy=call[1])
        with pytest.raises(TypeError, match=words):
            wrong.__post_init__()


def test_devices_that_would_repeat_each_others_work_are_named():
    with pytest.warns(UserWarning, match="nothing is split over tensor of the mesh .* repeat each other's work"):
        sharding.Layout(sharding.make_mesh(fsdp=2, tensor=4), sharding.FSDP)
    with pytest.warns(UserWarning, match="nothing is split over fsdp of"):
        sharding.Layout(sharding.make_mesh(fsdp=4, context=2), sharding.CP_RING)
    for strategy, degrees in (
        (sharding.FSDP_TP, {"fsdp": 2, "tensor": 4}),
        (sharding.DP | sharding.ZERO1, {"data": 8}),
    ):
        sharding.Layout(sharding.make_mesh(**degrees), strategy)  # warnings of maxlib are errors in tests


def test_a_degree_is_a_whole_number():
    with pytest.raises(TypeError, match="the degree of mesh axis 'fsdp' must be an integer, got True"):
        sharding.Layout({"fsdp": True})


def test_a_mesh_of_hosts_speaks_of_hosts():
    with pytest.raises(ValueError, match="needs 2 hosts"):
        sharding.make_mesh(fsdp=4, dcn={"data": 2})
