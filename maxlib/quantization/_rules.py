"""Rules that assign formats to weights."""

import dataclasses
from collections.abc import Mapping, Sequence

from maxlib.nn.sites import Kind
from maxlib.quantization._formats import Format


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives `format` to the layers that the other fields select.

    Args:
        format: The format; None for full precision.
        match: Shell pattern on pattern paths ("layers.attn.q").
        layers: Indices of layers in each stack; negative ones count from the end. None for all.
        kinds: Kinds of layers, by default neither routers nor embeddings (the head is one). "unknown" are matrices in
            layers of other libraries; they can only be left in full precision (`high(match=..., kinds=("unknown",))`).
    """

    format: Format | None
    match: str = "*"
    layers: tuple[int, ...] | None = None
    kinds: tuple[Kind, ...] = ("dense", "expert")


Rules = str | Format | Sequence[Rule]


def high(*layers: int, match: str = "*", kinds: tuple[Kind, ...] = ("dense", "expert")) -> Rule:
    """Makes a rule that keeps layers in full precision: `high(0, -1)` for the first and the last layer of each stack.

    Args:
        layers: Indices of layers in each stack; none for all.
        match: Shell pattern on pattern paths.
        kinds: Kinds of layers.
    """
    return Rule(None, match, layers or None, kinds)


def as_rules(rules: Rules, presets: Mapping[str, Format]) -> tuple[Rule, ...]:
    """Returns rules; a preset's name or a format applies to all layers except embeddings, head and routers."""
    if isinstance(rules, str):
        if rules not in presets:
            raise ValueError(
                f"there is no preset {rules!r}; pass one of {sorted(presets)}, a Format or a list of Rules"
            )
        rules = presets[rules]
    return (Rule(rules),) if isinstance(rules, Format) else tuple(rules)
