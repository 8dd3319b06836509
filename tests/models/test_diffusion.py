"""LLaDA, SDAR and Dream against transformers' Llama, Qwen3 and Qwen2, which they are but for their masks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib.models import dream, llada
from maxlib.weights import read_model
from tests.models import parity

SIZES = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
LLADA = {
    "model_type": "llada",
    "d_model": 32,
    "mlp_hidden_size": 44,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 61,
    "embedding_size": 61,
    "max_sequence_length": 64,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "weight_tying": False,
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "bias_for_layer_norm": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "mask_token_id": 60,
    "mlp_ratio": 4,
    "init_fn": "mitchell",
    "multi_query_attention": None,
}
SDAR = SIZES | {
    "model_type": "sdar",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "block_size": 4,
    "mask_token_id": 60,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
}
DREAM = {name: value for name, value in SDAR.items() if name not in ("head_dim", "block_size")} | {
    "model_type": "Dream"
}
NAMES = {  # from Llama's to LLaDA's
    "embed_tokens": "wte",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "model.norm": "model.ln_f",
    "lm_head": "model.ff_out",
    "layers": "blocks",
    "model.": "model.transformer.",
}


def named_by_llada(name):
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


@pytest.fixture(scope="module", params=["llada", "sdar", "dream"])
def opened(request, tmp_path_factory):
    """A directory, our model of it, tokens, and the logits that transformers computes."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    at, tokens = tmp_path_factory.mktemp(request.param), parity.tokens(61, 18)
    if request.param == "llada":
        rope = {"rope_type": "default", "rope_theta": 5e5}
        config, rename = (
            transformers.LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=rope, rms_norm_eps=1e-5),
            named_by_llada,
        )
        make, fields, seen = transformers.LlamaForCausalLM, LLADA, np.ones((18, 18), bool)
    elif request.param == "dream":
        rope = {"rope_type": "default", "rope_theta": 1e6}
        config, rename = transformers.Qwen2Config(**SIZES, num_key_value_heads=2, rope_parameters=rope), str
        make, fields, seen = transformers.Qwen2ForCausalLM, DREAM, np.ones((18, 18), bool)
    else:
        rope = {"rope_type": "default", "rope_theta": 1e6}
        config, rename = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, rope_parameters=rope), str
        make, fields = transformers.Qwen3ForCausalLM, SDAR
        block = np.arange(18) // 4
        seen = block[:, None] >= block
    config._attn_implementation = "eager"
    theirs = make(config).eval()
    weights = parity.tensors({name: list(x.shape) for name, x in theirs.state_dict().items()})
    theirs.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    bias = torch.from_numpy(np.where(seen, 0, -np.inf).astype(np.float32))[None, None].expand(2, 1, 18, 18)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens).long(), attention_mask=bias).logits.numpy()
    (at / "config.json").write_text(json.dumps(fields))
    save_file({rename(name): x for name, x in weights.items()}, at / "model.safetensors")
    return at, maxlib.from_pretrained(at), tokens, logits


def test_logits_are_those_of_transformers(opened):
    _, model, tokens, logits = opened
    assert np.abs(parity.logits(model, tokens) - logits).max() < 1e-4 * logits.std()


def test_export_is_what_was_read(opened, tmp_path):
    at, model, _, _ = opened
    maxlib.save_pretrained(model, tmp_path / "export")
    want, got = (load_file(path / "model.safetensors") for path in (at, tmp_path / "export"))
    assert got.keys() == want.keys() and all((got[name] == x).all() for name, x in want.items())
    assert read_model(tmp_path / "export")[1] == model.cfg == read_model(at)[1]


def test_a_cache_of_blocks_changes_nothing(opened):
    """In calls of whole blocks; a LLaDA and a Dream have none."""
    _, model, tokens, logits = opened
    if isinstance(model, llada.LLaDA | dream.Dream):
        with pytest.raises(ValueError, match="is an encoder, which has no cache"):
            model.init_cache(1, 8)
        return
    step = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache, dtype=jnp.float32))
    cache, hidden = model.init_cache(2, 32, dtype=jnp.float32), []
    for start, end in ((0, 8), (8, 12), (12, 16)):
        out = step(model, tokens[:, start:end], cache)
        cache, hidden = out.cache, [*hidden, out.hidden]
    got = jax.jit(lambda model, hidden: model.logits(jnp.concatenate(hidden, axis=1)))(model, hidden)
    np.testing.assert_allclose(got, logits[:, :16], atol=1e-4 * logits.std())


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        (LLADA, {"block_type": "sequential"}),
        (LLADA, {"alibi": True}),
        (LLADA, {"include_qkv_bias": True}),
        (LLADA, {"vocab_size": 60}),
        (LLADA, {"surprise": 1}),
        (SDAR, {"use_sliding_window": True}),
        (SDAR, {"hidden_act": "gelu"}),
        (DREAM, {"use_sliding_window": True}),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(fields, changes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(ValueError, match=next(iter(changes))):
        read_model(tmp_path)
