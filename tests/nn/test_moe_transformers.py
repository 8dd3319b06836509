"""Routers and blocks of experts against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops
from tests.nn.experts import DIM, MLP, E, X, call, close, filled, input_router, inputs, router


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


BLOCKS = {
    "DeepSeek V3": (
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3MoE",
        "gate",
        {"n_group": 3, "topk_group": 2, "n_shared_experts": 2},
        ROUTERS["DeepSeek V3"][4],
    ),
    "GPT-OSS": ("gpt_oss", "GptOssConfig", "GptOssMLP", "router", {}, {"bias": True}),
    "Llama 4": ("llama4", "Llama4TextConfig", "Llama4TextMoe", "router", {}, None),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_equals_transformers(name):
    torch = pytest.importorskip("torch")
    family, config, block, gate, hf_options, options = BLOCKS[name]
    theirs = randomized(getattr(modeling(family), block)(tiny_config(family, config, **hf_options)))
    values = numpy_of(theirs)
    mine = loaded(values, gate, lambda: input_router() if options is None else router(**options), name == "GPT-OSS")
    x = inputs()
    want = theirs(torch.tensor(np.asarray(x)))
    want = (want[0] if isinstance(want, tuple) else want).detach().numpy().reshape(x.shape)
    close(call(mine, x)[0], want)


def loaded(values, gate, make_router, is_gpt_oss):
    width = next((w.shape[0] for name, w in values.items() if "shared" in name and "up_proj" in name), None)
    shared = lambda: None if width is None else nn.GatedMLP(DIM, width, rngs=nnx.Rngs(0))
    activation = ops.ClampedSwiGLU() if is_gpt_oss else ops.swiglu
    layer = filled(
        lambda: nn.MoE(
            DIM, MLP, router=make_router(), shared=shared(), activation=activation, bias=is_gpt_oss, rngs=nnx.Rngs(0)
        )
    )
    layer.router.gate.w[...] = values[f"{gate}.weight"]
    if layer.router.gate.b is not None:
        layer.router.gate.b[...] = values[f"{gate}.bias"]
    if getattr(layer.router, "expert_bias", None) is not None:
        layer.router.expert_bias[...] = values[f"{gate}.e_score_correction_bias"]
    gate_up, down = values["experts.gate_up_proj"], values["experts.down_proj"]
    if gate_up.shape[1] == DIM:  # GPT-OSS and Llama 4 keep them the other way round
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    halves = (gate_up[:, ::2], gate_up[:, 1::2]) if is_gpt_oss else (gate_up[:, :MLP], gate_up[:, MLP:])
    layer.gate.w[...], layer.up.w[...], layer.down.w[...] = *halves, down
    if is_gpt_oss:
        bias = values["experts.gate_up_proj_bias"]
        layer.gate.b[...], layer.up.b[...], layer.down.b[...] = (
            bias[:, ::2],
            bias[:, 1::2],
            values["experts.down_proj_bias"],
        )
    for part in ("gate", "up", "down") if width else ():
        names = [name for name in values if "shared" in name and f"{part}_proj" in name]
        getattr(layer.shared, part).w[...] = values[names[0]]
    return layer
