"""Qwen3.8-Flash-Next against transformers: chosen blocks of keys, hashed n-grams, gated streams, images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import maxlib
from maxlib import nn
from maxlib.models.qwen4_exp import INDEXED, LINEAR
from tests.models import parity
from tests.models.conformance import BASE, SEQ, Conformance, _logits, assert_close
from tests.models.image_conformance import ImageConformance

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "partial_rotary_factor": 0.5}
TEXT = {name: value for name, value in BASE.items() if name != "intermediate_size"} | {
    "head_dim": 16,
    "rope_parameters": ROPE | {"mrope_section": [11, 11, 10]},
    "layer_types": [LINEAR, LINEAR, INDEXED],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "output_gate_type": "sigmoid",
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "hc_count": 3,
    "hc_lowrank": 10,
    # Of so many heads hardly ever all are zero, where any choice would do; 8 of at most 24 keys are chosen.
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 24,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 30,
    "make_ngram_vocab_size_divisible_by": 6,
    "split_ngram_parts": 3,
    "eos_token_id": 7,
    "pad_token_id": None,
}


@pytest.mark.full  # by default its relative below
class TestQwen4Exp(Conformance):
    family = "qwen4_exp"
    config = "Qwen4ExpTextConfig"
    dtype = "float64"
    gradients = 1e-3
    base = TEXT
    cases = {
        "every_kind": {},
        "longer_ngrams": {
            "num_hidden_layers": 4,
            "layer_types": None,
            "ple_layer_ids": [1, 3],
            "ngram_size": 4,
            "ple_embed_dim": 36,
            "ple_conv_kernel_size": 2,
            "indexer_compress_ratio": 3,
            "indexer_budget": 6,
            "output_gate_type": None,
            "hc_count": 2,
            "linear_conv_kernel_dim": 3,
            "vocab_size": 53,
        },
    }
    matters = {
        "rms_norm_eps": 0.1,
        "num_experts_per_tok": 2,
        "indexer_budget": 4,
        "output_gate_type": "silu",
        "eos_token_id": 8,
        "rope_parameters": ROPE | {"rope_theta": 10.0},
    }
    stated = {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "rope_parameters": ROPE,
    }
    refused = {
        "hidden_act": "gelu",
        "norm_topk_prob": False,
        "attention_bias": True,
        "indexer_kv_heads": 2,
        "output_gate_type": "gelu",
        "eos_token_id": None,
        "layer_types": [LINEAR, LINEAR, "sliding_attention"],
    }
    slot_axis = -2
    # Tokens, and heads, widths of states, rows and inputs of the convolution of n-grams.
    windows = {"every_kind": {SEQ, 2, 4, 8, 9}, "longer_ngrams": {SEQ, 2, 4, 8}}
    rules = Conformance.rules | {"expert": "data", "embed": None}  # three parts of a table do not divide

    def test_export_is_what_was_read(self, name, made, tmp_path):
        """And what follows from the config."""
        _, directory, model = made(name)
        maxlib.save_pretrained(model, tmp_path / "export")
        want, got = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "export"))
        hashed = {tensor for tensor in got if tensor.endswith(parity.FROM_CONFIG)}
        assert got.keys() - hashed == want.keys() and len(hashed) == 3 * len(model.cfg.ngram_layers)
        for tensor, value in want.items():
            assert got[tensor].tobytes() == value.tobytes(), tensor

    @pytest.mark.full
    def test_left_padding_changes_nothing(self, name, exact):
        """Blocks and n-grams count from the first token, not from the first column."""
        case, _, model = exact(name)
        padded = np.pad(case["tokens"], ((0, 0), (5, 0)))
        valid = np.broadcast_to(np.arange(padded.shape[1]) >= 5, padded.shape).astype(np.int32)
        assert_close(_logits(model, padded, valid)[:, 5:], _logits(model, case["tokens"]))


class TestQwen4ExpImages(ImageConformance):
    family = "qwen4_exp"
    config = "Qwen4ExpConfig"
    dtype = "float64"
    gradients = 1e-3
    text_base = TEXT | {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}
    rules = TestQwen4Exp.rules
    cases = {"images": {}}
    matters = {"text_config.rope_parameters": ROPE | {"mrope_section": [3, 1, 0]}}
    refused = {"vision_config.hidden_act": "gelu", "vision_config.out_hidden_size": 24}
    test_export_is_what_was_read = TestQwen4Exp.test_export_is_what_was_read


def test_other_hashes_are_refused(tmp_path):
    case = parity.golden("qwen4_exp")["every_kind"]
    name = "model.layers.1.ple.ple_embedding.layer_multipliers"
    with pytest.raises(ValueError, match="layer_multipliers is not what the config says"):
        maxlib.from_pretrained(parity.directory(tmp_path, case, **{name: np.array([3, 5, 7])}))


def test_hashes_are_those_of_63_bits():
    """With the sizes of the release, against numpy's integers."""
    rows = nn.NgramHash(vocab=248_320, size=3, heads=8, base=20_000_000, layer=0, seed=1234)
    ids = np.random.RandomState(0).randint(0, 248_320, (3, 1, 9))
    got = jax.jit(rows)([jnp.asarray(x) for x in ids])
    products = ids * rows.factors[:, None, None]
    two = products[0] ^ products[1]
    want = [n[..., None] % rows.rows[part] for n, part in ((two, slice(8)), (two ^ products[2], slice(8, 16)))]
    np.testing.assert_array_equal(got, np.concatenate(want, axis=-1) + rows.offsets)
    assert rows.rows[0] == 20_000_003 and (products > 0).all() and products.max() > 1 << 61
