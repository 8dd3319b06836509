"""GGUF: what is written has the values that the package `gguf` computes, for transformers and when it is read again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn, ops, weights
from maxlib.__main__ import main
from maxlib.models import llama, qwen3
from maxlib.weights import _gguf

gguf = pytest.importorskip("gguf")
SIZES = {"vocab": 64, "num_layers": 2, "dim": 64, "mlp_dim": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
ROPE = ops.Rope(32, max_length=64)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    @functools.cache
    def saved(family, **more):
        path = tmp_path_factory.mktemp("gguf") / family
        module = {"llama": llama.Llama, "qwen3": qwen3.Qwen3}[family]
        cfg = {"llama": llama.Config, "qwen3": qwen3.Config}[family](**SIZES, rope=ROPE, **more)
        maxlib.save_pretrained(jax.jit(lambda: module(cfg, rngs=nnx.Rngs(0)))(), path)
        return path

    return saved


def rounded(directory, dtype):
    """The tensors of a directory with the values that a file of this type has."""
    kind = gguf.GGMLQuantizationType[_gguf.TYPES[dtype][0]]
    # Rounding is along the inputs, so it does not matter that rows are in another order.
    return {
        n: gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind) if x.ndim == 2 else x
        for n, x in load_file(directory / "model.safetensors").items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0", "q4_0", "q4_1"])
def test_tensors_have_the_values_that_the_package_computes(dtype, directories, tmp_path):
    directory = directories("llama")
    weights.save_gguf(directory, tmp_path / "model.gguf", dtype=dtype)
    got = weights.from_gguf(tmp_path / "model.gguf")
    (tmp_path / "want").mkdir()
    save_file(rounded(directory, dtype), tmp_path / "want" / "model.safetensors")
    (tmp_path / "want" / "config.json").write_text((directory / "config.json").read_text())
    want = maxlib.from_pretrained(tmp_path / "want", dtype=jnp.float32)
    assert got.cfg == want.cfg
    for path, value in nn.variables(want).items():
        np.testing.assert_array_equal(nn.variables(got)[path].get_value(), value.get_value(), err_msg=path)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.full)])
def test_transformers_reads_the_same_tensors(family, directories, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    directory = directories(family)
    assert main(["convert", str(directory), str(tmp_path / "model.gguf"), "--quantize", "q8_0"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    for name, tensor in rounded(directory, "q8_0").items():
        np.testing.assert_array_equal(theirs.state_dict()[name].numpy(), tensor, err_msg=name)


def test_what_is_not_of_the_model_is_named(directories, tmp_path):
    weights.save_gguf(directories("llama", attention_bias=True), tmp_path / "more.gguf")
    with pytest.raises(ValueError, match=r"tensors that a llama does not read: blk\.0\.attn_k\.bias"):
        weights.from_gguf(tmp_path / "more.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="an architecture among llama, qwen2, qwen3, got 'mamba'"):
        weights.from_gguf(tmp_path / "other.gguf")


def test_what_a_file_cannot_describe_is_refused(directories, tmp_path):
    directory = directories("llama")
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .* got 'q4_k'"):
        weights.save_gguf(directory, tmp_path / "model.gguf", dtype="q4_k")
    config = (directory / "config.json").read_text()
    for old, new, message in [
        ('"llama"', '"mixtral"', "a model_type among llama, qwen2, qwen3, got 'mixtral'"),
        ('"default"', '"yarn"', "a rope without scaling"),
        ('"model_type"', '"quantization_config": {"quant_method": "awq"}, "model_type"', "got those of awq"),
    ]:
        assert old in config
        (tmp_path / "config.json").write_text(config.replace(old, new))
        with pytest.raises(ValueError, match=message):
            weights.save_gguf(tmp_path, tmp_path / "model.gguf")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FileExistsError, match="overwrite=True replaces it"):
        weights.save_gguf(directory, tmp_path / "model.gguf")
