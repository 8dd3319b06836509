"""The layer axis is named in metadata; nothing is inferred from a path or a rank."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import nn, quantization, sharding, training
from maxlib.nn.sites import unknown
from maxlib.training._offload import _groups
from maxlib.training._optimizers import muon_dimensions
from tests.training.stacked import Layer, abstract_model


class Own(nnx.Module):
    """Two blocks in a list with the name of a stack's list, a stack, and a matrix without names."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        make = lambda _, rngs: nn.Einsum("...D,ED->...E", (8, 8), ("mlp", "embed"), rngs=rngs)
        self.groups = nnx.List([make(None, rngs) for _ in range(2)])
        self.lists = nnx.List([nnx.Dict(conv=nnx.Param(jnp.ones((4, 6))))])
        self.layers = nn.Stack(make, 3, rngs=rngs)


STACKED, MINE, UNNAMED = "layers.groups.0.0.w", "groups.0.w", "lists.0.conv"


def abstract_own() -> Own:
    return jax.eval_shape(Own)


def test_names_say_what_is_stacked():
    axes = nn.tree.axes(abstract_own())
    assert axes[STACKED] == ("layers", "mlp", "embed") and axes[MINE] == ("mlp", "embed") and axes[UNNAMED] == ()
    assert nn.tree.stacked_paths(abstract_own()) == {STACKED}
    model = abstract_model("aabcdcd")
    assert nn.tree.axes(model)["layers.groups.0.0.w"] == ("unstaged_layers", "embed", "mlp")
    assert nn.tree.axes(model)["layers.groups.1.0.w"] == ("embed", "mlp")
    assert nn.tree.axes(model)["layers.groups.2.1.w"] == ("layers", "embed", "mlp")


def test_patterns_leave_out_the_layouts_of_stacks_alone():
    short = nn.tree.pattern_paths(abstract_own())
    assert short[STACKED] == "layers.w" and short[MINE] == MINE and short[UNNAMED] == UNNAMED
    assert {*nn.tree.pattern_paths(abstract_model("aabcdcd")).values()} == {
        "head",
        "layers.w",
        "layers.scale",
        "layers.count",
    }
    assert {*nn.tree.pattern_paths(abstract_own().layers).values()} == {"w"}


def test_a_stack_inside_a_layer_has_two_axes_and_one_pattern():
    inner = lambda _, rngs: nnx.Dict(blocks=nn.Stack(lambda _, rngs: Layer(rngs=rngs), 2, rngs=rngs))
    model = jax.eval_shape(lambda: nnx.Dict(layers=nn.Stack(inner, 3, rngs=nnx.Rngs(0))))
    path = "layers.groups.0.0.blocks.groups.0.0.w"
    assert nn.tree.axes(model)[path] == ("layers", "layers", "embed", "mlp")
    assert nn.tree.pattern_paths(model)[path] == "layers.blocks.w"
    assert sharding.layers.num_layer_axes(nn.tree.axes(model)[path]) == 2
    assert nn.tree.own_axes(nn.tree.axes(model)[path]) == ("embed", "mlp")
    layer = jax.eval_shape(lambda model: model.layers[1], model)
    assert nn.tree.axes(layer)["blocks.groups.0.0.w"] == ("layers", "embed", "mlp")
    assert nn.tree.axes(layer)["blocks.groups.0.0.count"] == ("layers",)
    alone = jax.eval_shape(lambda model: model.layers[1].blocks[0], model)
    assert jax.tree.structure(alone) == jax.tree.structure(jax.eval_shape(lambda: Layer(rngs=nnx.Rngs(0))))


def test_optimizers_count_the_dimensions_of_one_layer():
    params, _ = nn.partition(abstract_own())
    decays = training.decay_mask(abstract_own())(params)
    assert decays == {STACKED: True, MINE: True, "groups.1.w": True, UNNAMED: False}
    dims = muon_dimensions(abstract_own())
    assert dims[STACKED] == optax.contrib.MuonDimensionNumbers((2,), (1,))
    assert dims[MINE] == optax.contrib.MuonDimensionNumbers((1,), (0,))
    assert dict(_groups(params, nn.tree.stacked_paths(abstract_own()))) == {
        None: [MINE, "groups.1.w", UNNAMED],
        3: [STACKED],
    }
    rates = training.scale_by_path({"groups.*": 0.5, "layers.w": 2.0}, model=abstract_own())
    ones = {path: jnp.ones(x.shape) for path, x in params.items()}
    updates, _ = rates.update(ones, rates.init(ones))
    assert {path: float(u.mean()) for path, u in updates.items()} == {
        STACKED: 2.0,
        MINE: 0.5,
        "groups.1.w": 0.5,
        UNNAMED: 1.0,
    }


def test_layers_memory_is_for_layers():
    layout = sharding.Layout(sharding.make_mesh(fsdp=8), sharding.FSDP | sharding.OFFLOAD_LAYERS)
    place = lambda path: layout.sharding(path, nn.variables(abstract_own())[path]).memory_kind
    assert place(STACKED) == "pinned_host" and place(MINE) != "pinned_host"


def test_stages_split_layers_and_nothing_else():
    layout = sharding.Layout(sharding.make_mesh(stage=8), sharding.Pipeline("stage", microbatches=8))
    spec = lambda axes, shape: tuple(layout.parameter_spec(axes, shape, path="w"))
    assert spec(("layers", "mlp", "embed"), (8, 4, 4)) == ("stage",)
    assert spec(("unstaged_layers", "mlp", "embed"), (8, 4, 4)) == spec(("mlp", "embed"), (8, 4)) == ()
    assert spec(("layers", "layers", "mlp"), (8, 8, 4)) == ("stage",)
    with pytest.raises(ValueError, match=r"w: axes \('mlp',\) must have one entry per dimension of shape \(8, 4\)"):
        spec(("mlp",), (8, 4))


def test_quantization_changes_what_it_knows_in_its_own_place():
    model = Own()
    assert unknown(model).keys() == {UNNAMED}
    rules = [quantization.Rule(None, kinds=("unknown",)), quantization.Rule(quantization.INFERENCE["int8"])]
    new = quantization.for_inference(model, rules)
    assert nn.tree.axes(new)["layers.groups.0.0.w.values"] == ("layers", "mlp", "embed")
    assert nn.tree.axes(new)["groups.0.w.values"] == ("mlp", "embed")
    assert new.groups[0].w.scale[...].shape == (8, 1) and new.layers.groups[0][0].w.scale[...].shape == (3, 8, 1)
    for a, b in ((new.groups[0], model.groups[0]), (new.layers[2], model.layers[2])):
        np.testing.assert_allclose(a.w[...], b.w[...], atol=np.abs(b.w[...]).max() / 127)
    only = quantization.for_inference(model, [*rules[:1], quantization.Rule(rules[1].format, match="layers.*")])
    assert only.groups[0].w[...].dtype == jnp.float32 and "groups.0.w" in nn.variables(only)


def test_a_table_groups_the_layers_of_stacks():
    rows = [line.split() for line in nn.summary(abstract_own()).splitlines()]
    assert ["layers.w", "3", "x", "8", "8", "mlp", "embed", "float32", "192"] in rows
    assert ["groups.0.w", "8", "8", "mlp", "embed", "float32", "64"] in rows
