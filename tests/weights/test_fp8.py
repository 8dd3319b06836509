"""Scaled FP8 in a checkpoint as DeepSeek V3's or Ministral 3's: equal to values times scales, and loaded as plain
weights.
"""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn, ops, sharding
from maxlib.models import deepseek
from maxlib.weights import HFConfig
from maxlib.weights._fp8 import with_scales
from maxlib.weights.files import Header, find_tensors, write_file

QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
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
    write(path / "fp8", stored, json.loads((path / "plain" / "config.json").read_text()))
    return path


def write(path, tensors, config, quantization=QUANTIZATION):
    path.mkdir()
    headers = [Header(name, t.dtype, t.shape) for name, t in tensors.items()]
    write_file(path / "model.safetensors", headers, iter(tensors.values()))
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def assert_equal(got, want, dtype):
    got, want = ({path: v.get_value() for path, v in nn.variables(m).items()} for m in (got, want))
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert dtype is None or got[path].dtype == dtype
        np.testing.assert_array_equal(got[path], value.astype(got[path].dtype), err_msg=path)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_it_reads_like_plain_weights(dtype, directories):
    got = maxlib.from_pretrained(directories / "fp8", dtype=dtype)
    assert_equal(got, maxlib.from_pretrained(directories / "plain"), dtype)
    assert got.layers[1].moe.up.w.dtype == (dtype or "bfloat16")
    assert got.embed.w.dtype == (dtype or "float32")  # not quantized: as stored


def test_on_eight_devices(directories):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    got, want = (
        maxlib.from_pretrained(directories / name, layout=sharding.Layout(mesh), dtype="float32")
        for name in ("fp8", "plain")
    )
    assert_equal(got, want, "float32")


def test_factors_that_do_not_fit_are_refused(directories, tmp_path):
    tensors = {n: t.view() for n, t in maxlib.weights.files.find_tensors(directories / "fp8").items()}
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name + "_scale_inv"] = np.ones((3, 1), np.float32)
    write(tmp_path / "bad", tensors, json.loads((directories / "fp8" / "config.json").read_text()))
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
    config = json.loads((directories / "plain" / "config.json").read_text())
    one = QUANTIZATION | {"activation_scheme": "static", "weight_block_size": None, "dequantize": False}
    one |= {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}
    write(tmp_path / "fp8", tensors, config, one)
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    got = maxlib.from_pretrained(tmp_path / "fp8", dtype="float32")
    assert_equal(got, maxlib.from_pretrained(tmp_path / "plain"), "float32")
    # A factor of what is not scaled is no part of the format.
    write(tmp_path / "more", tensors | {"model.norm.activation_scale": np.ones(shape, np.float32)}, config, one)
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
    found = with_scales(find_tensors(tmp_path / "x"))
    assert found.keys() == {"x"}
    np.testing.assert_array_equal(found["x"].view(), want)
    half = lambda values: values.reshape(3, 2, 65, 260)[1:, 1, :, ::2].transpose(2, 0, 1)
    np.testing.assert_array_equal(found["x"].part(half), half(want))


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (3, 2, 2), (3, 1)], ids=str)
def test_factors_that_do_not_fit_a_stack_are_refused(shape, tmp_path):
    x = np.ones((3, 130, 260), ml_dtypes.float8_e4m3fn)
    write(tmp_path / "x", {"x": x, "x_scale_inv": np.ones(shape, np.float32)}, {})
    with pytest.raises(ValueError, match="x_scale_inv must have a factor for each 128 x 128 of x, .* or one for each"):
        with_scales(find_tensors(tmp_path / "x"))


@pytest.mark.parametrize(
    "change",
    [{"quant_method": "gptq"}, {"weight_block_size": [64, 64]}],
    ids=lambda c: next(iter(c)),
)
def test_other_quantizations_are_refused(change):
    with pytest.raises(ValueError, match="quantization_config"):
        HFConfig({"quantization_config": QUANTIZATION | change}).done()
    HFConfig({"quantization_config": QUANTIZATION}).done()
