"""Placement by names: what goes where, what is refused, and that results do not change."""

import dataclasses
import inspect
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from maxlib import nn, ops, sharding
from maxlib.models import llama
from maxlib.sharding._rules import check
from tests.nn.tiny import LLAMA, tokens

RULES = sharding.FSDP_TP | {"vocab": None}  # 61 tokens do not divide


def build():
    return llama.Llama(dataclasses.replace(LLAMA, num_layers=2), rngs=nnx.Rngs(0))


def hidden(model, ids, **options):
    return jax.jit(lambda m, t: m(t, dtype=jnp.float32, **options).hidden)(model, ids)


def test_created_values_and_results_equal_one_device():
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    model, alone, ids = sharding.create(build, mesh, RULES), jax.jit(build)(), tokens(8, 9)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(alone), jax.device_get(model))
    with sharding.use(mesh, RULES):
        got = hidden(model, ids)
    np.testing.assert_allclose(got, hidden(alone, ids), atol=3e-6)


def test_parameters_live_where_the_rules_say():
    places = sharding.shardings(jax.eval_shape(build), sharding.make_mesh(data=2, fsdp=2, tensor=2), RULES)
    spec = {path: v.get_value().spec for path, v in nn.variables(places).items()}
    assert spec["layers.body.0.attn.q.w"] == P(None, "tensor", None, "fsdp")
    assert spec["layers.body.0.mlp.down.w"] == P(None, "fsdp", "tensor")
    assert spec["embed.w"] == P(None, "fsdp")
    assert all(axis is None for axis in spec["layers.body.0.attn_norm.scale"])


def test_jit_notices_other_rules():
    mesh, x = sharding.make_mesh(data=2, fsdp=2, tensor=2), jnp.zeros((4, 4))
    f = jax.jit(lambda x: sharding.constrain(x, "batch", "act_mlp"))
    assert f(x).sharding.is_fully_replicated
    with sharding.use(mesh, sharding.DP):
        assert f(x).sharding.spec == P(("data", "fsdp"))
    with sharding.use(mesh, {"act_mlp": "tensor"}):
        assert f(x).sharding.spec == P(None, "tensor")
    assert sharding.current() is None


def test_constrain_leaves_whole_what_does_not_divide():
    with sharding.use(sharding.make_mesh(data=8), sharding.DP):
        assert jax.jit(lambda x: sharding.constrain(x, "batch", None))(jnp.zeros((1, 4))).sharding.is_fully_replicated
    with pytest.raises(ValueError, match="one name"):
        sharding.constrain(jnp.zeros((1, 4)), "batch")


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(4, 4), (8, 2), (3, 1), *(pytest.param(*p, marks=pytest.mark.full) for p in [(4, 2), (8, 1)])],
)
def test_attention_runs_on_each_devices_own_heads(heads, kv_heads):
    mesh = sharding.make_mesh(data=2, tensor=4)
    make = lambda: nn.Attention(
        16, num_heads=heads, num_kv_heads=kv_heads, head_dim=4, rope=ops.Rope(4), sinks=True, rngs=nnx.Rngs(0)
    )
    layer, x = make(), jax.random.normal(jax.random.key(0), (4, 7, 16))
    run = lambda layer, x: jnp.sum(layer(x)[0] ** 2)
    want, want_grad = jax.jit(jax.value_and_grad(run))(layer, x)
    with sharding.use(mesh, sharding.TP):
        got, got_grad = jax.jit(jax.value_and_grad(run))(layer, x)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(a).max())
    jax.tree.map(close, want_grad, got_grad)


def test_attention_gathers_nothing_over_heads():
    mesh = sharding.make_mesh(tensor=8)
    shape = jax.ShapeDtypeStruct((2, 64, 8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, P(None, None, "tensor")))
    bound = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    with sharding.use(mesh, sharding.TP):
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
    with pytest.raises(ValueError, match="a multiple of 3 devices"):
        sharding.make_mesh(data=3, fsdp=-1)
    with pytest.raises(ValueError, match="at most one -1"):
        sharding.make_mesh(data=-1, fsdp=-1)


def test_a_rule_that_nothing_is_named_after_is_warned_of():
    mesh, model = sharding.make_mesh(fsdp=8), jax.eval_shape(build)
    for name in ("embd", "embedding"):
        with pytest.warns(UserWarning, match=f"no axis is named '{name}', which the rules have.* is 'embed' meant"):
            sharding.shardings(model, mesh, {name: "fsdp"})
    with pytest.warns(UserWarning, match=r"no axis is named 'my_own', .* parameters have \['embed', 'head_dim'"):
        sharding.shardings(model, mesh, sharding.FSDP | {"my_own": "fsdp"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = {"own": nnx.Param(jnp.zeros(8), axes=("my_own",))}
        sharding.shardings(own, mesh, sharding.FSDP | {"my_own": "fsdp"})
        sharding.shardings(model, mesh, dict.fromkeys(itertools.chain(*sharding.PRESETS.values())))


def test_what_only_a_few_rules_say():
    mesh, check_any = sharding.make_mesh(fsdp=4, stage=2), inspect.unwrap(check)  # past the types
    pipeline, exchange = sharding.Pipeline("stage", microbatches=8), sharding.ExpertExchange("fsdp", "dense")
    for rules in ({"layers": "stage"}, {"embed": pipeline}, {"expert": exchange}, {"layers": exchange}, {"embed": 3}):
        with pytest.raises(ValueError, match="Pipeline.* is what the rule layers says, .* and nothing else; got"):
            check_any(mesh, rules)
    check_any(mesh, {"layers": pipeline, "act_expert": exchange, "embed": ("fsdp",)})
    check_any(mesh, {"layers": None, "act_expert": "fsdp", "embed": None})


def test_mistakes_name_the_culprit():
    mesh = sharding.make_mesh(data=2, tensor=4)
    with pytest.raises(ValueError, match=r"layers.body.0.attn.k.w: axis 'kv_heads' of size 2 does not divide"):
        sharding.create(build, mesh, {"kv_heads": "tensor"})
    with pytest.raises(ValueError, match=r"embed.w: its axes .* put 'vocab' and 'embed' both on the mesh axis 'data'"):
        sharding.create(build, mesh, {"vocab": "data", "embed": "data"})
    with pytest.raises(ValueError, match=r"names the mesh axis 'model', but the mesh has"):
        sharding.create(build, mesh, {"embed": "model"})
    with pytest.raises(TypeError, match=r"sharding.preset\('fsdp'\) makes one of a name"):
        inspect.unwrap(check)(mesh, "fsdp")  # past the types, which only tests check
    with pytest.raises(TypeError, match=r"mesh must be a mesh, got 'fsdp'"):
        inspect.unwrap(check)("fsdp", sharding.FSDP)
