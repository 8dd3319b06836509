"""Adapters, and rules that assign them to matmuls."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from maxlib.nn.sites import Kind


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapter `w + scale * b @ a` (arXiv:2106.09685), with `scale = alpha / rank`.

    Args:
        rank: Rank of the product.
        alpha: Numerator of the scale.
        rslora: True makes the scale `alpha / sqrt(rank)` (arXiv:2312.03732).
        dora: True trains the magnitude of each output's row separately from its direction (arXiv:2402.09353).
        dtype: Dtype of the factors. bfloat16 factors lose small updates.

    Raises:
        ValueError: when rank or alpha is not positive, or `dtype` is not floating.
    """

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    dtype: Any = jnp.float32

    def __post_init__(self):
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"rank must be at least 1 and alpha positive, got rank={self.rank}, alpha={self.alpha}")
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(f"dtype must be floating, such as jnp.float32, got {self.dtype}")

    @property
    def scale(self) -> float:
        """Returns the factor on the product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives `adapter` to the layers that the other fields select.

    Args:
        adapter: The adapter; None for no adapter.
        match: Shell pattern on pattern paths ("layers.attn.q").
        layers: Indices of layers in each stack; negative ones count from the end. None for all.
        kinds: Kinds of layers, by default not routers.
    """

    adapter: LoRA | None
    match: str = "*"
    layers: tuple[int, ...] | None = None
    kinds: tuple[Kind, ...] = ("dense", "expert")


Rules = LoRA | Rule | Sequence[Rule]


def as_rules(rules: Rules) -> tuple[Rule, ...]:
    """Returns rules; a single adapter applies to all dense and expert matrices."""
    if isinstance(rules, LoRA):
        return (Rule(rules),)
    rules = (rules,) if isinstance(rules, Rule | str) else tuple(rules)
    if wrong := [rule for rule in rules if not isinstance(rule, Rule)]:
        raise TypeError(f"rules must be a LoRA, such as LoRA(16, alpha=32), or Rules, got {wrong[0]!r:.80}")
    if not any(rule.adapter for rule in rules):
        raise ValueError(f"rules must assign an adapter to something, as LoRA(16, alpha=32) alone does, got {rules}")
    return rules
