"""Scaled FP8 as DeepSeek V3 and Ministral 3 store it, and MXFP4 as GPT-OSS: equal to their definitions and to
transformers' reading, and loaded as plain weights.
"""

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
from maxlib.models import deepseek, gpt_oss
from maxlib.weights import HFConfig, mxfp4
from maxlib.weights._fp8 import with_scales
from maxlib.weights.files import Header, find_tensors, write_file
from tests.models import parity

QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# Widths with an incomplete last block, and below one.
CFG = dataclasses.replace(
    deepseek.PRESETS["deepseek-v3"],
    vocab=16,
    num_layers=2,
    num_dense=1,
    dim=160,
    mlp_dim=260,
    expert_dim=24,
    num_heads=4,
    q_rank=40,
    kv_rank=130,
    nope_dim=30,
    v_dim=10,
    rope=ops.Rope(8, interleaved=True, max_length=32),
    num_experts=4,
    top_k=2,
    num_groups=1,
    top_groups=1,
)


def quantized(name: str) -> bool:
    return "_proj" in name


def split(weight: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A float8 and its factors, which are as different as they may be."""
    blocks = [-(-n // 128) for n in weight.shape]
    factors = (2.0 ** random.uniform(-9, 9, blocks)).astype(np.float32)
    return weight.astype(ml_dtypes.float8_e4m3fn), factors


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The same weights in FP8, and as the float32 products of its parts."""
    path, random = tmp_path_factory.mktemp("fp8"), np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: deepseek.DeepSeek(CFG, rngs=nnx.Rngs(0)))
    draw = lambda v: random.standard_normal(v.get_value().shape, np.float32)
    drawn = {name: draw(v) for name, v in nn.variables(abstract).items()}
    maxlib.save_pretrained(nn.combine(drawn, abstract), path / "plain")
    plain, stored = load_file(path / "plain" / "model.safetensors"), {}
    for name, value in plain.items():
        stored[name] = value
        if quantized(name):
            stored[name], factors = split(value, random)
            stored[name + "_scale_inv"] = factors
            spread = np.kron(factors, np.ones((128, 128), np.float32))[: value.shape[0], : value.shape[1]]
            plain[name] = stored[name].astype(np.float32) * spread
    save_file(plain, path / "plain" / "model.safetensors")
    write(path / "quantized", stored, read_config(path))
    return path


def write(path, tensors, config, quantization=QUANTIZATION):
    path.mkdir()
    headers = [Header(name, t.dtype, t.shape) for name, t in tensors.items()]
    write_file(path / "model.safetensors", headers, iter(tensors.values()))
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def read_config(path):
    return json.loads((path / "plain" / "config.json").read_text())


def assert_equal(got, want, dtype):
    got, want = ({path: v.get_value() for path, v in nn.variables(m).items()} for m in (got, want))
    assert got.keys() == want.keys()
    for path, value in want.items():
        is_bias = path.endswith("expert_bias")  # which stays float32
        assert dtype is None or is_bias or got[path].dtype == dtype
        np.testing.assert_array_equal(got[path], value.astype(got[path].dtype), err_msg=path)


@pytest.fixture(params=["fp8", "mxfp4"])
def either(request):
    """The directories of each format, and a leaf that is quantized in them."""
    return request.getfixturevalue("directories" if request.param == "fp8" else "mxfp4_directories")


@pytest.mark.parametrize("dtype", [None, pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_it_reads_like_plain_weights(dtype, either):
    got = maxlib.from_pretrained(either / "quantized", dtype=dtype)
    assert_equal(got, maxlib.from_pretrained(either / "plain"), dtype)
    assert got.layers[1].moe.up.w.dtype == (dtype or "bfloat16")
    assert got.embed.w.dtype == (dtype or "float32")  # not quantized: as stored


def test_on_eight_devices(either):
    layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), sharding.FSDP_TP | {"expert": "data"})
    got, want = (
        maxlib.from_pretrained(either / name, layout=layout, dtype="float32") for name in ("quantized", "plain")
    )
    assert_equal(got, want, "float32")


