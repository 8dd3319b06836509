"""GGUF: what is written has the values that the package `gguf` computes, for transformers and when it is read again."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn, ops, weights
from maxlib.__main__ import main
from maxlib.models import llama, qwen2, qwen3
from maxlib.tokenization import save_tokenizer, train_bpe
from maxlib.weights import _gguf
from tests.nn.tiny import filled

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
SIZES = {"vocab": 64, "num_layers": 2, "dim": 64, "mlp_dim": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
ROPE = ops.Rope(32, max_length=64)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    @functools.cache
    def saved(family, **more):
        path = tmp_path_factory.mktemp("gguf") / family
        module = {"llama": llama.Llama, "qwen3": qwen3.Qwen3}[family]
        cfg = {"llama": llama.Config, "qwen3": qwen3.Config}[family](**SIZES, rope=ROPE, **more)
        maxlib.save_pretrained(filled(lambda: module(cfg, rngs=nnx.Rngs(0))), path)
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
        ('"silu"', '"gelu"', "hidden_act must be 'silu', got 'gelu'"),
        ('"model_type"', '"quantization_config": {"quant_method": "awq"}, "model_type"', "got those of awq"),
    ]:
        assert old in config
        (tmp_path / "config.json").write_text(config.replace(old, new))
        with pytest.raises(ValueError, match=message):
            weights.save_gguf(tmp_path, tmp_path / "model.gguf")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FileExistsError, match="overwrite=True replaces it"):
        weights.save_gguf(directory, tmp_path / "model.gguf")


def test_a_window_is_refused(tmp_path):
    cfg = qwen2.Config(**SIZES, rope=ROPE, window=8, layer_types=("sliding_attention",) * 2)
    maxlib.save_pretrained(filled(lambda: qwen2.Qwen2(cfg, rngs=nnx.Rngs(0))), tmp_path / "qwen2")
    with pytest.raises(ValueError, match="must have no sliding window"):
        weights.save_gguf(tmp_path / "qwen2", tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("key", "message"),
    [("llama.rope.scale_linear", "keys that from_gguf does not read, .* got llama.rope.scale_linear"),
     ("split.count", "must hold the whole model, but is one of 2 parts"),
     ("llama.rope.dimension_count", "must turn whole heads of 32 dimensions, got rope.dimension_count = 2")],
)  # fmt: skip
def test_keys_that_change_the_model_are_not_passed_over(key, message, directories, tmp_path, monkeypatch):
    add_config = _gguf._add_config

    def with_key(writer, cfg):
        add_config(writer, cfg)
        writer.kv_data[0].pop(key, None)
        writer.add_uint32(key, 2)

    monkeypatch.setattr(_gguf, "_add_config", with_key)
    weights.save_gguf(directories("llama"), tmp_path / "model.gguf", dtype="float32")
    with pytest.raises(ValueError, match=message):
        weights.from_gguf(tmp_path / "model.gguf")


def tokenizer_fields(directory):
    """What the file of a directory's tokenizer says."""
    writer = gguf.GGUFWriter(directory / "tokenizer.gguf", "llama")
    _gguf._add_tokenizer(writer, directory, 300, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(directory / "tokenizer.gguf").fields
    return {name.removeprefix("tokenizer."): field.contents() for name, field in fields.items()}


def test_texts_have_the_same_ids_in_llama_cpp(tmp_path):
    tokenizer = train_bpe(["a b"], vocab_size=280, special_tokens=["<bos>", "<eos>", "<end>"])
    tokenizer.add_tokens(["<call>"])  # not special, as those of Qwen's calls and thoughts
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 2]}')
    for bos in (None, "<bos>"):
        save_tokenizer(tokenizer, tmp_path, bos_token=bos)
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
        fields = tokenizer_fields(tmp_path)
        kinds = [gguf.TokenType(kind).name for kind in fields["ggml.token_type"]]
        call = tokenizer.token_to_id("<call>")
        assert (fields["ggml.tokens"][call], kinds[call], kinds[0], kinds[-1]) == (
            *("<call>", "USER_DEFINED", "CONTROL", "UNUSED"),
        )
        assert fields["ggml.add_bos_token"] == (bos is not None)
        assert (fields["ggml.eos_token_id"], fields["ggml.eot_token_id"]) == (1, 2)
        assert fields["ggml.pre"] == "gpt-2" and fields["chat_template"] == "{{ messages }}"


def test_only_rules_that_llama_cpp_has_are_written(tmp_path):
    tokenizer = train_bpe(["a b"], vocab_size=260)
    pre, path = tokenizers.pre_tokenizers, tmp_path / "tokenizer.json"
    plain, split = pre.ByteLevel(add_prefix_space=False), pre.ByteLevel(add_prefix_space=False, use_regex=False)

    def rule(*steps):
        tokenizer.pre_tokenizer = pre.Sequence([*steps])
        return _gguf._pre_tokenizer(json.loads(tokenizer.to_str()), path)

    def by(regex):
        return pre.Split(tokenizers.Regex(regex), "isolated")

    assert rule(plain) == "gpt-2" and rule(pre.Digits(individual_digits=True), plain) == "smollm"
    assert [rule(by(regex), split) for regex in _gguf.REGEXES] == ["llama-bpe", "qwen2"]
    for steps in [(split,), (pre.ByteLevel(),), (pre.Digits(), plain), (by("a|b"), split), (pre.Whitespace(), plain)]:
        with pytest.raises(ValueError, match="must be a byte-level BPE"):
            rule(*steps)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(ValueError, match="must be a byte-level BPE"):
        rule(plain)
