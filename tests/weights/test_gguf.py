"""GGUF: a model read from a file with quantized tensors is the one whose tensors were quantized."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn, ops, weights
from maxlib.models import llama

gguf = pytest.importorskip("gguf")
EXAMPLE = Path(__file__).parents[2] / "examples/interop/export_gguf.py"
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
def example():
    spec = importlib.util.spec_from_file_location("export_gguf", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path, directory, example, kind, **more):
    """The tensors of a directory in one type, under the names and in the order of llama.cpp."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    example.add_config(writer, config, 10_000.0)
    for name, array in example.tensors(directory, config):
        matrix = array.ndim == 2
        data = gguf.quants.quantize(array, kind) if matrix else array
        writer.add_tensor(name, data, raw_dtype=kind if matrix else None)
    for name, array in more.items():
        writer.add_tensor(name.replace("_", "."), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model"
    maxlib.save_pretrained(jax.jit(lambda: llama.Llama(CFG, rngs=nnx.Rngs(0)))(), path)
    return path


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_tensors_have_the_values_that_the_package_computes(kind, directory, example, tmp_path):
    kind = getattr(gguf.GGMLQuantizationType, kind)
    write(tmp_path / "model.gguf", directory, example, kind)
    got = weights.from_gguf(tmp_path / "model.gguf")
    plain = load_file(directory / "model.safetensors")
    # Rounding is along the inputs, so it does not matter that rows are in another order.
    rounded = {
        n: gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind) if x.ndim == 2 else x for n, x in plain.items()
    }
    (tmp_path / "want").mkdir()
    save_file(rounded, tmp_path / "want" / "model.safetensors")
    (tmp_path / "want" / "config.json").write_text((directory / "config.json").read_text())
    want = maxlib.from_pretrained(tmp_path / "want", dtype=jnp.float32)
    assert got.cfg == want.cfg
    for path, value in nn.variables(want).items():
        np.testing.assert_array_equal(nn.variables(got)[path].get_value(), value.get_value(), err_msg=path)


def test_what_is_not_of_the_model_is_named(directory, example, tmp_path):
    write(
        tmp_path / "more.gguf",
        directory,
        example,
        gguf.GGMLQuantizationType.F32,
        rope_freqs_weight=np.ones(16, np.float32),
    )
    with pytest.raises(ValueError, match=r"tensors that a llama does not read: rope\.freqs\.weight"):
        weights.from_gguf(tmp_path / "more.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="an architecture among llama, qwen2, qwen3, got 'mamba'"):
        weights.from_gguf(tmp_path / "other.gguf")
