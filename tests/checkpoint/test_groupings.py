"""Checkpoints can be restored into stacks of other groups."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib import checkpoint, nn
from maxlib.checkpoint import Checkpointer
from maxlib.checkpoint import _records as records
from tests.checkpoint.test_checkpointer import assert_same
from tests.training.stacked import KINDS, abstract_model, state_of


def saved(tmp_path, model):
    state = state_of(model)
    with Checkpointer(tmp_path, groupings=nn.tree.groupings(model)) as ck:
        ck.save(1, state)
    return state


PAIR = ("aabcdcd", "aaaaaaa")
OTHERS = [pytest.param(*pair, marks=pytest.mark.full) for pair in itertools.product(KINDS, KINDS) if pair != PAIR]


@pytest.mark.parametrize(("old", "new"), [PAIR, *OTHERS])
def test_parameters_rest_and_moments_are_laid_anew(tmp_path, old, new):
    saved(tmp_path, abstract_model(old))
    model = abstract_model(new)
    want = state_of(model)  # what these groups would have come to by themselves
    got = checkpoint.load(tmp_path, jax.tree.map(jnp.zeros_like, want), groupings=nn.tree.groupings(model))
    assert_same({name: got[name] for name in want}, want)


def test_unstacked_for_inference(tmp_path):
    state = saved(tmp_path, abstract_model("abcbcbc"))
    flat = nn.unstack(nn.combine(state["params"], state["rest"]))
    params, _ = nn.partition(flat)
    like = jax.tree.map(jnp.zeros_like, params)
    assert_same(checkpoint.load(tmp_path, {"params": like}, groupings=nn.tree.groupings(flat))["params"], params)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("abcbcbc", "aaaaaaa"),
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in [("aaaaaaa", "abcbcbc"), ("abcdefg", "abababc")]),
    ],
)
def test_with_shardings(tmp_path, old, new):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def shard(path, x):
        spec = (
            {4: P("a", "b"), 8: P("b")}.get(x.shape[-2] if path.endswith(".w") else x.shape[-1], P()) if x.ndim else P()
        )
        stacked = x.ndim > (2 if path.endswith(".w") else 1)
        return NamedSharding(mesh, P(None, *spec) if stacked else spec)

    place = lambda params: {path: jax.device_put(x, shard(path, x)) for path, x in params.items()}
    source, target = abstract_model(old), abstract_model(new)
    with Checkpointer(tmp_path, groupings=nn.tree.groupings(source)) as ck:
        ck.save(1, {"params": place(state_of(source)["params"])})
    want = place(state_of(target)["params"])
    like = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for path, x in want.items()}
    got = checkpoint.load(tmp_path, {"params": like}, groupings=nn.tree.groupings(target))["params"]
    assert_same(got, want)
    assert {p: x.sharding for p, x in got.items()} == {p: x.sharding for p, x in want.items()}


def test_on_the_host(tmp_path):
    model, other = abstract_model(), abstract_model("abcdcde")
    with Checkpointer(tmp_path, groupings=nn.tree.groupings(model)) as ck:
        ck.save(1, {"params": jax.device_get(state_of(model)["params"])})
    want = jax.device_get(state_of(other)["params"])
    assert_same(checkpoint.load(tmp_path, {"params": want}, groupings=nn.tree.groupings(other))["params"], want)


def test_placeholders_of_an_optimizer_stand_for_all_layers(tmp_path):
    """Adafactor keeps a (1,) where a moment is not factored, whatever the number of layers."""
    stacked, apart = abstract_model(), abstract_model("abcdefg")
    moments = lambda model, value: {"v_row": {path: value(i) for i, path in enumerate(nn.partition(model)[0])}}
    same, different = lambda i: jnp.ones(1), lambda i: jnp.full(1, float(i))
    for name, model, value in (("a", stacked, same), ("b", apart, same), ("c", apart, different)):
        with Checkpointer(tmp_path / name, groupings=nn.tree.groupings(model)) as ck:
            ck.save(1, {"opt": moments(model, value)})
    load = lambda name, model: checkpoint.load(
        tmp_path / name, {"opt": moments(model, same)}, groupings=nn.tree.groupings(model)
    )
    assert_same(load("a", apart)["opt"], moments(apart, same))
    assert_same(load("b", stacked)["opt"], moments(stacked, same))
    with pytest.raises(
        ValueError,
        match=r"v_row\.layers\.groups\.0\.0\.w: a single value for the layers .* different values were saved",
    ):
        load("c", stacked)


def test_a_sharded_axis_of_layers(tmp_path):
    """As pipelines have it: the axis that a stack adds is split as well, and has another length afterwards."""
    mesh = jax.make_mesh((2, 4), ("stage", "b"), axis_types=(AxisType.Auto,) * 2)
    model, other = abstract_model("abbbbbb"), abstract_model("abcdddd")  # 6 and 4 rows
    want = state_of(other)["params"]
    spec = lambda x: (
        P("stage", None, "b") if x.ndim == 3 else P("stage", "b") if x.shape[0] == 4 and x.ndim == 2 else P()
    )
    like = {
        p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x) if "groups.1." in p else P()))
        for p, x in want.items()
    }
    with Checkpointer(tmp_path, groupings=nn.tree.groupings(model)) as ck:
        ck.save(1, {"params": state_of(model)["params"]})
    got = checkpoint.load(tmp_path, {"params": like}, groupings=nn.tree.groupings(other))["params"]
    assert_same(jax.device_get(got), jax.device_get(want))
    assert {p: x.sharding for p, x in got.items()} == {p: x.sharding for p, x in like.items()}


def test_another_depth_is_another_model(tmp_path):
    saved(tmp_path, abstract_model("abcbcbc"))
    shallow = abstract_model("aaaaa")
    with pytest.raises(
        ValueError, match=r"nothing takes:\n  layers\.5\.scale float32\[8\]\n  layers\.5\.w float32\[4,8\]\n"
    ):
        checkpoint.load(tmp_path, {"params": nn.partition(shallow)[0]}, groupings=nn.tree.groupings(shallow))
    deep = abstract_model("aaaaaaaa")
    with pytest.raises(ValueError, match=r"it lacks:\n  layers\.7\.scale"):
        checkpoint.load(tmp_path, {"params": nn.partition(deep)[0]}, groupings=nn.tree.groupings(deep))


def test_groups_of_the_development_version_are_refused(tmp_path):
    model = abstract_model("aaaaa")
    saved(tmp_path, model)
    path = epath.Path(tmp_path) / "1" / "meta" / "meta.json"
    layouts = {"layers": {"num_layers": 5, "lead": 0, "prefix": 1, "period": 1}}  # as 0.1.0.dev0 wrote them
    path.write_text(records.to_text(records.read(path) | {"layouts": layouts}))
    with pytest.raises(ValueError, match=r"saved by 0\.1\.0\.dev0"):
        checkpoint.load(tmp_path, state_of(model), groupings=nn.tree.groupings(model))


def test_a_damaged_leaf_is_found_on_the_way(tmp_path, monkeypatch):
    saved(tmp_path, abstract_model())
    model = abstract_model("abcbcbc")
    real = checkpoint._storage.load

    def flip(*args):
        leaves = real(*args)
        return leaves | {"layers.groups.0.0.w": leaves["layers.groups.0.0.w"].at[3, 0, 0].add(1e-6)}

    monkeypatch.setattr(checkpoint._storage, "load", flip)
    with pytest.raises(checkpoint.DamagedError, match=r"params: layers\.groups\.0\.0\.w$"):
        checkpoint.load(tmp_path / "1", {"params": nn.partition(model)[0]}, groupings=nn.tree.groupings(model))


def test_names_of_layers():
    groupings = {"layers": [[1, 1], [2, 2]], "vision.layers": [[2, 1]]}
    names = lambda name: checkpoint.layer_paths(name, groupings)
    assert names("layers.groups.1.1.attn.q.w") == [("layers.2.attn.q.w", 0), ("layers.4.attn.q.w", 1)]
    assert names("1.0.mu.layers.groups.0.0.w") == [("1.0.mu.layers.0.w", None)]
    assert names("vision.layers.groups.0.1.w") == [("vision.layers.1.w", None)]
    assert names("my_layers.groups.1.0.w") == [("my_layers.groups.1.0.w", None)]
    assert names("embed.w") == [("embed.w", None)]
    assert checkpoint.layer_paths("0.mu.groups.0.0.w", {"": [[1, 2]]}) == [("0.mu.0.w", 0), ("0.mu.1.w", 1)]
