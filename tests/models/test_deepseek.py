"""DeepSeek V2 and V3 against transformers: both routers with and without groups, queries with and without a latent, YaRN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from tests.models import parity
from tests.models.conformance import Conformance

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "q_lora_rank": 12,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
REFUSED = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "moe_layer_freq": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "qk_head_dim": 12,
    "index_topk": 2048,  # DeepSeek V3.2
}
MATTERS = {
    "routed_scaling_factor": 3.0,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "n_group": 3,
    "rms_norm_eps": 0.1,
    "rope_parameters": YARN | {"mscale_all_dim": 0.3},
}


class DeepSeek(Conformance):
    family = "deepseek"
    base = BASE
    depths = (3, 4)  # the first have no experts
    slot_axis = -2
    presets = {
        "deepseek-v2-lite": 15.71,
        "deepseek-v2": 235.74,
        "deepseek-v3": 671.03,
        "deepseek-r1": 671.03,
        "kimi-k2": 1026.41,
    }


class TestV2(DeepSeek):
    config = "DeepseekV2Config"
    cases = {
        "v2": {
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": YARN,
        },
        "v2_lite": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    }
    matters = MATTERS | {"topk_method": "greedy"}
    refused = REFUSED | {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "mlp_bias": True}


class TestV3(DeepSeek):
    config = "DeepseekV3Config"
    cases = {
        "v3": {
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "num_hidden_layers": 4,
            "rope_parameters": YARN,
        },
        "kimi": {
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    }
    matters = MATTERS | {"norm_topk_prob": False, "rope_interleave": False}
    refused = REFUSED | {"scoring_func": "softmax", "topk_method": "greedy"}
    test_presets_have_the_published_size = None  # V2's are V3's


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """transformers' V3 with two prediction modules, which it does not save, and a directory as DeepSeek releases them."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpModel

    fields = TestV3.base | TestV3.cases["kimi"] | {"num_hidden_layers": 2, "num_mtp_layers": 2}
    main = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(**fields)).eval()
    theirs = MtpModel(main, 2).eval()
    random, path = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("mtp")
    for name, p in (*parity.tensors_of(main).items(), *parity.tensors_of(theirs).items()):
        noise = torch.randn(p.shape, generator=random)
        p.data.copy_(1 + 0.1 * noise if "norm" in name else noise * (1 if "embed" in name else p.shape[-1] ** -0.5))
    main.save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    own = {f"model.{name}": p.detach() for name, p in parity.tensors_of(theirs).items() if name.startswith("layers.")}
    for name, value in parity.stored(main, own).items():
        _, _, depth, rest = name.split(".", 3)
        rest = rest.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        stored[f"model.layers.{2 + int(depth)}.{rest}"] = value.contiguous().numpy()
    for layer in ("model.layers.2", "model.layers.3"):
        stored[f"{layer}.embed_tokens.weight"] = stored["model.embed_tokens.weight"]
        stored[f"{layer}.shared_head.head.weight"] = stored["lm_head.weight"]
    save_file(stored, path / "model.safetensors")
    return main, theirs, path


def test_prediction_modules_are_those_of_transformers(modules):
    """Each takes what the one before found, and tokens one place further ahead."""
    import torch

    main, theirs, path = modules
    model, tokens = maxlib.from_pretrained(path, num_mtp=2), parity.tokens(61, 24)
    run = jax.jit(lambda model, tokens: model.look_ahead(model(tokens, dtype=jnp.float32).hidden, tokens))
    with torch.no_grad():
        ids = torch.from_numpy(tokens).long()
        hidden, positions = main.model(ids).last_hidden_state, torch.arange(24)[None]
        for depth, found in enumerate(run(model, tokens), start=1):
            shifted = {"input_ids": ids[:, depth:], "position_ids": positions[:, depth:]}
            hidden = theirs.forward_layer(depth - 1, hidden[:, :-1], mtp_cache=None, **shifted)
            got, want = found.hidden[:, : 24 - depth], hidden.numpy()
            assert np.abs(got - want).max() < 1e-4 * want.std()


def test_prediction_modules_are_left_out_unless_asked_for(modules, tmp_path):
    path = modules[-1]
    model = maxlib.from_pretrained(path)
    assert len(model.mtp) == 0
    maxlib.save_pretrained(model, tmp_path / "without")
    assert not any(".layers.2." in name for name in load_file(tmp_path / "without" / "model.safetensors"))
    maxlib.save_pretrained(maxlib.from_pretrained(path, num_mtp=2), tmp_path / "with")
    got, want = (load_file(p / "model.safetensors") for p in (tmp_path / "with", path))
    copies = {name for name in want if name.endswith((".embed_tokens.weight", "shared_head.head.weight"))}
    assert want.keys() - got.keys() == copies - {"model.embed_tokens.weight"}
    assert all(got[name].tobytes() == want[name].tobytes() for name in got)
    assert len(maxlib.from_pretrained(tmp_path / "with", num_mtp=1).mtp) == 1


def transformers_cases():
    return TestV2.transformers_cases() | TestV3.transformers_cases()