def test_factors_that_do_not_fit_are_refused(directories, tmp_path):
    tensors = {n: t.view() for n, t in maxlib.weights.files.find_tensors(directories / "quantized").items()}
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name + "_scale_inv"] = np.ones((3, 1), np.float32)
    write(tmp_path / "bad", tensors, read_config(directories))
    with pytest.raises(ValueError, match=f"{name}_scale_inv must have a factor for each 128 x 128"):
        maxlib.from_pretrained(tmp_path / "bad")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_factor_for_a_matrix(shape, directories, tmp_path):
    """As Ministral 3 and Devstral Small 2 ship it, with factors of activations that count for nothing here."""
    tensors = {n: t.view() for n, t in maxlib.weights.files.find_tensors(directories / "plain").items()}
    random, plain = np.random.default_rng(1), dict(tensors)
    for name in filter(quantized, list(tensors)):
        factor = np.float32(2.0 ** random.uniform(-9, 9))
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        plain[name] = tensors[name].astype(np.float32) * factor
        tensors[name + "_scale_inv"] = np.full(shape, factor)
        tensors[name.removesuffix("weight") + "activation_scale"] = np.full(shape, np.float32(3))
    config = read_config(directories)
    settings = QUANTIZATION | {"activation_scheme": "static", "weight_block_size": None, "dequantize": False}
    settings |= {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}
    write(tmp_path / "fp8", tensors, config, settings)
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    got = maxlib.from_pretrained(tmp_path / "fp8", dtype="float32")
    assert_equal(got, maxlib.from_pretrained(tmp_path / "plain"), "float32")
    # A factor of what is not scaled is no part of the format.
    write(tmp_path / "more", tensors | {"model.norm.activation_scale": np.ones(shape, np.float32)}, config, settings)
    with pytest.raises(ValueError, match=r"model\.norm\.activation_scale"):
        maxlib.from_pretrained(tmp_path / "more")


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1, 1), (3, 2, 3)], ids=str)
def test_a_stack_of_matrices_has_factors_of_each(shape, tmp_path):
    """One for all, one for each, or one for each block of each; what is cut off is what it would be of the whole."""
    random = np.random.default_rng(2)
    x = random.standard_normal((3, 130, 260)).astype(ml_dtypes.float8_e4m3fn)
    factors = (2.0 ** random.uniform(-9, 9, shape)).astype(np.float32)
    blocks = np.ones((1, 128, 128), np.float32)
    spread = np.kron(factors, blocks)[:, :130, :260] if shape == (3, 2, 3) else factors.reshape(-1, 1, 1)
    want = x.astype(np.float32) * spread
    activation = np.ones(3, np.float32)
    write(tmp_path / "x", {"x": x, "x_scale_inv": factors, "x_activation_scale": activation}, {})
    tensors = with_scales(find_tensors(tmp_path / "x"))
    assert tensors.keys() == {"x"}
    np.testing.assert_array_equal(tensors["x"].view(), want)
    half = lambda values: values.reshape(3, 2, 65, 260)[1:, 1, :, ::2].transpose(2, 0, 1)
    np.testing.assert_array_equal(tensors["x"].part(half), half(want))


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (3, 2, 2), (3, 1)], ids=str)
def test_factors_that_do_not_fit_a_stack_are_refused(shape, tmp_path):
    x = np.ones((3, 130, 260), ml_dtypes.float8_e4m3fn)
    write(tmp_path / "x", {"x": x, "x_scale_inv": np.ones(shape, np.float32)}, {})
    with pytest.raises(ValueError, match="x_scale_inv must have a factor for each 128 x 128 of x, .* or one for each"):
        with_scales(find_tensors(tmp_path / "x"))


@pytest.mark.parametrize(
    "change", [{"quant_method": "quip"}, {"weight_block_size": [64, 64]}], ids=lambda c: next(iter(c))
)
def test_other_quantizations_are_refused(change):
    with pytest.raises(ValueError, match="quantization_config"):
        HFConfig({"quantization_config": QUANTIZATION | change}).done()
    HFConfig({"quantization_config": QUANTIZATION}).done()


# --- MXFP4 ---

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
OSS_CFG = dataclasses.replace(
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
def mxfp4_directories(tmp_path_factory):
    """The same weights in MXFP4, and as the values that this stands for."""
    path, random = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: gpt_oss.GptOss(OSS_CFG, rngs=nnx.Rngs(0)))
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
    write(path / "quantized", stored, config, MXFP4)
    return path


@pytest.mark.full  # by default values are compared with transformers', and logits in tests/models/test_families.py
def test_logits_are_those_of_transformers_on_the_same_files(mxfp4_directories):
    """transformers dequantizes by itself where there is no kernel for the format."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        mxfp4_directories / "quantized",
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    tokens = parity.tokens(OSS_CFG.vocab, 24)
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    got = parity.logits(maxlib.from_pretrained(mxfp4_directories / "quantized"), tokens)
    assert np.abs(got - want).max() < 1e-4 * want.std()


def test_export_is_plain(mxfp4_directories, tmp_path):
    model = maxlib.from_pretrained(mxfp4_directories / "quantized")
    maxlib.save_pretrained(model, tmp_path / "export")
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert stored.keys() == load_file(mxfp4_directories / "plain" / "model.safetensors").keys()
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].dtype == jnp.bfloat16
    assert_equal(maxlib.from_pretrained(tmp_path / "export"), model, None)


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
def test_damaged_tensors_are_named_before_any_is_read(kind, change, message, mxfp4_directories, tmp_path):
    tensors = load_file(mxfp4_directories / "quantized" / "model.safetensors")
    old = tensors.pop(f"model.layers.1.mlp.experts.{kind}")
    if change is not None:
        tensors[f"model.layers.1.mlp.experts.{kind}"] = change(old)
    write(tmp_path / "bad", tensors, read_config(mxfp4_directories), MXFP4)
    with pytest.raises(ValueError, match=message):
        maxlib.from_pretrained(tmp_path / "bad")


def test_rows_of_another_number_are_named(mxfp4_directories, tmp_path):
    tensors = load_file(mxfp4_directories / "quantized" / "model.safetensors")
    for kind in ("blocks", "scales"):
        tensors[f"model.layers.2.mlp.experts.gate_up_proj_{kind}"] = tensors[
            f"model.layers.2.mlp.experts.gate_up_proj_{kind}"
        ][:, :-2]
    write(tmp_path / "bad", tensors, read_config(mxfp4_directories), MXFP4)
    with pytest.raises(ValueError, match=r"gate.w gives \(4, 31, 64\), but must give \(4, 32, 64\)"):
        maxlib.from_pretrained(tmp_path / "bad")


@pytest.mark.parametrize("change", [{"quant_method": "fp8"}, {"group_size": 64}], ids=lambda c: next(iter(c)))
def test_other_quantizations_than_mxfp4_are_refused(change):
    fields = HFConfig(gpt_oss.FIELDS.write(OSS_CFG) | {"quantization_config": MXFP4 | change})
    with pytest.raises(ValueError, match=rf"quantization_config\.{next(iter(change))}"):
        gpt_oss.FIELDS.read(fields)
        fields.done()
