"""Hugging Face configs: supported and refused fields, and round trips of rotary embeddings in both spellings."""

import json

import numpy as np
import pytest

from maxlib.ops import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from maxlib.weights import HFConfig, read_config
from maxlib.weights._hf_config import HARMLESS_VALUES
from maxlib.weights.fields import read_rope, write_rope

HEAD = 16
SHORT = tuple(1.0 + 0.1 * i for i in range(HEAD // 2))
LONG = tuple(2.0 + i for i in range(HEAD // 2))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
LONGROPE = {"short_factor": list(SHORT), "long_factor": list(LONG), "original_max_position_embeddings": 64}
# rope_type -> (its fields, max_position_embeddings, what we read)
ROPES = {
    "default": ({}, 256, Rope(HEAD, 5e5, max_length=256)),
    "linear": ({"factor": 2.5}, 100, Rope(HEAD, 5e5, LinearScaling(2.5), max_length=250)),
    "dynamic": ({"factor": 2.0}, 64, Rope(HEAD, 5e5, DynamicNTKScaling(2.0, 64))),
    "llama3": (LLAMA3, 2048, Rope(HEAD, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 128), max_length=2048)),
    "yarn": (YARN, 256, Rope(HEAD, 5e5, YarnScaling(4.0, 64, 16.0, 2.0), max_length=256)),
    "longrope": (LONGROPE, 256, Rope(HEAD, 5e5, LongRopeScaling(SHORT, LONG, 64, 4.0), max_length=256)),
    "proportional": (
        {"partial_rotary_factor": 0.25, "factor": 2.0},
        256,
        Rope(HEAD, 5e5, ProportionalScaling(0.25, 2.0), max_length=256),
    ),
}
types = pytest.mark.parametrize("kind", ROPES)


def old(kind: str) -> dict:
    """As transformers 4 writes it."""
    scaling, limit, _ = ROPES[kind]
    return {
        "max_position_embeddings": limit,
        "rope_theta": 5e5,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **scaling},
    }


def new(kind: str) -> dict:
    """As transformers 5 writes it."""
    scaling, limit, _ = ROPES[kind]
    return {
        "max_position_embeddings": limit,
        "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **scaling},
    }


def read(data: dict, **kwargs) -> Rope:
    fields = HFConfig(data)
    rope = read_rope(fields, head_dim=HEAD, **kwargs)
    fields.done()
    return rope


# --- fields ---------------------------------------------------------------------------------------------------------


def test_fields_are_taken_with_their_kind():
    fields = HFConfig({"hidden_size": 64, "eps": 1, "head_dim": None, "window": None, "tied": True, "layers": ["a"]})
    assert fields.take("hidden_size", kind=int) == 64
    eps = fields.take("eps", 1e-6)
    assert eps == 1.0
    assert isinstance(eps, float)
    assert fields.take("head_dim", 16) == 16  # null counts as absent ...
    assert fields.take("window", 4096, nullable=True) is None  # ... unless the reader gives it a meaning
    assert fields.take("absent", None) is None
    assert fields.take("layers", kind=list) == ["a"]
    assert fields.take("tied", False) is True
    assert "tied" in fields
    assert "absent" not in fields
    fields.done()


@pytest.mark.parametrize(
    ("data", "take", "message"),
    [
        ({}, {"name": "hidden_size"}, "hidden_size must be given, but it is missing"),
        ({"hidden_size": None}, {"name": "hidden_size"}, "hidden_size must be given, but it is null"),
        ({"hidden_size": "64"}, {"name": "hidden_size", "kind": int}, 'hidden_size must be of type int, got "64"'),
        ({"hidden_size": 0}, {"name": "hidden_size", "kind": int}, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": True}, {"name": "hidden_size", "kind": int}, "must be of type int, got true"),
        ({"hidden_size": 6.5}, {"name": "hidden_size", "default": 4}, "must be of type int, got 6.5"),
        ({"eps": float("nan")}, {"name": "eps", "default": 1e-6}, "eps must be of type float, got NaN"),
        ({"tied": 1}, {"name": "tied", "default": False}, "tied must be of type bool, got 1"),
    ],
)
def test_wrong_fields_are_refused(data, take, message):
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        HFConfig(data).take(**take)


def test_required_values():
    fields = HFConfig({"hidden_act": "gelu", "scoring": "sigmoid", "null": None})
    assert fields.require("scoring", "softmax", "sigmoid") == "sigmoid"
    assert fields.require("absent", "silu") == fields.require("null", "silu") == "silu"
    with pytest.raises(ValueError, match="hidden_act must be 'silu', got 'gelu': this architecture computes nothing"):
        fields.require("hidden_act", "silu")


def test_unknown_fields_are_refused_by_name():
    data = {
        "model_type": "llama",
        "attn_logit_softcapping": 50.0,
        "sliding_window": None,  # null: off
        "attention_dropout": 0.1,  # training only
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "quip", "bits": 4},
        "text_config": {"query_scale": 2, "use_cache": True},
    }
    fields = HFConfig(data)
    fields.require("model_type", "llama")
    fields.nested("text_config")
    with pytest.raises(ValueError, match="fields this architecture does not know") as error:
        fields.done()
    for line in ("attn_logit_softcapping = 50.0", "quantization_config = {", "text_config.query_scale = 2"):
        assert line in str(error.value)
    for word in ("sliding_window", "attention_dropout", "dtype", "use_cache", "model_type"):
        assert word not in str(error.value)
    fields.ignore("attn_logit_softcapping", "quantization_config")
    fields.nested("text_config").take("query_scale")
    fields.done()


@pytest.mark.parametrize(("name", "value"), HARMLESS_VALUES.items())
def test_some_fields_are_harmless_with_one_value_only(name, value):
    HFConfig({name: value}).done()
    with pytest.raises(ValueError, match=name):
        HFConfig({name: 2}).done()


def test_an_older_name_of_a_field_is_harmless_with_its_value_only():
    fields = HFConfig({"max_position_embeddings": 2048, "max_sequence_length": 2048, "internal_version": "7b-alpha"})
    fields.take("max_position_embeddings")
    fields.done()
    with pytest.raises(ValueError, match="max_sequence_length = 4096"):
        HFConfig({"max_position_embeddings": 2048, "max_sequence_length": 4096}).done()


def test_named_fields_are_ignored_unless_they_are_read():
    fields = HFConfig({"hidden_size": 8, "a_note": "x", "text_config": {"another": 1}})
    fields.take("hidden_size"), fields.nested("text_config")
    with pytest.raises(ValueError, match=r"pass ignore_fields=\['a_note', 'text_config.another'\] to from_pretrained"):
        fields.done()
    fields.done(["a_note", "text_config.another"])
    with pytest.raises(ValueError, match="a_note = .x."):
        fields.done(["text_config.another"])
    for read in ("hidden_size", "absent"):
        with pytest.raises(
            ValueError, match=f"fields of config.json that nobody reads, got {read}, .* unread are: a_note"
        ):
            fields.done([read, "a_note"])


def test_layer_types_are_known_ones_for_every_layer():
    kinds = ("full_attention", "sliding_attention")
    assert HFConfig({}).layer_types(2, *kinds) is None
    assert HFConfig({"layer_types": ["full_attention"] * 2}).layer_types(2, *kinds) == ("full_attention",) * 2
    for types in (["full_attention"], ["full_attention", "linear_attention"], [1, 2]):
        with pytest.raises(ValueError, match="layer_types must give one of full_attention, sliding_attention for each"):
            HFConfig({"layer_types": types}).layer_types(2, *kinds)


def test_nested_fields_name_their_path():
    fields = HFConfig({"text_config": {"hidden_size": "x", "inner": {}}, "vision_config": 3})
    with pytest.raises(ValueError, match="config.json: text_config.hidden_size must be of type int"):
        fields.nested("text_config").take("hidden_size", kind=int)
    with pytest.raises(ValueError, match=r"config.json: text_config.inner.width must be given"):
        fields.nested("text_config").nested("inner").take("width")
    with pytest.raises(ValueError, match="vision_config must be of type dict, got 3"):
        fields.nested("vision_config")
    with pytest.raises(ValueError, match="audio_config must be given"):
        fields.nested("audio_config")


# --- rotary embeddings ----------------------------------------------------------------------------------------------


@types
def test_both_spellings_are_read(kind):
    rope = ROPES[kind][2]
    assert read(new(kind)) == rope
    if kind != "proportional":  # transformers 4 has none
        assert read(old(kind)) == rope
        assert read(old(kind) | new(kind)) == rope


@types
def test_what_is_written_is_read_again(kind):
    rope = ROPES[kind][2]
    written = write_rope(rope, head_dim=HEAD)
    assert written["max_position_embeddings"] == ROPES[kind][1]
    assert read(json.loads(json.dumps(written))) == rope


def test_details_of_the_spellings():
    base = {"max_position_embeddings": 128}
    assert read({}) == Rope(HEAD)
    assert read(base | {"rope_theta": 10000}, interleaved=True) == Rope(HEAD, 1e4, None, True, 128)
    assert read(base, default_theta=5e5).theta == 5e5
    assert read(base, partial=True, default_fraction=0.5).dim == HEAD // 2
    assert read(base | {"partial_rotary_factor": 1.0}, partial=True, default_fraction=0.5).dim == HEAD
    assert read(base | {"rope_scaling": {"type": "linear", "factor": 2}}).scaling == LinearScaling(2.0)
    both = {"type": "linear", "rope_type": "linear", "factor": 2.0}
    assert read(base | {"rope_scaling": both}).scaling == LinearScaling(2.0)
    # a first length that is not stated is max_position_embeddings, as in transformers
    assert read(base | {"rope_scaling": {"type": "yarn", "factor": 4.0}}) == Rope(
        HEAD, 1e4, YarnScaling(4.0, 128), False, 512
    )
    # Phi 3: an old name, the first length outside, the factor from the ratio
    phi = {"type": "su", "short_factor": list(SHORT), "long_factor": list(LONG)}
    phi = read(base | {"rope_scaling": phi, "original_max_position_embeddings": 32})
    assert phi.scaling == LongRopeScaling(SHORT, LONG, 32, 4.0)
    # null numbers are absent
    gaps = {"rope_type": "yarn", "factor": 4.0, "attention_factor": None, "mscale": None, "beta_fast": None}
    assert read(base | {"rope_scaling": gaps}).scaling == YarnScaling(4.0, 128)
    deepseek = {"type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.8, "truncate": False}
    assert read(base | {"rope_scaling": deepseek}).scaling == YarnScaling(
        40.0, 128, mscale=0.7, mscale_all_dim=0.8, truncate=False
    )
    # a note of YaRN's authors changes nothing
    assert read(base | {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}}).scaling == YarnScaling(
        4.0, 128
    )


@pytest.mark.parametrize("dim", [2, 4, 10, 14])
@pytest.mark.parametrize("head", [16, 30, 49, 90])
def test_partial_rotary_there_and_back(dim, head):
    written = write_rope(Rope(dim, max_length=64), head_dim=head)
    for spelling in (written, {**written, "rope_parameters": None}, {**written, "partial_rotary_factor": None}):
        assert read_rope(HFConfig(spelling), head_dim=head, partial=True) == Rope(dim, max_length=64)
    with pytest.raises(
        ValueError, match="partial_rotary_factor must be 1, got .*: this architecture turns whole heads"
    ):
        read_rope(HFConfig(written), head_dim=head)


def test_layer_types_rotate_differently():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    data = {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}}}
    old_data = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}
    for spelling in (data, old_data, data | old_data):
        fields = HFConfig(spelling)
        far = read_rope(fields, head_dim=HEAD, layer_type="full_attention", default_theta=1e6)
        if "rope_parameters" in spelling:
            with pytest.raises(ValueError, match=r"rope_parameters.sliding_attention"):
                fields.done()
        local = {"theta_field": "rope_local_base_freq", "scaling_field": None}
        near = read_rope(fields, head_dim=HEAD, layer_type="sliding_attention", **local)
        fields.done()
        assert (far, near) == (Rope(HEAD, 1e6, LinearScaling(8.0)), Rope(HEAD, 1e4))
    with pytest.raises(ValueError, match="rope_parameters must describe one rope for all layers, got one for each of"):
        read(data)
    with pytest.raises(ValueError, match="must describe the layer type 'chunked_attention'"):
        read(data, layer_type="chunked_attention")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 1e4}, r"rope_parameters.rope_theta is 500000.0, but config.json: rope_theta is 10000.0"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_parameters.rope_type is 'linear', but .*rope_scaling.type is"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            r"rope_parameters.factor is 2.5, but .* is 4.0: they must",
        ),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type must be one of default, linear, .*got 'mrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters.factor must be given for this rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, r"factor must be of type float, got \"2\""),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -2}},
            "'linear' has invalid numbers: LinearScaling.fac",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e308}}, "'linear' has invalid numbers"),
        ({"rope_parameters": {"factor": 2.0}}, r"rope_parameters.factor = 2.0"),  # the default type has no factor
        ({"rope_parameters": {"mrope_section": [1, 2]}}, r"rope_parameters.mrope_section = \[1, 2\]"),
        ({"rope_parameters": [1]}, "rope_parameters must be of type dict"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta must be of type float, got true"),
        ({"rope_parameters": {"rope_theta": 0}}, "invalid numbers: Rope.theta must be a positive number"),
        (
            {"rope_parameters": {"rope_type": "longrope", **LONGROPE, "short_factor": [1.0]}},
            "short_factor must have one number per rotary pair",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", **LONGROPE, "long_factor": ["x"] * 8}},
            "long_factor must be a list of numbers, got 'x'",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", **YARN}, "original_max_position_embeddings": 32},
            "original_max_position_embeddings is 64, but the config says 32 outside",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", **YARN}},
            "original_max_position_embeddings is 64, but the config says 100 outside",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": None},
            "max_position_embeddings must be given for this rope_type",
        ),
    ],
)
def test_contradictory_or_unknown_ropes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read(new("linear") | change)


