"""MXFP4: equal to its definition and to transformers' reading; a checkpoint as GPT-OSS's reads like plain weights."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn, ops, sharding
from maxlib.models import gpt_oss
from maxlib.weights import HFConfig, mxfp4
from tests.models import parity

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
CFG = dataclasses.replace(
    gpt_oss.PRESETS["gpt-oss-20b"],
    vocab=64,
    num_layers=3,
    dim=64,
    expert_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    window=4,
    num_experts=4,
    top_k=2,
    rope=ops.Rope(16, 1e4, max_length=64),
)


def defined(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values in float32 by the number types that ml_dtypes has of its own."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    with np.errstate(over="ignore"):
        values = halves * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None, None]
    return values.reshape(*scales.shape[:-1], -1)


def every_pair() -> tuple[np.ndarray, np.ndarray]:
    """Every byte with every scale."""
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (256, 16, 16))
    return np.ascontiguousarray(blocks), np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)


def test_every_value_is_as_defined():
    got = mxfp4.dequantize(*every_pair())
    assert got.dtype == jnp.bfloat16
    assert got.shape == (256, 512)
    np.testing.assert_array_equal(got.astype(np.float32), defined(*every_pair()))
    assert np.isnan(got[255].astype(np.float32)).all()


def test_every_value_is_as_in_transformers():
    torch = pytest.importorskip("torch")
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks, scales = (x[None, :255] for x in every_pair())  # transformers knows no NaN
    theirs = convert(torch.from_numpy(blocks), torch.from_numpy(scales)).float().numpy()
    np.testing.assert_array_equal(mxfp4.dequantize(blocks, scales).astype(np.float32), theirs.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (np.zeros((2, 3, 15), np.uint8), np.zeros((2, 3), np.uint8), r"must be of 16 bytes.*\(2, 3, 15\)"),
        (np.zeros((2, 3, 16), np.uint8), np.zeros((2, 4), np.uint8), r"a scale each.*\(2, 4\)"),
        (np.zeros((2, 3, 16), np.uint8), np.zeros((2, 3, 1), np.uint8), r"a scale each.*\(2, 3, 1\)"),
        (np.zeros(16, np.uint8), np.zeros((), np.uint8), "a scale each"),
        (np.zeros((3, 16), np.int8), np.zeros(3, np.uint8), "must be uint8, got int8 and uint8"),
        (np.zeros((3, 16), np.uint8), np.zeros(3, np.float32), "must be uint8, got uint8 and float32"),
    ],
)
def test_odd_shapes_and_kinds_are_refused(blocks, scales, message):
    with pytest.raises(ValueError, match=message):
        mxfp4.dequantize(blocks, scales)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The same weights in MXFP4, and as the values that this stands for."""
    path, random = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: gpt_oss.GptOss(CFG, rngs=nnx.Rngs(0)))
    draw = lambda v: 0.3 * random.standard_normal(v.get_value().shape, np.float32)
    drawn = {name: draw(v) for name, v in nn.variables(abstract).items()}
    maxlib.save_pretrained(nn.combine(drawn, abstract), path / "plain")
    plain = load_file(path / "plain" / "model.safetensors")
    stored = dict(plain)
    for name in [n for n in plain if n.endswith(("gate_up_proj", "down_proj"))]:
        E, I, O = stored.pop(name).shape
        blocks = random.integers(0, 256, (E, O, I // 32, 16), np.uint8)
        scales = random.integers(122, 126, (E, O, I // 32), np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(defined(blocks, scales).swapaxes(1, 2))
    save_file(plain, path / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "plain" / "config.json").read_text())
    write(path / "mxfp4", stored, config | {"quantization_config": QUANTIZATION})
    return path


def write(path, tensors, config):
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


def leaves(model):
    return {path: np.asarray(v.get_value()) for path, v in nn.variables(model).items()}


def assert_equal(got, want):
    got, want = leaves(got), leaves(want)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path].astype(np.float32), value.astype(np.float32), err_msg=path)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_it_reads_like_plain_weights(dtype, directories):
    got = maxlib.from_pretrained(directories / "mxfp4", dtype=dtype)
    assert_equal(got, maxlib.from_pretrained(directories / "plain"))
    assert got.layers[1].moe.up.w.dtype == (dtype or "bfloat16")
    assert got.embed.w.dtype == "float32"


def test_on_eight_devices(directories):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    rules = sharding.FSDP_TP | {"expert": "data"}
    assert_equal(
        maxlib.from_pretrained(directories / "mxfp4", layout=sharding.Layout(mesh, rules)),
        maxlib.from_pretrained(directories / "plain"),
    )


def test_logits_are_those_of_transformers_on_the_same_files(directories):
    """transformers dequantizes by itself where there is no kernel for the format."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directories / "mxfp4",
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    tokens = parity.tokens(CFG.vocab, 24)
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    got = parity.logits(maxlib.from_pretrained(directories / "mxfp4"), tokens)
    assert np.abs(got - want).max() < 1e-4 * want.std()


def test_export_is_plain(directories, tmp_path):
    model = maxlib.from_pretrained(directories / "mxfp4")
    maxlib.save_pretrained(model, tmp_path / "export")
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert stored.keys() == load_file(directories / "plain" / "model.safetensors").keys()
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].dtype == jnp.bfloat16
    assert_equal(maxlib.from_pretrained(tmp_path / "export"), model)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gate_up_proj_scales", lambda x: x[..., :-1], r"cannot be converted \(2\):\n.*gate.w.*a scale each"),
        ("gate_up_proj_blocks", lambda x: x[..., :8], "must be of 16 bytes"),
        (
            "down_proj_blocks",
            lambda x: np.concatenate([x, x]),
            r"down.w are \(8, 64, 1, 16\).* must begin with \(4, 64\)",
        ),
        ("down_proj_blocks", lambda x: x.astype(np.int16), "must be uint8"),
        ("down_proj_scales", None, r"missing[^:]*:\n.*mlp.experts.down_proj for"),
    ],
)
def test_damaged_tensors_are_named_before_any_is_read(kind, change, message, directories, tmp_path):
    tensors = load_file(directories / "mxfp4" / "model.safetensors")
    old = tensors.pop(f"model.layers.1.mlp.experts.{kind}")
    if change is not None:
        tensors[f"model.layers.1.mlp.experts.{kind}"] = change(old)
    write(tmp_path / "bad", tensors, json.loads((directories / "mxfp4" / "config.json").read_text()))
    with pytest.raises(ValueError, match=message):
        maxlib.from_pretrained(tmp_path / "bad")


def test_rows_of_another_number_are_named(directories, tmp_path):
    tensors = load_file(directories / "mxfp4" / "model.safetensors")
    for kind in ("blocks", "scales"):
        tensors[f"model.layers.2.mlp.experts.gate_up_proj_{kind}"] = tensors[
            f"model.layers.2.mlp.experts.gate_up_proj_{kind}"
        ][:, :-2]
    write(tmp_path / "bad", tensors, json.loads((directories / "mxfp4" / "config.json").read_text()))
    with pytest.raises(ValueError, match=r"gate.w gives \(4, 31, 64\), but must give \(4, 32, 64\)"):
        maxlib.from_pretrained(tmp_path / "bad")


@pytest.mark.parametrize("change", [{"quant_method": "fp8"}, {"group_size": 64}], ids=lambda c: next(iter(c)))
def test_other_quantizations_are_refused(change):
    fields = HFConfig(gpt_oss.FIELDS.write(CFG) | {"quantization_config": QUANTIZATION | change})
    with pytest.raises(ValueError, match=rf"quantization_config\.{next(iter(change))}"):
        gpt_oss.FIELDS.read(fields)
        fields.done()
