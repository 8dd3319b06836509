"""Which weight gets which format."""

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
    """`format` for the layers that the other fields describe; None leaves them in full precision.

    match: a pattern, as a shell's, on logical paths ("layers.attn.q"). layers: of each stack, the numbers of the
    layers; negative ones count from the end. kinds: what a rule speaks of: by default neither routers nor embeddings
    (the head is one). "unknown" are matrices of layers that are not made of maxlib's; they can only be left
    (`high(match=..., kinds=("unknown",))`).
    """

    format: Format | None
    match: str = "*"
    layers: tuple[int, ...] | None = None
    kinds: tuple[Kind, ...] = ("dense", "expert")

    def fits(self, site: "Where") -> bool:
        return (
            site.kind in self.kinds
            and fnmatch.fnmatchcase(site.path, self.match)
            and (self.layers is None or site.layer in [i + site.count if i < 0 else i for i in self.layers])
        )


Rules = str | Format | Sequence[Rule]


@dataclasses.dataclass(frozen=True)
class Where:
    """A matmul's place: its logical path, its kind, and its layer of how many, if a stack holds it."""

    path: str
    kind: Kind
    layer: int | None = None
    count: int = 0


def high(*layers: int, match: str = "*", kinds: tuple[Kind, ...] = ("dense", "expert")) -> Rule:
    """The rule that leaves what fits in full precision: `high(0, -1)` the first and the last layer of a stack."""
    return Rule(None, match, layers or None, kinds)


def as_rules(rules: Rules, presets: Mapping[str, Format]) -> tuple[Rule, ...]:
    """A preset's name or a format means everything but embeddings, head and routers."""
    if isinstance(rules, str):
        if rules not in presets:
            raise ValueError(
                f"there is no preset {rules!r}; give one of {sorted(presets)}, a Format or a list of Rules"
            )
        rules = presets[rules]
    return (Rule(rules),) if isinstance(rules, Format) else tuple(rules)


def decide(rules: Sequence[Rule], where: Where) -> int | None:
    """The first rule that fits, None if none does."""
    return next((n for n, rule in enumerate(rules) if rule.fits(where)), None)


def kind_of(site: Any) -> Kind:
    if isinstance(site, nn.Embed):
        return "embedding"
    if isinstance(site, nn.ExpertLinear):
        return "expert"
    return "router" if "router" in axes_of(site) else "dense"


def axes_of(site: Any) -> tuple[str, ...]:
    w = site.w.values if isinstance(site.w, nn.quantized.QuantizedWeight) else site.w
    assert isinstance(w, nnx.Variable)
    return tuple(w.get_metadata()["axes"])


def unknown(model: Any) -> dict[str, nnx.Variable]:
    """The floating matrices that belong to no layer which quantization knows, but for tables of positions, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, (*SITES, nnx.Variable)))
    found = {dotted(path): x for path, x in leaves if isinstance(x, nnx.Variable)}
    return {path: x for path, x in found.items() if _is_matrix(x)}


def _is_matrix(x: nnx.Variable) -> bool:
    """Tells by the names of its axes, or, where it has none, by its dimensions but for a stack's."""
    axes, value = x.get_metadata().get("axes"), x.get_value()
    rank = value.ndim if axes is None else len(axes) - sharding.layers.num_layer_axes(axes)
    return rank >= 2 and "position" not in (axes or ()) and jnp.issubdtype(value.dtype, jnp.floating)
