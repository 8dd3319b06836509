"""Rules: which weight gets which format."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn, sharding
from maxlib._utils.paths import dotted
from maxlib.quantization._formats import Format

Kind = Literal["dense", "expert", "router", "embedding", "unknown"]
Site = nn.Einsum | nn.ExpertLinear | nn.Embed
SITES = (nn.Einsum, nn.ExpertLinear, nn.Embed)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives `format` to the layers that the other fields select.

    Args:
        format: The format; None leaves them in full precision.
        match: Shell pattern on pattern paths ("layers.attn.q").
        layers: Numbers of layers in each stack; negative ones count from the end. None for all.
        kinds: Kinds of layers, by default neither routers nor embeddings (the head is one). "unknown" are matrices in
            layers of other libraries; they can only be left in full precision (`high(match=..., kinds=("unknown",))`).
    """

    format: Format | None
    match: str = "*"
    layers: tuple[int, ...] | None = None
    kinds: tuple[Kind, ...] = ("dense", "expert")

    def fits(self, site: "Where") -> bool:
        """Returns True if the rule selects this matmul."""
        return (
            site.kind in self.kinds
            and fnmatch.fnmatchcase(site.path, self.match)
            and (self.layers is None or site.layer in [i + site.count if i < 0 else i for i in self.layers])
        )


Rules = str | Format | Sequence[Rule]


@dataclasses.dataclass(frozen=True)
class Where:
    """Location of a matmul.

    Attributes:
        path: Pattern path.
        kind: Kind of the layer.
        layer: Number of the layer in its stack; None outside stacks.
        count: Layers in the stack.
    """

    path: str
    kind: Kind
    layer: int | None = None
    count: int = 0


def high(*layers: int, match: str = "*", kinds: tuple[Kind, ...] = ("dense", "expert")) -> Rule:
    """Makes the rule that leaves layers in full precision: `high(0, -1)` for the first and the last layer of each
    stack.

    Args:
        layers: Numbers of layers in each stack; none for all.
        match: Shell pattern on pattern paths.
        kinds: Kinds of layers.
    """
    return Rule(None, match, layers or None, kinds)


def as_rules(rules: Rules, presets: Mapping[str, Format]) -> tuple[Rule, ...]:
    """Returns rules; a preset's name or a format applies to all layers except embeddings, head and routers."""
    if isinstance(rules, str):
        if rules not in presets:
            raise ValueError(
                f"there is no preset {rules!r}; give one of {sorted(presets)}, a Format or a list of Rules"
            )
        rules = presets[rules]
    return (Rule(rules),) if isinstance(rules, Format) else tuple(rules)


def decide(rules: Sequence[Rule], where: Where) -> int | None:
    """Returns the index of the first rule that fits, None if none does."""
    return next((n for n, rule in enumerate(rules) if rule.fits(where)), None)


def kind_of(site: Any) -> Kind:
    """Returns the kind of a layer."""
    if isinstance(site, nn.Embed):
        return "embedding"
    if isinstance(site, nn.ExpertLinear):
        return "expert"
    return "router" if "router" in axes_of(site) else "dense"


def axes_of(site: Any) -> tuple[str, ...]:
    """Returns the axis names of a layer's weight."""
    w = site.w.values if isinstance(site.w, nn.quantized.QuantizedWeight) else site.w
    assert isinstance(w, nnx.Variable)
    return tuple(w.get_metadata()["axes"])


def unknown(model: Any) -> dict[str, nnx.Variable]:
    """Returns by path the floating matrices in layers that quantization does not know, without tables of positions."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, (*SITES, nnx.Variable)))
    found = {dotted(path): x for path, x in leaves if isinstance(x, nnx.Variable)}
    return {path: x for path, x in found.items() if _is_matrix(x)}


def _is_matrix(x: nnx.Variable) -> bool:
    """Returns True for floating matrices, by axis names or else by the number of dimensions, without a stack's axis."""
    axes, value = x.get_metadata().get("axes"), x.get_value()
    rank = value.ndim if axes is None else len(axes) - sharding.layers.num_layer_axes(axes)
    return rank >= 2 and "position" not in (axes or ()) and jnp.issubdtype(value.dtype, jnp.floating)
