"""Layouts and models for plans, and what a plan moves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax
from flax import nnx

from maxlib import nn, ops, plan, sharding
from maxlib.models import llama, mixtral, qwen3_5
from tests.nn.tiny import LLAMA

CONFIG = dataclasses.replace(LLAMA, vocab=64, num_layers=4)
MIXTRAL = mixtral.Config(
    vocab=64,
    num_layers=4,
    dim=32,
    expert_dim=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=ops.Rope(8),
    num_experts=8,
    top_k=2,
)

SMALL_RECURRENT = {
    "vocab": 64,
    "num_layers": 4,
    "dim": 64,
    "mlp_dim": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_key_heads": 2,
    "num_value_heads": 4,
    "vision": None,
}


def build() -> Any:
    """Builds a model without arguments, as `maxlib plan tests.plan.jobs:build` names it."""
    return llama.Llama(CONFIG, rngs=nnx.Rngs(0))


def optimizer(model: Any) -> optax.GradientTransformation:
    """Returns an optimizer without state, as `--optimizer tests.plan.jobs:optimizer` names it."""
    return optax.sgd(1e-3)


def layout(strategy: Any = "fsdp", *, dcn: Mapping[str, int] | None = None, **degrees: int) -> sharding.Layout:
    """Returns a strategy, or the one of that name, over devices that a plan finds."""
    strategy = sharding.preset(strategy) if isinstance(strategy, str) else strategy
    return sharding.Layout({**(degrees or {"fsdp": -1}), "dcn": dcn}, strategy)


def moved(got: plan.Plan) -> dict[tuple[str, str], float]:
    """Returns the bytes of each kind of collective over each group of mesh axes."""
    return {(collective.kind, " ".join(collective.axes)): collective.bytes for collective in got.costs.collectives}


def recurrent(implementation: str = "mosaic_tpu") -> Any:
    """Builds a small Qwen3.5 whose gated delta rule runs on a named implementation."""
    config = dataclasses.replace(qwen3_5.PRESETS["qwen3.5-0.8b"], **SMALL_RECURRENT)
    model = qwen3_5.Qwen35(config, rngs=nnx.Rngs(0))
    return nn.mixer.with_implementation(model, implementation, op="gated_delta_rule")
