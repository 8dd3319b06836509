"""Layouts and models for plans, and what a plan moves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax
from flax import nnx

from maxlib import ops, plan, sharding
from maxlib.models import llama, mixtral
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