def test_ropes_that_cannot_be_written_are_refused():
    with pytest.raises(ValueError, match="max_position_embeddings must be known"):
        write_rope(Rope(HEAD), head_dim=HEAD)
    with pytest.raises(ValueError, match="a rope of 16 dimensions must fit into a head of 8"):
        write_rope(Rope(16, max_length=8), head_dim=8)
    for rope in (Rope(8, max_length=8), Rope(16, interleaved=True, max_length=8)):
        with pytest.raises(ValueError, match="turns whole heads in halves: the rope must have dim=16"):
            write_rope(rope, head_dim=16, whole_heads=True)
    with pytest.raises(ValueError, match="turns heads in interleaved pairs: the rope must have interleaved=True"):
        write_rope(Rope(8, max_length=8), head_dim=16, interleaved=True)
    assert write_rope(Rope(8, interleaved=True, max_length=8), head_dim=8, interleaved=True)["rope_theta"] == 1e4


# --- transformers ---------------------------------------------------------------------------------------------------


def llama_config(fields: dict):
    transformers = pytest.importorskip("transformers")
    base = {"model_type": "llama", "hidden_size": 2 * HEAD, "num_attention_heads": 2, "head_dim": HEAD}
    return transformers.LlamaConfig.from_dict(base | fields)


