"""Loading and saving directories: errors, failed saves, detection of families, and memory."""

import dataclasses
import errno
import functools
import json
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import maxlib
from maxlib import inference, nn, ops, quantization, sharding, tokenization, training, weights
from maxlib.models import bert, deepseek, llama
from maxlib.tokenization import ChatTemplate
from maxlib.weights import _family as family_module
from maxlib.weights import _saving
from maxlib.weights import files as files_module
from tests.nn.tiny import LLAMA, filled
from tests.weights import zoo

CFG = dataclasses.replace(LLAMA, rope=ops.Rope(12, max_length=64), num_layers=3)


def build(cfg: llama.Config, dtype=jnp.float32) -> llama.Llama:
    """Random bits as weights: quick, and no two are alike."""
    abstract = jax.eval_shape(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    draw = lambda v: jnp.asarray(random.random(v.get_value().shape, np.float32) - 0.5, dtype)
    return nn.combine({path: draw(v) for path, v in nn.variables(abstract).items()}, abstract)


@pytest.fixture(scope="module")
def model():
    return build(CFG)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "hf"
    maxlib.save_pretrained(model, path)
    return path


@pytest.fixture
def copied(exported, tmp_path):
    """A copy to damage: its directory and its tensors."""
    tensors = load_file(exported / "model.safetensors")
    path = tmp_path / "copy"
    path.mkdir()
    (path / "config.json").write_text((exported / "config.json").read_text())
    save_file(tensors, path / "model.safetensors")
    return path, tensors


def same(a, b) -> bool:
    a, b = nn.partition(a)[0], nn.partition(b)[0]
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


# --- there and back -------------------------------------------------------------------------------------------------


def test_round_trip(model, exported):
    back = maxlib.from_pretrained(exported)
    assert back.cfg == model.cfg
    assert same(back, model)


@pytest.mark.parametrize(
    "preset", ["FSDP_TP", *(pytest.param(name, marks=pytest.mark.full) for name in ("DP", "FSDP", "TP"))]
)
def test_round_trip_on_eight_devices(preset, model, exported, tmp_path):
    axes = {"DP": {"data": 8}, "FSDP": {"fsdp": 4, "data": 2}, "TP": {"tensor": 2, "data": 4}}
    mesh = sharding.make_mesh(**axes.get(preset, {"data": 2, "fsdp": 2, "tensor": 2}))
    layout = sharding.Layout(mesh, getattr(sharding, preset) | {"vocab": None})  # 61 words divide over nothing
    back = maxlib.from_pretrained(exported, layout=layout)
    assert same(back, model)
    q = back.layers.groups[0][0].attn.q.w.get_value()
    assert q.sharding == layout.sharding("q", back.layers.groups[0][0].attn.q.w)
    maxlib.save_pretrained(back, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_rules_that_do_not_fit_name_the_parameter(exported):
    with pytest.raises(
        ValueError, match=r"embed.w: dimension 'vocab' \(size 61\) is not divisible by mesh axis 'tensor'"
    ):
        maxlib.from_pretrained(exported, layout=sharding.Layout(sharding.make_mesh(data=4, tensor=2)))


def test_layers_that_stand_alone_are_written_the_same(model, exported, tmp_path):
    maxlib.save_pretrained(nn.unstack(model), tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_many_files(model, exported, tmp_path):
    maxlib.save_pretrained(model, tmp_path / "hf", max_shard_bytes=10_000)
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names[0] == "config.json"
    assert len(names) > 4 and names[-1] == "model.safetensors.index.json"
    assert same(maxlib.from_pretrained(tmp_path / "hf"), model)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def test_half_precision(dtype, model, tmp_path):
    maxlib.save_pretrained(model, tmp_path / "hf", dtype=dtype)
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == dtype
    as_stored = maxlib.from_pretrained(tmp_path / "hf")
    wide = maxlib.from_pretrained(tmp_path / "hf", dtype=jnp.float32)
    want, _ = nn.partition(model)
    for path, value in nn.partition(as_stored)[0].items():
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, want[path].astype(dtype))
        np.testing.assert_array_equal(nn.partition(wide)[0][path], value.astype(jnp.float32))
    maxlib.save_pretrained(as_stored, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_weights_are_not_cast_to_whole_numbers(model, exported, tmp_path):
    for cast in (
        lambda: maxlib.from_pretrained(exported, dtype="int8"),
        lambda: maxlib.save_pretrained(model, tmp_path / "small", dtype=jnp.int8),
        lambda: nn.cast(model, jnp.int8),
    ):
        with pytest.raises(TypeError, match="dtype must be floating, .* got int8"):
            cast()


def test_expert_biases_stay_float32(tmp_path):
    """As in transformers: rounded, they would choose other experts."""
    sizes = {"vocab": 8, "num_layers": 1, "num_dense": 0, "dim": 8, "mlp_dim": 8, "num_heads": 2, "expert_dim": 8}
    latents = {"q_rank": 4, "kv_rank": 4, "nope_dim": 4, "v_dim": 4, "rope": ops.Rope(4, max_length=8)}
    routing = {"num_experts": 4, "num_shared": 1, "top_k": 2, "renormalize": True}
    cfg = deepseek.Config(version=3, **sizes, **latents, **routing)
    mixture = filled(lambda: deepseek.DeepSeek(cfg, rngs=nnx.Rngs(0)))
    bias = next(v for path, v in nn.variables(mixture).items() if path.endswith("expert_bias"))
    bias.set_value(bias.get_value() + 1.001)
    maxlib.save_pretrained(mixture, tmp_path / "hf", dtype=jnp.bfloat16)
    loaded = nn.variables(maxlib.from_pretrained(tmp_path / "hf", dtype=jnp.bfloat16))
    wide = {path: v.get_value() for path, v in loaded.items() if v.get_value().dtype == jnp.float32}
    assert [path.rpartition(".")[2] for path in wide] == ["expert_bias"]
    np.testing.assert_array_equal(*wide.values(), bias.get_value())


def test_layers_stored_in_different_dtypes_meet_in_the_wider(copied):
    path, tensors = copied
    save_file({n: t.astype(np.float16) if ".1." in n else t for n, t in tensors.items()}, path / "model.safetensors")
    assert {v.dtype for v in nn.partition(maxlib.from_pretrained(path))[0].values()} == {np.dtype("float32")}


def test_values_beyond_float16_are_refused(model, copied, tmp_path):
    path, tensors = copied
    big = {
        n: np.float32(1e5) * np.ones_like(t) if n.endswith("layers.1.mlp.up_proj.weight") else t
        for n, t in tensors.items()
    }
    save_file(big, path / "model.safetensors")
    for dtype in ("float16", "float8_e4m3fn"):
        with pytest.raises(ValueError, match=f"layers.1.mlp.up_proj.weight has values that overflow {dtype}"):
            maxlib.from_pretrained(path, dtype=dtype)
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight has values that overflow float16"):
        maxlib.save_pretrained(maxlib.from_pretrained(path), tmp_path / "half", dtype=jnp.float16)
    assert not (tmp_path / "half").exists()


def test_config_and_generation_files(model, exported, tmp_path):
    config = json.loads((exported / "config.json").read_text())
    assert config["bos_token_id"] is config["eos_token_id"] is config["pad_token_id"] is None
    maxlib.save_pretrained(model, tmp_path / "hf", generation={"eos_token_id": 3, "temperature": 0.7})
    assert json.loads((tmp_path / "hf/generation_config.json").read_text()) == {"eos_token_id": 3, "temperature": 0.7}
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 3
    maxlib.from_pretrained(tmp_path / "hf")


def test_what_a_fine_tuned_model_takes_from_its_source(model, tmp_path):
    """Without the ids that end a text, transformers, vLLM and maxlib generate to the limit."""
    source, out = tmp_path / "source", tmp_path / "out"
    generation = {"eos_token_id": [1, 2], "temperature": 0.7}
    maxlib.save_pretrained(model, source, tokenizer=tiny_tokenizer(), generation=generation)
    config = json.loads((source / "config.json").read_text()) | {"bos_token_id": 5, "eos_token_id": 1}
    (source / "config.json").write_text(json.dumps(config))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (source / name).write_text("{}")
    (source / "notes.txt").write_text("not of a model")
    maxlib.save_pretrained(model, out, like=source)
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()} - {"notes.txt"}
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((out / name).read_text()) == json.loads((source / name).read_text()), name
    assert inference.stop_tokens(out) == [1, 2]
    maxlib.save_pretrained(model, out, like=source, generation={"eos_token_id": 3}, overwrite=True)
    assert json.loads((out / "generation_config.json").read_text()) == generation | {"eos_token_id": 3}
    assert json.loads((out / "config.json").read_text()) == config | {"eos_token_id": 3}
    with pytest.raises(FileNotFoundError):
        maxlib.save_pretrained(model, tmp_path / "none", like=tmp_path / "absent")


def test_a_tokenizer_of_its_own_replaces_that_of_the_source(model, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    maxlib.save_pretrained(model, source, tokenizer=tiny_tokenizer(), generation={"eos_token_id": 1})
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "merges.txt").write_text("of the old one")
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "z": 1}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    maxlib.save_pretrained(model, out, like=source, tokenizer=tokenizer)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("z").ids == [1]
    assert (out / "chat_template.jinja").exists() and not (out / "merges.txt").exists()


def test_a_bare_tokenizer_keeps_the_template_and_the_special_tokens_of_the_source(model, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    maxlib.save_pretrained(model, source, tokenizer=tiny_tokenizer(), generation={"eos_token_id": 0})
    stated = {
        "eos_token": "<eos>",
        "bos_token": "<not there>",
        "chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    (source / "tokenizer_config.json").write_text(json.dumps(stated))
    maxlib.save_pretrained(model, out, like=source, tokenizer=tiny_tokenizer())
    assert ChatTemplate.from_directory(out)([{"role": "user", "content": "a"}]) == "a<eos>"
    assert tokenization.special_tokens(out) == {"eos_token": "<eos>"}


def test_the_end_of_a_hugging_face_tokenizer_is_taken_over(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), eos_token="<eos>")
    maxlib.save_pretrained(model, tmp_path / "hf", tokenizer=theirs)
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 0
    maxlib.save_pretrained(model, tmp_path / "base", generation={"eos_token_id": [1, 2]})
    maxlib.save_pretrained(model, tmp_path / "tuned", like=tmp_path / "base", tokenizer=theirs)
    assert inference.stop_tokens(tmp_path / "tuned") == [1, 2, 0]  # also where the source had another tokenizer


# --- bad input ------------------------------------------------------------------------------------------------------


def test_tensors_that_do_not_fit_are_named(copied):
    path, tensors = copied
    missing = tensors.pop("model.layers.1.mlp.gate_proj.weight")
    tensors["model.layers.2.self_attn.q_proj.weight"] = np.zeros((5, 32), np.float32)
    tensors |= {"model.layers.3.mlp.gate_proj.weight": missing, "score.weight": missing}
    tensors["model.norm.weight"] = np.ones(32, np.int32)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match="are not those of the model that its config.json describes") as error:
        maxlib.from_pretrained(path)
    text = str(error.value)
    for line in (
        "missing (1):\n  model.layers.1.mlp.gate_proj.weight for layers.groups.0.0.mlp.gate.w[1]\n",
        "  model.layers.2.self_attn.q_proj.weight is (5, 32), but layers.groups.0.0.attn.q.w[2] needs (48, 32)\n",
        "  model.norm.weight is int32, which norm.scale is not\n",
        "without a parameter in the model (2):\n  model.layers.3.mlp.gate_proj.weight\n  score.weight\n",
    ):
        assert line in text


def test_a_table_that_forgets_a_weight_says_so(copied):
    path, _ = copied
    family = dataclasses.replace(
        llama.FAMILY, table=lambda cfg: [e for e in llama.FAMILY.table(cfg) if "norm" not in str(e)]
    )
    with pytest.raises(
        ValueError, match=r"that its table does not fill exactly \(3\):\n  layers.groups.0.0.attn_norm.scale \(0 of 96"
    ):
        maxlib.from_pretrained(path, family=family)


def test_a_truncated_file_is_refused_before_anything_is_built(copied):
    path, _ = copied
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        maxlib.from_pretrained(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "nonsense"}, r"no family is known for the model_type 'nonsense' of .*; there are .*llama"),
        ({"model_type": None}, "no family is known for the model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"hidden_size": None}, "hidden_size must be given"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads.* got 4 and 3"),
        ({"sliding_window": 16}, "fields this architecture does not know.*\n.*sliding_window = 16"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "nonsense"}, r"weights.Family\(...\) .* an entry point of the group .maxlib.models"),
        ({"rope_theta": 1.0}, "they must agree"),
    ],
)
def test_configs_that_cannot_be_right_are_refused(change, message, copied):
    path, _ = copied
    config = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        maxlib.from_pretrained(path)


