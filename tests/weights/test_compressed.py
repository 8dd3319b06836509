"""Quantized models in compressed-tensors: transformers computes the same, and what is kept has the same bits."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn, ops, quantization
from maxlib.__main__ import main
from maxlib.models import llama, phi3
from maxlib.weights.files import Header, write_file
from tests.models import parity
from tests.nn.tiny import filled

CFG = llama.Config(
    vocab=64,
    num_layers=2,
    dim=64,
    mlp_dim=96,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rope=ops.Rope(32, max_length=64),
)


@pytest.fixture(scope="module")
def model():
    return filled(lambda: llama.Llama(CFG, rngs=nnx.Rngs(0)))


def quantized(model, rules):
    """In one program: op by op it takes seconds."""
    return jax.jit(lambda model: quantization.for_inference(model, rules))(model)


full_precision = jax.jit(quantization.full_precision)
FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("int4", "int8", "fp8")]


@pytest.fixture(scope="module", params=["int4_asymmetric", "int8_w8a8", *FULL])
def written(request, model, tmp_path_factory):
    """A quantized model, and its directory."""
    path = tmp_path_factory.mktemp("compressed") / request.param
    small = quantized(model, request.param)
    if request.param.startswith("int4"):  # GPTQ gives some groups a negative scale
        values = {p: v.get_value() for p, v in nn.variables(small).items()}
        small = nn.combine({p: -v if p.endswith("w.scale") else v for p, v in values.items()}, small)
    maxlib.save_pretrained(small, path, quantized="compressed-tensors")
    return small, path


def test_kept_weights_have_the_same_bits(written):
    small, path = written
    got = maxlib.from_pretrained(path, keep_quantized=True)
    want = {p: v.get_value() for p, v in nn.variables(small).items()}
    assert nn.variables(got).keys() == want.keys()
    for p, value in want.items():
        np.testing.assert_array_equal(nn.variables(got)[p].get_value(), value, err_msg=p)
    dequantized = nn.variables(maxlib.from_pretrained(path))
    for p, value in nn.variables(full_precision(small)).items():
        np.testing.assert_array_equal(dequantized[p].get_value(), value.get_value(), err_msg=p)


def test_transformers_computes_the_same(written):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    small, path = written
    # compressed-tensors 0.20 gives packed zero points the shape of unpacked ones, unless weights are dequantized.
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    options = options if path.name == "int4_asymmetric" else {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    tokens = parity.tokens(CFG.vocab, 24)
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    got = parity.logits(small, tokens)
    if path.name.endswith(
        "w8a8"
    ):  # the largest number of a token is half-way between 127 and 128: its last bit decides
        rounding = (got - parity.logits(full_precision(small), tokens)).std()
        assert (got - want).std() < 1.5 * rounding
    else:
        assert np.abs(got - want).max() < 2e-5 * want.std()


def test_awq_stays_in_four_bits(model, tmp_path, caplog):
    """Kept with its zero points, it has the values of what is dequantized; `quantization.save` stores them too."""
    maxlib.save_pretrained(model, tmp_path / "awq")
    file, random = tmp_path / "awq" / "model.safetensors", np.random.default_rng(0)
    tensors = load_file(file)
    for name in [name for name in tensors if "_proj" in name]:
        O, I = tensors.pop(name).shape
        of = name.removesuffix("weight")
        words = random.integers(-(2**31), 2**31, (I + I // 32, O // 8), np.int64).astype(np.int32)
        tensors |= {f"{of}qweight": words[:I], f"{of}qzeros": words[I:]}
        tensors[f"{of}scales"] = random.uniform(0.01, 0.02, (I // 32, O)).astype(np.float16)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 32}
    (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
    got = maxlib.from_pretrained(tmp_path / "awq", keep_quantized=True)
    assert "full precision" not in caplog.text
    assert {site.w.qtype for _, site in nn.tree.find(got.layers, nn.Einsum)} == {"int4"}
    quantization.save(got, tmp_path / "again")
    want = nn.variables(maxlib.from_pretrained(tmp_path / "awq"))
    for kept in (got, quantization.load(tmp_path / "again")):
        for path, value in nn.variables(full_precision(kept)).items():
            np.testing.assert_array_equal(value.get_value(), want[path].get_value(), err_msg=path)


def test_formats_that_it_lacks_are_named(model, tmp_path):
    with pytest.raises(ValueError, match=r"save_pretrained.*quantization\.save"):
        maxlib.save_pretrained(quantized(model, "int8"), tmp_path / "plain")
    with pytest.raises(ValueError, match=r"q_proj\.weight of shape .* in nf4 cannot be written"):
        rules = quantization.Format("nf4", group=32)
        maxlib.save_pretrained(quantized(model, rules), tmp_path / "nf4", quantized="compressed-tensors")
    with pytest.raises(ValueError, match="the model has no quantized weights"):
        maxlib.save_pretrained(model, tmp_path / "none", quantized="compressed-tensors")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_it(model, tmp_path):
    maxlib.save_pretrained(model, tmp_path / "plain")
    arguments = [str(tmp_path / "plain"), str(tmp_path / "small"), "--quantize", "int4", "--compressed-tensors"]
    assert main(["convert", *arguments]) == 0
    stated = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert stated["quant_method"] == "compressed-tensors" and stated["format"] == "pack-quantized"
    assert main(["convert", str(tmp_path / "small"), str(tmp_path / "again"), "--compressed-tensors"]) == 0
    small, again = (load_file(tmp_path / name / "model.safetensors") for name in ("small", "again"))
    assert small.keys() == again.keys() and all(np.array_equal(small[name], again[name]) for name in small)


def test_several_formats_name_their_modules(model, tmp_path):
    rules = [
        quantization.Rule(None, match="layers.attn.o"),
        quantization.Rule(quantization.INFERENCE["int4"], match="layers.mlp.*"),
        quantization.Rule(quantization.INFERENCE["fp8"]),
    ]
    small = quantized(model, rules)
    maxlib.save_pretrained(small, tmp_path / "mixed", quantized="compressed-tensors")
    stated = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    assert stated["format"] == "mixed-precision"
    assert "model.layers.1.self_attn.o_proj" in stated["ignore"] and "lm_head" in stated["ignore"]
    assert "model.layers.0.mlp.up_proj" in stated["config_groups"]["group_1"]["targets"]
    got = maxlib.from_pretrained(tmp_path / "mixed", keep_quantized=True)
    tokens = parity.tokens(CFG.vocab, 24)
    np.testing.assert_array_equal(parity.logits(got, tokens), parity.logits(small, tokens))


@pytest.mark.parametrize("format", [quantization.INFERENCE["int8"], None], ids=["int8", "plain"])
def test_layers_in_different_formats_are_dequantized_and_named(format, model, tmp_path, caplog):
    """Both are in one array of the model, which has one format."""
    rules = [
        quantization.Rule(format, match="layers.mlp.*", layers=(0,)),
        quantization.Rule(quantization.INFERENCE["int4"]),
    ]
    small = quantized(model, rules)
    maxlib.save_pretrained(small, tmp_path / "mixed", quantized="compressed-tensors")
    got = maxlib.from_pretrained(tmp_path / "mixed", keep_quantized=True)
    assert "read in full precision" in caplog.text and "layers.groups.0.0.mlp.up" in caplog.text
    assert "attn" not in caplog.text
    np.testing.assert_array_equal(
        nn.variables(got)["layers.groups.0.0.mlp.up.w"].get_value(),
        nn.variables(maxlib.from_pretrained(tmp_path / "mixed"))["layers.groups.0.0.mlp.up.w"].get_value(),
    )


def test_fp8_in_blocks_is_dequantized_and_named(model, tmp_path, caplog):
    maxlib.save_pretrained(model, tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = np.ones([-(-n // 128) for n in tensors[name].shape], np.float32)
    headers = [Header(name, array.dtype, array.shape) for name, array in tensors.items()]
    write_file(file, headers, iter(tensors.values()))
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    maxlib.from_pretrained(tmp_path / "fp8", keep_quantized=True)
    assert "read in full precision" in caplog.text and "layers.groups.0.0.mlp.up" in caplog.text


def test_parts_of_a_fused_tensor_have_one_format(tmp_path):
    cfg = phi3.Config(
        vocab=64, num_layers=2, dim=64, mlp_dim=96, num_heads=2, num_kv_heads=1, head_dim=32, rope=CFG.rope
    )
    rules = [quantization.Rule(quantization.INFERENCE["int4"], match="layers.attn.q")]
    small = quantized(filled(lambda: phi3.Phi3(cfg, rngs=nnx.Rngs(0))), rules)
    with pytest.raises(ValueError, match=r"qkv_proj\.weight must be quantized in one format, got"):
        maxlib.save_pretrained(small, tmp_path / "fused", quantized="compressed-tensors")
