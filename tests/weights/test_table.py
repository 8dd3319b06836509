"""Round trips of every kind of table entry, on one device and on eight, with every layout of the stack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn, sharding
from maxlib.weights import Convert, Ignore, Weight, load
from maxlib.weights._table import parse
from tests.weights import zoo
from tests.weights.zoo import FAMILY, E, N

RULES = {"expert": "data", "embed": "fsdp", "mlp": "tensor", "kv_heads": "tensor", "heads": "tensor", "vocab": "data"}


@pytest.fixture(scope="module")
def model():
    return zoo.zoo()


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "hf"
    maxlib.save_pretrained(model, path, family=FAMILY)
    return path


def arrays(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(v.get_value()) for path, v in nn.variables(model).items()}


def equal(a, b, but: str = "bias") -> bool:
    """Bit for bit, but for what goes through exp and log."""
    a, b = arrays(a), arrays(b)
    near = lambda k: np.allclose(a[k], b[k], atol=1e-6) if but in k else np.array_equal(a[k], b[k])
    return a.keys() == b.keys() and all(near(k) for k in a)


def test_export_is_what_the_table_says(model, exported):
    files = load_file(exported / "model.safetensors")
    layers, model = jax.device_get(jax.jit(lambda model: (list(model.text), model))(model))
    for i, layer in enumerate(layers):
        q, k, v = (np.asarray(part.w[...]).reshape(-1, zoo.D) for part in (layer.q, layer.k, layer.v))
        qkv = files[f"model.layers.{i}.qkv.weight"]
        np.testing.assert_array_equal(qkv, np.concatenate([q, k, v]))
        assert files[f"model.layers.{i}.scale"].shape == ()
        assert (f"model.layers.{i}.gate_up.weight" in files) == (i == 0)
        assert (f"model.layers.{i}.log_bias" in files) == (i % 2 == 1)
    np.testing.assert_array_equal(
        files["model.layers.0.gate_up.weight"], np.concatenate([layers[0].gate.w[...], layers[0].up.w[...]])
    )
    gate_up = files["model.layers.3.experts.gate_up"]
    np.testing.assert_array_equal(gate_up[..., ::2], np.swapaxes(layers[3].experts["gate"].w[...], 1, 2))
    np.testing.assert_array_equal(gate_up[..., 1::2], np.swapaxes(layers[3].experts["up"].w[...], 1, 2))
    for e in range(E):
        np.testing.assert_array_equal(files[f"model.layers.5.experts.{e}.down.weight"], layers[5].experts["down"].w[e])
    np.testing.assert_allclose(files["model.layers.1.log_bias"], np.exp(layers[1].bias.w[...]), rtol=1e-6)
    np.testing.assert_array_equal(files["vision.blocks.2.proj.weight"], model.tower["layers"][2].w[...])
    np.testing.assert_array_equal(files["heads.1.weight"], model.heads[1].w[...])
    assert not any("calls" in name or "f8" in name or name == "head.weight" for name in files)


def test_import_is_the_inverse(model, exported):
    back = maxlib.from_pretrained(exported, family=FAMILY)
    assert equal(back, model)
    assert back.text[4].calls[...] == 7  # stored nowhere: born anew


def test_on_eight_devices_both_ways(model, exported, tmp_path):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    spread = maxlib.from_pretrained(exported, layout=sharding.Layout(mesh, RULES), family=FAMILY)
    assert equal(spread, model)
    gate = spread.text.groups[1][0].experts["gate"].w.get_value()
    assert gate.sharding.spec == jax.sharding.PartitionSpec(None, "data", "tensor", "fsdp")
    assert gate.addressable_shards[0].data.size == gate.size // 8
    maxlib.save_pretrained(spread, tmp_path / "again", family=FAMILY)
    ours, theirs = load_file(tmp_path / "again" / "model.safetensors"), load_file(exported / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(np.allclose(ours[k], theirs[k], rtol=1e-5) for k in ours)


@pytest.mark.parametrize("kinds", ["abcdcd", pytest.param("abcbcd", marks=pytest.mark.full)])
def test_exports_do_not_depend_on_the_groups(kinds, model, exported, tmp_path):
    @jax.jit
    def laid_out_anew(model):
        other = jax.tree.map(lambda x: x, model)
        other.text = other.text.restacked(kinds)
        return other, nn.unstack(other)

    other, apart = laid_out_anew(model)
    for variant in (other, apart):
        path = tmp_path / str(variant is other)
        maxlib.save_pretrained(variant, path, family=FAMILY)
        assert (path / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_quantized_tensors_are_read_in_place_of_plain_ones(exported, tmp_path):
    files = load_file(exported / "model.safetensors")
    downs = {}
    for i in range(1, 6):
        plain = [files.pop(f"model.layers.{i}.experts.{e}.down.weight") for e in range(E)]
        w, scale = zoo.quantize(np.stack(plain))
        files |= {f"model.layers.{i}.experts.down_f8": w, f"model.layers.{i}.experts.down_scale": scale}
        downs[i] = zoo.dequantize(w, scale)
    maxlib.weights.files.write_file(
        tmp_path / "model.safetensors",
        [maxlib.weights.files.Header(n, t.dtype, t.shape) for n, t in files.items()],
        iter(files.values()),
    )
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    model = maxlib.from_pretrained(tmp_path, family=FAMILY, layout=sharding.Layout(mesh, RULES))
    for i, want in downs.items():
        got = model.text[i].experts["down"].w[...]
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, want)
    maxlib.save_pretrained(model, tmp_path / "plain", family=FAMILY)  # one-way: written as plain weights
    assert "model.layers.1.experts.0.down.weight" in load_file(tmp_path / "plain" / "model.safetensors")


def test_a_quantized_read_takes_only_what_a_device_needs(model, exported, tmp_path):
    """`batch` axes reach the function already cut, one index at a time."""
    seen = []

    def dequantize(w, scale):
        seen.append((w.shape, scale.shape))
        return w * scale

    class Experts(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros((E, 4, 6)), axes=("expert", "embed", "mlp"))

    w, scale = np.arange(E * 24.0, dtype=np.float32).reshape(E, 4, 6), np.full((E, 1, 1), 2, np.float32)
    save_file({"w": w, "scale": scale}, tmp_path / "model.safetensors")
    table = [Convert(("w", "scale"), "w", load=dequantize, batch=1, dtype="float32")]
    mesh = sharding.make_mesh(data=4, fsdp=2)
    loaded = load(Experts, table, tmp_path, layout=sharding.Layout(mesh, {"expert": "data", "embed": "fsdp"}))
    np.testing.assert_array_equal(loaded.w[...], 2 * w)
    assert seen == [
        ((0, 4, 6), (0, 1, 1)),
        *[((1, 4, 6), (1, 1, 1))] * E * 2,
    ]  # a trial; each expert for both parts of `embed`


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Weight("model.embed.weight", "embed.w", "V D -> V"), r"names 1 axes on the right, but the leaf has 2"),
        (Weight("model.embed.weight", "embed.w", "V D -> (V D)"), r"must read like"),
        (Weight("model.embed.weight", "embed.w", "V V -> V D"), r"must read like"),
        (Weight("model.embed.weight", "embed.w", "V D X -> V D"), r"each axis must be on both sides"),
        (Weight("model.embed.weight", "embed.w", "D -> e D"), r"each axis must be on both sides"),
        (Weight("model.embed.weight", "embed.w", "V D -> V D", at={"X": 1}), r"each axis must be on both sides"),
        (Weight("model.embed.weight", "embed.w", "V D -> V D", at={"V": 1}), r"must fill it exactly"),
    ],
)
def test_wrong_tables_are_refused(change, message, exported):
    table = [change, *zoo.table(zoo.Config())[1:]]
    with pytest.raises(ValueError, match=message):
        load(lambda: zoo.Zoo(zoo.Config(), rngs=nnx.Rngs(0)), table, exported)


@pytest.mark.parametrize(
    ("pattern", "at", "message"),
    [
        ("(K H) D -> K H D", {}, r"qkv.weight: its weights \(.*\) must fill it exactly"),  # over q: a gap, too
        ("(K H) D -> K H D", {"K": N - 1}, "must fill it exactly"),
        ("K H D -> K H D", {"K": N}, "describe it with different axes"),
    ],
)
def test_pieces_of_one_tensor_fit_together(pattern, at, message, exported):
    table = [e for e in zoo.table(zoo.Config()) if getattr(e, "path", "") != "text.{i}.k.w"]
    table.append(Weight("model.layers.{i}.qkv.weight", "text.{i}.k.w", pattern, at=at))
    with pytest.raises(ValueError, match=message):
        load(lambda: zoo.Zoo(zoo.Config(), rngs=nnx.Rngs(0)), table, exported)


def test_a_leaf_has_one_source(exported):
    table = [*zoo.table(zoo.Config()), Weight("heads.0.weight", "heads.1.w")]
    with pytest.raises(ValueError, match=r"fill exactly \(1\):\n  heads.1.w \(32 of 16 values\)|must fill it exactly"):
        load(lambda: zoo.Zoo(zoo.Config(), rngs=nnx.Rngs(0)), table, exported)


def test_patterns():
    assert parse("(N H) D -> N H D", 3) == ((("N", "H"), ("D",)), ("N", "H", "D"))
    assert parse(None, 2) == ((("axis0",), ("axis1",)), ("axis0", "axis1"))
    assert parse(None, 0) == ((), ())


def test_ignored_names():
    layer = Ignore("model.layers.{i}.rotary.inv_freq")
    assert layer.matches("model.layers.12.rotary.inv_freq")
    assert not layer.matches("model.layers.x.rotary.inv_freq")
    assert not layer.matches("model.layers.1.rotaryxinv_freq")
    assert Ignore("mtp.*").matches("mtp.0.norm.weight")


def test_ignored_and_copied_tensors(exported, tmp_path):
    files = load_file(exported / "model.safetensors")
    extra = {
        "model.layers.3.rotary.inv_freq": np.ones(3),
        "mtp.0.w": np.ones(3),
        "head.weight": files["model.embed.weight"],
    }
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    save_file(files | extra, tmp_path / "model.safetensors")
    maxlib.from_pretrained(tmp_path, family=FAMILY)
    save_file(files | extra | {"head.weight": -files["model.embed.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"head.weight differs from model.embed.weight, but the config ties them"):
        maxlib.from_pretrained(tmp_path, family=FAMILY)
    (tmp_path / "config.json").write_text('{"model_type": "zoo", "layers": 6, "tied": false}')
    untied = maxlib.from_pretrained(tmp_path, family=FAMILY)
    np.testing.assert_array_equal(untied.head.w[...], -untied.embed.w[...])


def test_another_spelling_is_read(model, exported, tmp_path):
    files = load_file(exported / "model.safetensors")
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    old = {name.replace("vision.", "tower."): tensor for name, tensor in files.items()}
    save_file(old, tmp_path / "model.safetensors")
    assert equal(maxlib.from_pretrained(tmp_path, family=FAMILY), model)
    save_file(old | files, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tower.* is another name of vision.*keep one|vision.* is another name"):
        maxlib.from_pretrained(tmp_path, family=FAMILY)


def test_a_weight_that_cannot_be_written_is_named(model, tmp_path):
    one_way = [e for e in zoo.table(zoo.Config()) if "down" not in getattr(e, "path", "") or isinstance(e, Convert)]
    family = dataclasses.replace(FAMILY, table=lambda cfg: one_way)
    with pytest.raises(ValueError, match=r"no entry that can write .*experts.down.w \(0 of"):
        maxlib.save_pretrained(model, tmp_path / "hf", family=family)
    assert not list(tmp_path.iterdir())
