"""Mistral Small 4 against transformers: latent attention with sharpened queries, experts in groups, images."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import maxlib
from maxlib.models import mistral4
from maxlib.weights import HFConfig
from maxlib.weights.files import Header, write_file
from tests.models import parity
from tests.models.conformance import NO_TOKENS, Conformance, assert_close
from tests.models.latent_conformance import BASE, LatentConformance
from tests.models.test_mistral_images import Pixtral

ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1e4,
    "factor": 64.0,
    "original_max_position_embeddings": 5,  # positions of five lengths
    "max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "llama_4_scaling_beta": 0.8,
}
TEXT = BASE | NO_TOKENS | {"rope_parameters": ROPE}
GROUPS = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
HALVES = {
    "rope_interleave": False,
    "tie_word_embeddings": True,
    "q_lora_rank": None,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {name: value for name, value in ROPE.items() if not name.startswith("mscale")},
}
MATTERS = LatentConformance.matters | {
    "rope_interleave": False,
    "rope_parameters": ROPE | {"llama_4_scaling_beta": 0.4, "partial_rotary_factor": 6 / 14},
}


class Mistral4:
    family = "mistral4"
    rules = Conformance.rules | {"expert": "data"}
    slot_axis = -2  # [rows, slots, latent]


@pytest.mark.full
class TestMistral4(Mistral4, Pixtral):
    config = "Mistral3Config"
    text_base = TEXT | {"model_type": "mistral4"}
    cases = {"sees": {"text": GROUPS}, "sees_halves_tied": {"text": HALVES, "tie_word_embeddings": True}}
    matters = {f"text_config.{name}": value for name, value in MATTERS.items()}
    matters |= {"vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}


class TestText(Mistral4, Conformance):
    config = "Mistral4Config"
    stated = {
        "rope_parameters": ROPE
        | {"original_max_position_embeddings": 8192, "max_position_embeddings": 1_048_576}
        | {"partial_rotary_factor": 0.5}
    }
    base = TEXT
    cases = {"groups": GROUPS | {"vocab_size": 53}, "halves_tied": HALVES}
    matters = MATTERS


# --- files ---


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A directory as released: float8 with one factor for a matrix, and for each expert of a stack."""
    case, path, random = parity.golden("mistral4")["sees"], tmp_path_factory.mktemp("fp8"), np.random.default_rng(0)
    plain = parity.tensors(case["shapes"])
    stored = {}
    for name, value in plain.items():
        stored[name] = value.astype(ml_dtypes.bfloat16)
        if "language_model.model.layers" in name and "_proj" in name:
            many = value.ndim == 3
            factor = (2.0 ** random.uniform(-9, 9, (len(value), 1, 1) if many else ())).astype(ml_dtypes.bfloat16)
            stored[name] = value.astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = factor
            activation = f"{name}_activation_scale" if many else name.replace(".weight", ".activation_scale")
            stored[activation] = np.ones(len(value) if many else (), ml_dtypes.bfloat16)
            plain[name] = stored[name].astype(np.float32) * factor.astype(np.float32)
        else:
            plain[name] = stored[name].astype(np.float32)
    headers = [Header(name, value.dtype, value.shape) for name, value in stored.items()]
    write_file(path / "model.safetensors", headers, iter(stored.values()))
    quantization = {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None}
    quantization |= {"dequantize": False, "modules_to_not_convert": ["model.vision_tower", "lm_head"]}
    (path / "config.json").write_text(json.dumps(case["config"] | {"quantization_config": quantization}))
    return path, plain


@pytest.mark.parametrize("sees", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_released_float8_is_read_like_plain_weights(sees, released, tmp_path):
    path, plain = released
    model = maxlib.from_pretrained(path, dtype="float32", **({} if sees else {"vision": None}))
    maxlib.save_pretrained(model, tmp_path / "export")
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    if not sees:
        plain = {
            name.removeprefix("language_model."): v for name, v in plain.items() if name.startswith("language_model.")
        }
    assert tensors.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["model_type"] == ("mistral3" if sees else "mistral4") and "quantization_config" not in config


@pytest.mark.full
def test_scores_without_yarns_magnitude(tmp_path):
    """As the guide says: the rope alone tells, and transformers takes it from the export."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case = parity.golden("mistral4")["groups"]
    path = parity.directory(tmp_path / "model", case)
    rope = maxlib.weights.read_model(path)[1].rope
    plain = replace(rope, scaling=replace(rope.scaling, attention_factor=1.0, mscale=None, mscale_all_dim=None))
    model = maxlib.from_pretrained(path, rope=plain)
    assert {layer.attn.scale for layer in model.layers} == {14**-0.5}
    maxlib.save_pretrained(model, tmp_path / "export")
    theirs = transformers.Mistral4ForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    with torch.no_grad():
        want = theirs(torch.from_numpy(case["tokens"]).long()).logits.numpy()
    got = parity.logits(model, case["tokens"])
    assert_close(got, want, 1e-4)
    assert np.abs(got - case["logits"]).max() > 0.01 * case["logits"].std()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"partial_rotary_factor": 4 / 14}, r"partial_rotary_factor must be qk_rope_head_dim \(6\) of 14, got"),
        ({"llama_4_scaling_beta": None}, "rope_parameters.llama_4_scaling_beta must be given, but it is null"),
        ({"rope_type": "default", "type": "default"}, r"a mistral4 sharpens its queries .*rope_parameters"),
        ({"max_position_embeddings": 4096}, "max_position_embeddings"),
    ],
)
def test_ropes_that_cannot_be_are_refused(change, match):
    config = parity.golden("mistral4")["groups"]["config"]
    config = config | {"rope_parameters": config["rope_parameters"] | change}
    with pytest.raises(ValueError, match=match):
        mistral4.FIELDS.read(HFConfig(config))


def test_a_mistral3_of_another_text_is_no_mistral4(tmp_path):
    config = parity.golden("mistral4")["sees"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert maxlib.weights.read_model(tmp_path)[0] is mistral4.FAMILY
    with pytest.raises(ValueError, match="text_config.model_type must be 'mistral4', got 'mistral'"):
        mistral4.FIELDS.read(HFConfig(config | {"text_config": config["text_config"] | {"model_type": "mistral"}}))
