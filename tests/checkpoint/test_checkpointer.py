"""Saving and restoring: all values are restored bit for bit with any sharding, or an error names the mismatch."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib import checkpoint, nn
from maxlib.checkpoint import Checkpointer
from tests.training.stacked import abstract_model, state_of


def assert_same(a, b):
    """Equal to the bit: structure, kind of leaf, dtype, content (NaN payloads and signs of zeros too)."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert isinstance(x, jax.Array) == isinstance(y, jax.Array) and x.dtype == y.dtype and x.shape == y.shape
        x, y = (jax.random.key_data(k) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else k for k in (x, y))
        assert np.array(x).tobytes() == np.array(y).tobytes()


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def grid(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@pytest.fixture
def items():
    """Each dtype and shape that is out of the ordinary."""
    names = "int4 uint4 float8_e4m3fn float8_e5m2 float8_e4m3 uint2 bfloat16 float16 int8"
    narrow = {name: jnp.arange(4).astype(name) for name in names.split()}
    return {
        "params": {"a.w": jnp.array([[1.5, -0.0], [np.nan, np.inf]]), "scalar": jnp.float32(3), "none": jnp.zeros((0, 3))},
        "rest": narrow | {"bool": jnp.array([True, False]), "complex": jnp.array([1 + 2j]), "keys": jax.random.split(jax.random.key(1), 3)},
        "host": {"float64": np.arange(3.0), "int64": np.array(2**40)},
        "opt": (optax.EmptyState(), {"count": jnp.array(7)}),
        "empty": (),
    }  # fmt: skip


def test_everything_comes_back(tmp_path, items):
    data = {"0": {"bins": [[1, 2], []], "count": 3}, "1": {"bins": [], "count": 3}}
    with Checkpointer(tmp_path, groupings={"layers": [[1, 2]]}) as ck:
        ck.save(5, items, data=data, meta={"config": {"dim": 4, 10: "x", 9: None}, "loss": float("inf")})
        ck.wait()
        assert (ck.steps(), ck.latest(), ck.verify(5)) == ([5], 5, [])
        got = ck.restore(like=items)
    assert_same({name: got[name] for name in items}, items)
    assert got["data"] == data
    assert got["meta"] == {
        "config": {"dim": 4, "10": "x", "9": None},
        "loss": float("inf"),
        "format": 1,
        "step": 5,
        "layouts": {"layers": [[1, 2]]},
    }
    assert_same(got["host"], checkpoint.load(tmp_path)["host"])  # everything, without being told what
    assert not list(tmp_path.rglob("*.pkl")) and not list(tmp_path.rglob("*.pickle"))


def test_a_model_and_its_optimizer(tmp_path):
    model = abstract_model("abcbcbc")
    state = state_of(model)
    layouts = nn.tree.groupings(model)
    with Checkpointer(tmp_path, groupings=layouts) as ck:
        ck.save(1, state)
        got = ck.restore(like={**state, "params": abstract(state["params"])})
        on_disk = checkpoint.load(tmp_path)
    with Checkpointer(tmp_path) as ck:  # without naming the stacks
        assert_same(ck.restore(like={"opt": state["opt"]})["opt"], state["opt"])
    assert_same({name: got[name] for name in state}, state)
    assert_same(nn.combine(got["params"], got["rest"]), nn.combine(state["params"], state["rest"]))
    assert got["meta"]["layouts"] == layouts == {"layers": [[1, 1], [2, 3]]}
    assert set(on_disk["params"]) == set(state["params"])
    assert set(on_disk["rest"]) == {f"layers.groups.{place}.count" for place in ("0.0", "1.0", "1.1")}
    assert "0.mu.layers.groups.1.0.w" in on_disk["opt"] and "0.count" in on_disk["opt"]


def test_a_save_survives_donation(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.arange(100_000.0)
    host = np.arange(10.0)
    want = np.asarray(x).copy()
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"params": {"x": x, "host": host}})
        x = step(x)
        host += 1
        got = ck.restore()["params"]
    np.testing.assert_array_equal(got["x"], want)
    np.testing.assert_array_equal(got["host"], np.arange(10.0))


@pytest.mark.parametrize("spec", [P(None, ("x", "y")), pytest.param(P(), marks=pytest.mark.full)], ids=str)
def test_onto_another_mesh(tmp_path, spec):
    want = jax.random.normal(jax.random.key(0), (16, 8))
    key = jax.random.key(3)
    saved = jax.device_put(want, NamedSharding(grid(a=4, b=2), P("b", "a")))
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"params": {"w": saved}, "rest": {"key": key}})
        there = NamedSharding(grid(x=2, y=4), spec)
        key_there = jax.device_put(key, NamedSharding(grid(x=8), P()))
        got = ck.restore(like={"params": abstract({"w": want}, there), "rest": {"key": key_there}})
    assert got["params"]["w"].sharding == there
    assert got["rest"]["key"].sharding.is_equivalent_to(key_there.sharding, 0)
    assert_same(jax.device_get(got["params"]), jax.device_get({"w": want}))


def test_parameters_only_by_path_with_a_cast(tmp_path):
    state = state_of(abstract_model())
    trainable = state["params"]
    with Checkpointer(tmp_path / "run") as ck:
        ck.save(3, state)
    like = {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), trainable)}
    want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trainable)
    for path in (tmp_path / "run", tmp_path / "run" / "3", str(tmp_path / "run")):
        got = checkpoint.load(path, like, cast=True)
        assert set(got) == {"params", "data", "meta"}
        assert_same(got["params"], want)
    with pytest.raises(ValueError, match=r"saved float32\[8\], wanted bfloat16\[8\]"):
        checkpoint.load(tmp_path / "run", like)
    assert set(checkpoint.load(tmp_path / "run", items=["params"])) == {"params", "data", "meta"}