def test_a_field_that_changes_nothing_is_ignored_by_name(copied):
    path, _ = copied
    cfg = maxlib.from_pretrained(path).cfg
    config = json.loads((path / "config.json").read_text()) | {"a_note": "x"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"pass ignore_fields=\['a_note'\] to from_pretrained"):
        maxlib.from_pretrained(path)
    assert maxlib.from_pretrained(path, ignore_fields=["a_note"]).cfg == cfg


def test_quantized_weights_have_a_call_of_their_own(copied, tmp_path):
    quantize = jax.jit(lambda model: quantization.for_inference(model, "int8"))  # op by op it takes seconds
    small = quantize(maxlib.from_pretrained(copied[0]))
    with pytest.raises(ValueError, match="write it with maxlib.quantization.save.model, directory., which"):
        maxlib.save_pretrained(small, tmp_path / "out")
    quantization.save(small, tmp_path / "out")


def test_ids_that_a_family_needs_are_written_also_without_a_source(tmp_path):
    """RoBERTa numbers positions from its padding on."""
    cfg = bert.Config(vocab=8, num_layers=1, dim=8, mlp_dim=8, num_heads=2, num_positions=9, first_position=1)
    small = jax.eval_shape(lambda: bert.Bert(cfg, rngs=nnx.Rngs(0)))
    small = nn.combine({path: jnp.zeros(v.shape) for path, v in nn.variables(small).items()}, small)
    maxlib.save_pretrained(small, tmp_path / "plain")
    quantization.save(small, tmp_path / "quantized")
    for name in ("plain", "quantized"):
        assert json.loads((tmp_path / name / "config.json").read_text())["pad_token_id"] == 0


