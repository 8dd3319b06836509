"""Meshes with every axis, and the presets beyond data, FSDP and tensor parallelism."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxlib import nn, sharding, training
from maxlib.sharding import _mesh as mesh_module
from tests.nn.tiny import LLAMA, filled, filled_llama, tokens
from tests.sharding.test_sharding import RULES, build
from tests.training.tiny import QUICKLY, Bigram, batch, loss


def test_all_six_axes_and_the_last_are_neighbours():
    mesh = sharding.make_mesh(stage=2, expert=2, tensor=-1)
    assert dict(mesh.shape) == {"stage": 2, "data": 1, "fsdp": 1, "expert": 2, "context": 1, "tensor": 2}
    assert [d.id for d in mesh.devices.flat] == list(range(8))
    assert set(sharding.MESH_AXES) == {"data", "fsdp", "tensor", "context", "expert", "stage"}


def slices(count, each):
    """Described devices of several TPU-like slices."""
    make = lambda i: SimpleNamespace(
        id=i,
        slice_index=i // each,
        process_index=i // each,
        coords=[i % 2, i % each // 2, 0],
        core_on_chip=0,
        platform="tpu",
        device_kind="TPU v6",
    )
    return [make(i) for i in range(count * each)]


def test_degrees_across_slices(monkeypatch):
    arranged = []

    def record(devices, axes, axis_types):  # a real mesh wants real devices
        arranged.append(devices)
        return Mesh(np.reshape(jax.devices(), devices.shape), axes, axis_types=axis_types)

    monkeypatch.setattr(mesh_module, "Mesh", record)
    mesh = sharding.make_mesh(fsdp=-1, dcn={"data": -1}, devices=slices(2, 4))
    assert mesh.shape["data"] == 2 and mesh.shape["fsdp"] == 4
    assert [{d.slice_index for d in part} for part in arranged[0].reshape(2, 4)] == [{0}, {1}]
    assert sharding.make_mesh(fsdp=2, tensor=2, dcn={"fsdp": 2}, devices=slices(2, 4)).shape["fsdp"] == 4
    with pytest.raises(ValueError, match="span 2 slices"):
        sharding.make_mesh(fsdp=-1, devices=slices(2, 4))
    with pytest.raises(ValueError, match=r"\{'data': 3\} needs 3 slices, but there are 2"):
        sharding.make_mesh(fsdp=-1, dcn={"data": 3}, devices=slices(2, 4))
    with pytest.raises(ValueError, match="dcn: no mesh axis is named 'batch'"):
        sharding.make_mesh(fsdp=-1, dcn={"batch": 2}, devices=slices(2, 4))
    with pytest.raises(ValueError, match=r"make_mesh: no mesh axis is named 'fdsp' \(did you mean 'fsdp'\?\)"):
        sharding.make_mesh(fdsp=8)
    with pytest.raises(ValueError, match=r"no mesh axis is named 'dta' \(did you mean 'data'\?\)"):
        sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP | sharding.strategies.ShardOptimizer("dta"))


def test_spare_takes_what_is_left():
    layout = sharding.Layout(sharding.make_mesh(fsdp=8), sharding.FSDP_TP | sharding.SP)
    assert layout.spec("batch", "seq", "act_embed") == P(("data", "fsdp"), "tensor")
    assert layout.spec("batch", "seq", "act_heads", None) == P(("data", "fsdp"), None, "tensor")
    both = layout | {"seq": sharding.IfFree(("context", "tensor")), "act_mlp": "tensor"}
    assert both.spec("seq", "act_mlp") == P(("context",), "tensor")


def test_presets_join_by_name():
    assert sharding.preset("ep") == sharding.EP
    assert sharding.preset("fsdp_tp+cp_ring") == sharding.FSDP_TP | sharding.CP_RING
    pipeline = sharding.Pipeline("stage", microbatches=16)
    assert sharding.preset("fsdp + cp_ulysses + pp:16") == sharding.FSDP | sharding.CP_ULYSSES | pipeline
    assert sharding.preset("pp") == sharding.Pipeline("stage", microbatches=8)
    assert sharding.preset("pp:16x2") == sharding.Pipeline("stage", microbatches=16, repeats=2)
    for name in ("zero9", "fsdp+", "fsdp:3", "pp:x", "pp:0", "pp:8x", "pp:8x2x2"):
        with pytest.raises(ValueError, match="a strategy must be one of dp, zero1|at least one microbatch"):
            sharding.preset(name)


def test_layers_that_stages_do_not_hold_in_order_are_split_otherwise():
    mesh = sharding.make_mesh(stage=4, fsdp=2)
    layout = lambda repeats: sharding.Layout(mesh, sharding.FSDP | sharding.Pipeline("stage", 4, repeats))
    names = ("embed", "mlp")
    spec = lambda shape, repeats=1, *, layers="layers": layout(repeats).parameter_spec((layers, *names), shape)
    assert spec((8, 16, 64)) == P("stage", "fsdp")
    assert spec((8, 16, 64), repeats=2) == spec((7, 16, 64)) == P(None, "fsdp", "stage")
    assert spec((7, 64, 6)) == P(None, ("fsdp", "stage"))
    assert spec((7, 6, 6)) == P(None, "fsdp")  # nothing that they divide
    assert spec((8, 16, 64), layers="unstaged_layers") == P(None, "fsdp")
    assert layout(1).parameter_spec(names, (16, 64)) == P("fsdp")  # of no stack
    with pytest.raises(ValueError, match=r"w: axes \('embed', 'mlp'\) must have one entry per dimension"):
        layout(1).parameter_spec(names, (8, 16, 64), path="w")


def test_a_weight_gathered_once_is_whole_where_the_batch_is_split():
    mesh, w, x = sharding.make_mesh(fsdp=4, tensor=2), jnp.ones((8, 16)), jnp.ones((4, 8))
    loss = lambda w: jnp.sum(x @ sharding.layers.gather_once(w, "embed", "mlp"))
    assert sharding.layers.gather_once(w, "embed", "mlp") is w  # on one device
    with sharding.use(sharding.Layout(mesh, sharding.FSDP_TP)):
        gathered = jax.jit(lambda w: sharding.layers.gather_once(w, "embed", "mlp"))(w)
        assert gathered.sharding.spec == P(None, "tensor")
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(w), jax.grad(loss)(w))
        assert sharding.layers.gather_once(w, "norm", "mlp") is w  # nothing of it is split like the batch


def placed(shape, *names, rules, **degrees):
    """Returns the sharding of an activation."""
    with sharding.use(sharding.Layout(sharding.make_mesh(**degrees), rules)):
        return jax.jit(lambda: sharding.constrain(jnp.zeros(shape), *names))().sharding.spec


def test_a_batch_takes_those_of_its_axes_that_divide_it():
    axes = functools.partial(placed, rules=sharding.FSDP, data=2, fsdp=4)
    assert axes((8, 3), "batch", None) == P(("data", "fsdp"))
    assert axes((2, 3), "batch", None) == P("data")
    assert axes((3, 3), "batch", None) == P()


def test_stages_share_the_rows_that_no_stage_has():
    axes = functools.partial(placed, fsdp=4, stage=2)
    assert axes((8, 3), "batch", None, rules=sharding.FSDP | sharding.PP) == P(("fsdp", "stage"))
    vocabulary = {"vocab": "stage", "act_vocab": "stage"}
    assert axes((8, 4), "batch", "act_vocab", rules=sharding.FSDP | sharding.PP | vocabulary) == P("fsdp", "stage")


def test_sequence_sharding_changes_no_result():
    model = filled_llama(num_layers=1)
    # A norm ends the model: its squares would sum to a constant.
    weigh = np.random.default_rng(0).normal(size=(4, 8, LLAMA.dim)).astype(np.float32)
    run = lambda model, ids: jnp.sum(weigh * model(ids, dtype=jnp.float32).hidden)
    gradient, ids = jax.value_and_grad(run), tokens(4, 8)
    loss, want = jax.device_get(jax.jit(gradient, compiler_options=QUICKLY)(model, ids))
    with sharding.use(sharding.Layout(sharding.make_mesh(fsdp=2, tensor=4), RULES | sharding.SP | {"kv_heads": None})):
        compiled = jax.jit(gradient).lower(model, ids).compile(compiler_options=QUICKLY)
    got_loss, got = compiled(model, ids)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * float(np.abs(b).max())), got, want)
    assert "f32[2,2,32]" in compiled.as_text()  # a quarter of the sequence between the matmuls


@pytest.mark.parametrize("context", [sharding.CP_GATHER, sharding.CP_RING, sharding.CP_ULYSSES])
def test_sequence_and_context_parallelism_split_the_tokens_between_layers_together(context):
    axes = functools.partial(placed, fsdp=2, tensor=2, context=2, rules=sharding.FSDP_TP | sharding.SP | context)
    assert axes((8, 8, 8), "batch", "seq", "act_embed") == P("fsdp", ("context", "tensor"))
    assert axes((8, 8, 8), "batch", "seq", "act_mlp") == P("fsdp", "context", "tensor")


def test_zero1_splits_the_optimizer_and_nothing_else():
    mesh, optimizer, name = sharding.make_mesh(data=8), optax.adamw(1e-2), "layers.groups.0.0.mlp.up.w"
    after = {}
    for rules in (sharding.DP, sharding.DP | sharding.ZERO1):
        layout = sharding.Layout(mesh, rules)
        with sharding.use(layout):
            model = filled(lambda: Bigram(rngs=nnx.Rngs(0)))
            state = training.make_state(jax.device_put(model, sharding.shardings(model, layout)), optimizer)
            new, metrics = jax.jit(training.make_train_step(loss, optimizer), compiler_options=QUICKLY)(state, batch(8))
        same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert all(
            jax.tree.leaves(jax.tree.map(same, (state.trainable, state.opt_state), (new.trainable, new.opt_state)))
        )
        after[rules is not sharding.DP] = new, metrics
    (split, metrics), (unsplit, whole_metrics) = after[True], after[False]
    assert split.trainable[name].sharding.is_fully_replicated
    moments = [x for x in jax.tree.leaves(split.opt_state) if x.shape == split.trainable[name].shape]
    assert len(moments) == 2 and all(x.addressable_shards[0].data.size * 8 == x.size for x in moments)
    np.testing.assert_allclose(metrics["grad_norm"], whole_metrics["grad_norm"], rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), split.trainable, unsplit.trainable)


def test_optimizer_spec_takes_the_longest_dimension_that_divides():
    mesh = sharding.make_mesh(data=4, fsdp=2)
    spec = sharding.Layout(mesh, sharding.FSDP | sharding.ZERO1).optimizer_spec
    assert spec(("mlp", "embed"), (16, 64)) == P(None, ("fsdp", "data"))
    assert spec(("layers", "mlp", "embed"), (3, 16, 8)) == P(None, "data", "fsdp")
    assert spec(("norm",), (3,)) == P()


def test_experts_on_their_own_axis_or_on_fsdp():
    @jax.eval_shape
    def moe():
        router = nn.Router(16, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
        return nn.MoE(16, 32, router=router, shared=nn.GatedMLP(16, 32, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2))

    def places(mesh, rules):
        shardings = nn.variables(sharding.shardings(moe, sharding.Layout(mesh, rules)))
        return {path: shardings[path].get_value().spec for path in ("gate.w", "down.w", "shared.up.w")}

    got = places(sharding.make_mesh(expert=4, fsdp=2), sharding.EP)
    assert got["gate.w"] == P("expert", None, "fsdp") and got["down.w"] == P("expert", "fsdp")
    assert got["shared.up.w"] == P(None, ("fsdp", "expert"))
    got = places(sharding.make_mesh(fsdp=8), sharding.FSDP_BY_EXPERT)
    assert got["gate.w"] == P("fsdp") and got["shared.up.w"] == P(None, "fsdp")


def test_describe_counts_bytes_and_copies():
    mesh = sharding.make_mesh(data=2, fsdp=4)
    model = jax.eval_shape(build)
    seen = sharding.describe(model, sharding.Layout(mesh, sharding.FSDP))
    by = {parameter.path: parameter for parameter in seen.parameters}
    up = by["layers.groups.0.0.mlp.up.w"]
    assert up.bytes_per_device * 4 == up.bytes and up.place == "- - fsdp"
    assert up.path in str(seen) and "mlp embed" in str(seen) and up.copies == 2
    # Degrees say as much as devices do, unless one of them is theirs to say.
    assert sharding.describe(model, sharding.Layout({"data": 2, "fsdp": 4}, sharding.FSDP)) == seen
    with pytest.raises(ValueError, match="no devices yet"):
        sharding.describe(model, sharding.Layout({"fsdp": -1}, sharding.FSDP))


def test_an_array_is_described_where_it_lies():
    mesh = sharding.make_mesh(data=2, fsdp=4)
    table = jax.device_put(jnp.zeros((6, 8)), jax.NamedSharding(mesh, P(None, "fsdp")))
    (seen,) = sharding.describe({"table": nnx.Param(table)}).parameters
    assert (seen.path, seen.place, seen.bytes_per_device) == ("table", "- fsdp", 48)
