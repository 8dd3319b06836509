"""Routers against transformers; families compare their blocks of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn
from tests.nn.experts import DIM, MLP, E, X, input_router, inputs, router


def modeling(family):
    pytest.importorskip("torch")
    return pytest.importorskip(f"transformers.models.{family}.modeling_{family}")


def tiny_config(family, name, **options):
    """Every spelling of the sizes that some family uses."""
    config = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=DIM,
        intermediate_size=MLP,
        moe_intermediate_size=MLP,
        num_experts_per_tok=X,
        n_routed_experts=E,
        num_attention_heads=2,
    )
    return getattr(config, name)(**sizes | dict(num_local_experts=E, num_experts=E, mlp_bias=False) | options)


def randomized(module, seed=0):
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.normal_(std=0.5)
    return module.eval()


def numpy_of(module):
    return {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in module.state_dict().items()}


ROUTERS = {
    "Mixtral": ("mixtral", "MixtralConfig", "MixtralTopKRouter", {}, {}),
    "Qwen3": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {}),
    "Qwen3 as it is": (
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeTopKRouter",
        {"norm_topk_prob": False},
        {"renormalize": False},
    ),
    "DeepSeek V2-Lite": (
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2TopkRouter",
        {"topk_method": "greedy", "routed_scaling_factor": 1.5},
        {"renormalize": False, "scale": 1.5},
    ),
    "DeepSeek V2": (
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2TopkRouter",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 16.0},
        {"renormalize": False, "scale": 16.0, "groups": nn.router.GroupLimit(3, 2, scores_per_group=1)},
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3TopkRouter",
        {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        {"score": jax.nn.sigmoid, "scale": 2.5, "groups": nn.router.GroupLimit(3, 2), "expert_bias": True},
    ),
    "GPT-OSS": ("gpt_oss", "GptOssConfig", "GptOssTopKRouter", {}, {"bias": True}),
    "Llama 4": ("llama4", "Llama4TextConfig", "Llama4Router", {}, None),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router_equals_transformers(name):
    family, config, router_name, hf_options, options = ROUTERS[name]
    theirs = randomized(getattr(modeling(family), router_name)(tiny_config(family, config, **hf_options)))
    mine = input_router() if options is None else router(**options)
    values = numpy_of(theirs)
    mine.gate.w[...] = values["weight"]
    if mine.gate.b is not None:
        mine.gate.b[...] = values["bias"]
    if "e_score_correction_bias" in values:
        mine.expert_bias[...] = values["e_score_correction_bias"]
    x = inputs(B=8, T=50)
    np.testing.assert_allclose(shares(jax.jit(lambda m, x: m(x))(mine, x)), hf_shares(theirs, x), rtol=1e-4, atol=1e-6)


def shares(routing):
    """The weight of every expert for every token."""
    weights = routing.weights if routing.input_weights is None else routing.input_weights
    return jnp.einsum("...X,...XE->...E", weights, jax.nn.one_hot(routing.experts, E)).reshape(-1, E)


def hf_shares(module, x):
    import torch

    out = module(torch.tensor(np.asarray(x)).reshape(-1, DIM))
    if len(out) == 2:  # Llama 4 returns the scores of all experts
        return out[0].detach().numpy()
    _, weights, experts = (part.detach() for part in out)
    return torch.zeros(len(weights), E).scatter_(1, experts, weights).numpy()