def test_arguments_that_do_not_exist_are_named(exported):
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtpye'"):
        maxlib.from_pretrained(exported, dtpye=1)


# --- saving -----------------------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_nothing(model, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        maxlib.save_pretrained(model, tmp_path / "hf")
    assert any("Nothing was saved" in note for note in error.value.__notes__)
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_what_was_there(model, exported, tmp_path, monkeypatch):
    maxlib.save_pretrained(model, tmp_path / "hf")
    with pytest.raises(TypeError, match="tokenizer must be"):
        maxlib.save_pretrained(model, tmp_path / "hf", dtype=jnp.bfloat16, tokenizer=3, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_existing_directories(model, tmp_path):
    path = tmp_path / "deep" / "hf"
    path.mkdir(parents=True)  # an empty one is welcome
    maxlib.save_pretrained(model, path, max_shard_bytes=10_000)
    with pytest.raises(FileExistsError, match="already has an export. .* overwrite=True"):
        maxlib.save_pretrained(model, path)
    for name in ("tokenizer.json", "processor_config.json"):  # what one adds to an export
        (path / name).touch()
    maxlib.save_pretrained(model, path, overwrite=True)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    (path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"files that do not belong to an export \(notes.txt\)"):
        maxlib.save_pretrained(model, path, overwrite=True)
    assert (path / "notes.txt").read_text() == "mine"
    with pytest.raises(FileExistsError, match="it is a file or a link"):
        maxlib.save_pretrained(model, path / "notes.txt")


LONG = dataclasses.replace(LLAMA, rope=ops.Rope(LLAMA.head_dim, max_length=64))


def swapped(make):
    """A Llama whose layers have another MLP."""
    model = build(LONG)

    def layer(_, rngs):
        block = llama.Block(LONG, rngs=rngs)
        block.mlp = make(LONG.dim, LONG.mlp_dim, rngs=rngs)
        return block

    model.layers = filled(lambda: nn.Stack(layer, LONG.num_layers, rngs=nnx.Rngs(0)))
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (nn.MLP, r"mlp.gate_proj.weight is absent here, \(.*\) by the configuration"),
        (functools.partial(nn.GatedMLP, bias=True), r"mlp.down_proj.bias is .* here, absent by the configuration"),
        (
            functools.partial(nn.GatedMLP, act=jax.nn.gelu),
            r"another model: layers.groups.0.0.mlp.act is gelu here, silu by the configuration",
        ),
    ],
)
def test_what_would_be_read_as_another_model_is_not_written(make, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        maxlib.save_pretrained(swapped(make), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_other_masks_and_norms_are_other_models_and_other_kernels_are_not(tmp_path):
    model = build(LONG)
    maxlib.save_pretrained(nn.with_attention(model, "chunked"), tmp_path / "same")
    model.layers = jax.jit(lambda layers: layers.restacked("ab" + "c" * (LONG.num_layers - 2)))(model.layers)
    maxlib.save_pretrained(model, tmp_path / "laid out otherwise")
    model.layers.groups[0][0].attn_norm.eps = 0.5
    with pytest.raises(ValueError, match="layers.groups.0.0.attn_norm.eps is 0.5 here, 1e-0"):
        maxlib.save_pretrained(model, tmp_path / "other")


def test_models_that_cannot_be_described_are_refused_first(tmp_path):
    with pytest.raises(ValueError, match="max_position_embeddings must be known"):
        maxlib.save_pretrained(build(LLAMA), tmp_path / "hf")
    with pytest.raises(ValueError, match="no family is known for models of class Leaf; there are .*llama"):
        maxlib.save_pretrained(zoo.Leaf(2, rngs=nnx.Rngs(0)), tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


TURNS = "{% for m in messages %}{{ m.role }} {{ m.content }}<end>\n{% endfor %}"


@pytest.mark.parametrize("folder", [False, True])
def test_the_learned_end_of_a_turn_ends_the_texts_of_an_export(folder, model, tmp_path):
    """It is the special token after an answer in the template of the source, or in the one that was trained on."""
    source, out, tokenizer = tmp_path / "source", tmp_path / "out", tiny_tokenizer()
    tokenizer.add_special_tokens(["<end>"])
    maxlib.save_pretrained(model, source, tokenizer=tokenizer, generation={"eos_token_id": 0})
    template = ChatTemplate(TURNS)
    if folder:
        (source / "chat_template.jinja").write_text(TURNS)
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    chosen = {} if folder else {"chat_template": template}
    for _ in range(2):
        maxlib.save_pretrained(model, out, like=source, overwrite=True, **chosen)
    assert inference.stop_tokens(out) == [0, 3] and json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    assert ChatTemplate.from_directory(out).source == TURNS
    assert (out / "additional_chat_templates" / "rag.jinja").exists() == folder
    maxlib.save_pretrained(model, out, like=source, generation={"eos_token_id": 1}, overwrite=True, **chosen)
    assert inference.stop_tokens(out) == [1]
    export = training.HuggingFaceExport(tmp_path / "exports", every=1, like=source, **chosen)
    export.save(1, training.make_state(model, optax.sgd(0.1)))
    export.wait()
    assert inference.stop_tokens(tmp_path / "exports" / "1") == [0, 3]


def test_tokenizers_are_written_along(model, tmp_path):
    with pytest.warns(UserWarning, match="a tokenizer, but no id that ends a text"):
        maxlib.save_pretrained(model, tmp_path / "hf", tokenizer=tiny_tokenizer())
    assert Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json")).encode("b a").ids == [2, 1]
    maxlib.save_pretrained(model, tmp_path / "hf", overwrite=True)
    assert not (tmp_path / "hf/tokenizer.json").exists()


def test_transformers_opens_them(model, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    maxlib.save_pretrained(model, tmp_path / "hf", tokenizer=tiny_tokenizer(), generation={"eos_token_id": 0})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("b a").input_ids == [2, 1]
    maxlib.save_pretrained(model, tmp_path / "again", tokenizer=tokenizer, generation={"eos_token_id": 0})
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again")("a").input_ids == [1]


# --- families ---------------------------------------------------------------------------------------------------------


def test_outside_families_are_found_through_entry_points(tmp_path, monkeypatch, caplog):
    points = [
        EntryPoint("zoo", "tests.weights.zoo", "maxlib.models"),
        EntryPoint("broken", "tests.weights.absent", "maxlib.models"),
    ]
    monkeypatch.setattr(family_module, "entry_points", lambda group: points if group == "maxlib.models" else [])
    weights.families.cache_clear()
    try:
        maxlib.save_pretrained(zoo.zoo(zoo.Config(num_layers=1)), tmp_path / "hf")
        assert isinstance(maxlib.from_pretrained(tmp_path / "hf"), zoo.Zoo)
        assert "the entry point broken=tests.weights.absent of group maxlib.models fails" in caplog.text
        assert "zoo-tiny" in weights.presets()
        monkeypatch.setattr(family_module, "entry_points", lambda group: [points[0], points[0]])
        weights.families.cache_clear()
        with pytest.raises(ValueError, match="is claimed by the families zoo, zoo: give family= to choose"):
            maxlib.from_pretrained(tmp_path / "hf")
    finally:
        weights.families.cache_clear()


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
    import jax, numpy as np, resource, sys, maxlib
    from maxlib import sharding
    from pathlib import Path
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    small, big, out = map(Path, sys.argv[1:4])
    where = {} if sys.argv[4] == "one" else {"layout": sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2))}
    size = (big / "model.safetensors").stat().st_size / 2**20
    maxlib.save_pretrained(maxlib.from_pretrained(small, **where), out / "small")  # compilers have had their memory
    start = peak()
    model = jax.block_until_ready(maxlib.from_pretrained(big, **where))
    loaded = peak()
    if where:
        maxlib.save_pretrained(model, out / "big")
    print(size, loaded - start, peak() - start)
"""


@pytest.fixture(scope="module")
def big_and_small(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    cfg = dataclasses.replace(
        CFG, vocab=8192, dim=512, mlp_dim=1536, num_heads=8, num_kv_heads=4, head_dim=64, tied=True
    )
    cfg = dataclasses.replace(cfg, rope=ops.Rope(64, max_length=64))
    for name, layers in (("small", 2), ("big", 6)):
        maxlib.save_pretrained(build(dataclasses.replace(cfg, num_layers=layers)), path / name)
    return path


@pytest.mark.full
@pytest.mark.parametrize("where", ["one", "mesh"])
def test_host_memory_never_holds_the_model_twice(where, big_and_small, tmp_path):
    """The weights lie in host memory once, since the devices are CPUs; beside them there are two tensors at most."""
    tensor = 8192 * 512 * 4 / 2**20
    arguments = [str(big_and_small / "small"), str(big_and_small / "big"), str(tmp_path), where]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(MEASURE), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, loading, saving = map(float, done.stdout.split())
    assert size > 5 * tensor
    assert loading < size + 2 * tensor
    assert saving < size + 4 * tensor


def test_settings_without_a_name_are_compared_without_their_address():
    """Each build makes its own object, such as a function with state; that is no other model."""

    class Scaled:
        def __init__(self, by: float):
            self.by = by

    assert _saving._word(Scaled(1.0)) == _saving._word(Scaled(1.0))
    assert _saving._word(functools.partial(jax.nn.elu, Scaled(1.0))) == _saving._word(
        functools.partial(jax.nn.elu, Scaled(1.0))
    )
    assert _saving._word(functools.partial(jax.nn.elu, alpha=1.0)) != _saving._word(
        functools.partial(jax.nn.elu, alpha=2.0)
    )