def rotary(config, positions):
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return [table.numpy()[..., : HEAD // 2] for table in LlamaRotaryEmbedding(config)(torch.zeros(1), positions)]


@types
def test_transformers_reads_what_we_write_and_back(kind, tmp_path):
    """LlamaConfig -> our reader -> our writer -> config.json -> AutoConfig: the same tables everywhere."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = llama_config(new(kind))
    rope = read_rope(HFConfig(theirs.to_dict()), head_dim=HEAD)
    assert rope == ROPES[kind][2]
    ours = {**llama_config({}).to_dict(), **write_rope(rope, head_dim=HEAD)}
    (tmp_path / "config.json").write_text(json.dumps(ours))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]
    again.save_pretrained(tmp_path)
    assert read_rope(HFConfig(read_config(tmp_path)), head_dim=HEAD) == rope
    positions = np.arange(200)[None]
    tables = rope.tables(positions)
    for config in (theirs, again):
        for got, want in zip(tables, rotary(config, torch.tensor(positions)), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-4)


# --- the file -------------------------------------------------------------------------------------------------------


def test_config_file_names_code_that_is_not_run(tmp_path, caplog):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoModel": "modeling.Evil"}}')
    assert read_config(tmp_path)["model_type"] == "llama"
    assert "maxlib never runs it" in caplog.text
    HFConfig({"auto_map": {}}).done()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1', "must be a JSON object in UTF-8"),
        (b"", "must be a JSON object in UTF-8"),
        (b'{"a": "\xff"}', "must be a JSON object in UTF-8"),
        (b"[" * 100_000, "must be a JSON object in UTF-8"),
        (b"[1, 2]", r"must be a JSON object, got a list"),
        (b'{"a": {"b": 1, "b": 2}}', "the fields b are given more than once"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_missing_files_are_named(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"This is a PEFT adapter: load its base model, then"):
        read_config(tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match=r"config.json must exist.*The directory has none"):
        read_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such directory.*has that run finished"):
        read_config(tmp_path / "absent")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="model.safetensors is a file: name its directory"):
        read_config(tmp_path / "model.safetensors")