def test_another_model_is_refused_with_names_and_shapes(tmp_path):
    saved = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4), "old": jnp.zeros(1)}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"params": saved})
        with pytest.raises(ValueError) as error:
            ck.restore(
                like={"params": {"a": jnp.zeros((3, 2)), "b": jnp.zeros(4, jnp.int32), "new": jnp.zeros((5, 6))}}
            )
        message = str(error.value)
        assert "it lacks:\n  new float32[5,6]\n" in message
        assert "nothing takes:\n  old float32[1]\n" in message
        assert "a: saved float32[2,3], wanted float32[3,2]\n  b: saved float32[4], wanted int32[4]\n" in message
        assert "cast=True" in message and str(tmp_path) in message
        with pytest.raises(ValueError, match=r"items \['opt'\] were requested, but .* only has \['params'\]"):
            ck.restore(like={"opt": {}})


def test_the_newest_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep=2, every=10) as ck:
        assert [s for s in range(35) if ck.should_save(s)] == [10, 20, 30]
        assert ck.latest() is None and ck.steps() == []
        with pytest.raises(FileNotFoundError, match="no complete step"):
            ck.restore()
        for step in (10, 20, 30):
            ck.save(step, {"params": {"x": jnp.array(step)}})
    with Checkpointer(tmp_path, keep=2) as ck:
        assert (ck.steps(), ck.latest()) == ([20, 30], 30)
        assert ck.restore()["params"]["x"] == 30
        assert ck.restore(20)["params"]["x"] == 20
        with pytest.raises(FileNotFoundError, match=r"no complete step 10; it has \[20, 30\]"):
            ck.restore(10)


def test_good_steps_of_another_history_are_not_overwritten(tmp_path):
    with Checkpointer(tmp_path) as ck:
        for step in (10, 20):
            ck.save(step, {"params": {"x": jnp.array(step)}})
        ck.save(20, {"params": {"x": jnp.array(-1)}})  # the last save of a run may be the periodic one
    with Checkpointer(tmp_path) as ck:
        for step in (10, 15, 20):
            with pytest.raises(ValueError, match=rf"Step {step} cannot be saved.*already has the steps \[.*20\]"):
                ck.save(step, {"params": {"x": jnp.array(-1)}})
        assert ck.restore()["params"]["x"] == 20
        ck.save(20, {"params": {"x": jnp.array(-1)}})
        ck.save(30, {"params": {"x": jnp.array(30)}})
        ck.wait()
        assert (ck.steps(), ck.restore(20)["params"]["x"]) == ([10, 20, 30], 20)


def test_a_directory_without_checkpoints(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"neither a complete step .* it has \['notes.txt'\]"):
        checkpoint.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no directory"):
        checkpoint.load(tmp_path / "nowhere")


@pytest.mark.parametrize("bad", [{"data": {"0": {1, 2}}}, {"meta": {"rng": np.arange(3)}}], ids=["data", "meta"])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, bad):
    with Checkpointer(tmp_path) as ck:
        with pytest.raises(ValueError, match=rf"{next(iter(bad))} must consist of JSON types"):
            ck.save(1, {"params": {"x": jnp.zeros(2)}}, **bad)
        ck.save(1, {"params": {"x": jnp.zeros(2)}})
    assert ck.steps() == [1]


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("maxlib.checkpoint._records.FORMAT", 2)
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"params": {"x": jnp.zeros(2)}})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format 2, this maxlib reads up to 1"):
        checkpoint.load(tmp_path)


def test_keys_of_another_kind_are_refused(tmp_path):
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"rest": {"key": jax.random.key(0)}})
        with pytest.raises(ValueError, match="key"):
            ck.restore(like={"rest": {"key": jax.random.key(0, impl="rbg")}})


def test_an_error_in_the_with_block_is_the_one_seen(tmp_path, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as ck:
        ck.save(1, {"params": {"x": jnp.zeros(2)}})
        _ = 1 / 0
    assert ck.steps() == [1]  # what was under way is finished


def test_what_a_killed_save_left_goes_once_and_before_anything_is_saved(tmp_path):
    def left(step: int) -> None:
        for i in range(100):
            (tmp_path / f"{step}.orbax-checkpoint-tmp" / str(i)).mkdir(parents=True)

    left(1)
    assert Checkpointer(tmp_path).latest() is None  # somebody looks, and another one begins at once
    with Checkpointer(tmp_path) as ck:
        assert not list(tmp_path.glob("1.*"))
        left(2)  # as if `ck` were saving it
        assert Checkpointer(tmp_path).latest() is None and list(tmp_path.glob("2.*"))
        ck.save(3, {"params": {"w": jnp.ones(3)}})
    with Checkpointer(tmp_path) as ck:
        assert ck.steps() == [3] and not list(tmp_path.glob("2.*"))


def test_listing_steps_reads_none_of_their_files(tmp_path, caplog):
    """Another host may be deleting a step that this one lists: orbax warns of files that are gone."""
    with Checkpointer(tmp_path) as ck, caplog.at_level(logging.WARNING):
        ck.save(3, {"params": {"w": jnp.ones(2)}})
        ck.wait()
        (tmp_path / "3" / "_CHECKPOINT_METADATA").unlink()
        assert ck.steps() == [3] and not caplog.records
