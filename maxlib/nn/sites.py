"""Layers with a matmul, and rules that change them from outside: the common part of quantization and adapters."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib._utils.paths import dotted
from maxlib.nn._linear import Einsum, Embed
from maxlib.nn.experts._linear import ExpertLinear
from maxlib.nn.quantized import QuantizedWeight
from maxlib.nn.stack import Stack
from maxlib.nn.tree import find as find
from maxlib.sharding.layers import num_layer_axes

Kind = Literal["dense", "expert", "router", "embedding", "unknown"]
Site = Einsum | ExpertLinear | Embed
SITES = (Einsum, ExpertLinear, Embed)


# Indices in a stack, negative ones from its end, or a function that returns them given the number of layers.
Layers = tuple[int, ...] | Callable[[int], tuple[int, ...]] | None


@dataclass(frozen=True)
class Where:
    """Location of a matmul.

    Attributes:
        path: Pattern path.
        kind: Kind of the layer.
        layer: Index of the layer in its stack; None outside stacks.
        count: Number of layers in the stack.
    """

    path: str
    kind: Kind
    layer: int | None = None
    count: int = 0


@runtime_checkable
class Selector(Protocol):
    """A rule that selects layers by pattern path, index and kind."""

    @property
    def match(self) -> str: ...
    @property
    def layers(self) -> Layers: ...
    @property
    def kinds(self) -> tuple[Kind, ...]: ...


def fits(rule: Selector, site: Where) -> bool:
    """Returns True if `rule` selects this matmul."""
    if site.kind not in rule.kinds or not fnmatch.fnmatchcase(site.path, rule.match):
        return False
    if rule.layers is None:
        return True
    layers = rule.layers(site.count) if callable(rule.layers) else rule.layers
    return site.layer in [i + site.count if i < 0 else i for i in layers]  # -1 is the last layer


def decide(rules: Sequence[Selector], where: Where) -> int | None:
    """Returns the index of the first rule that selects the matmul; None if no rule does."""
    return next((n for n, rule in enumerate(rules) if fits(rule, where)), None)


class Decisions:
    """Applies the first matching rule to each matmul, and checks that every rule was used.

    Args:
        rules: The rules.
        treatment: Returns the treatment of a rule, such as a quantization or an adapter.
    """

    def __init__(self, rules: Sequence[Any], treatment: Callable[[Any], Hashable]):
        if wrong := [rule.match for rule in rules if not isinstance(rule.match, str)]:
            raise TypeError(f"a rule's match must be one pattern, such as '*.attn.q', got {wrong[0]!r:.80}")
        self.rules, self.treatment = rules, treatment
        self._used: set[int] = set()
        self._seen: dict[str, Kind] = {}
        self._most = 0

    def __call__(self, where: Where) -> Any:
        """Returns the treatment of a matmul, None for none."""
        self._seen[where.path], self._most = where.kind, max(self._most, where.count)
        if (n := decide(self.rules, where)) is None:
            return None
        self._used.add(n)
        return self.treatment(self.rules[n])

    def check(self) -> None:
        """Raises ValueError if a rule was never used, or names a layer that does not exist."""
        if idle := [rule for n, rule in enumerate(self.rules) if n not in self._used]:
            raise ValueError(
                f"these rules match no matmul, or only matmuls of earlier rules: {', '.join(map(_short, idle))}. "
                + self._hint(idle[0])
                + f"The matmuls are {', '.join(f'{path} ({kind})' for path, kind in self._seen.items())}"
            )
        for rule in self.rules:
            layers = () if rule.layers is None or callable(rule.layers) else rule.layers
            if absent := [i for i in layers if not -self._most <= i < self._most]:
                raise ValueError(
                    f"{_short(rule)} names the layers {absent}, but the largest stack has {self._most}, numbered from 0"
                )

    def _hint(self, rule: Selector) -> str:
        """Says what an unused rule may have meant."""
        named = [path for path in self._seen if fnmatch.fnmatchcase(path, rule.match)]
        if named and not any(self._seen[path] in rule.kinds for path in named):
            return f"{named[0]} is of the kind {self._seen[named[0]]!r}, which is not one of the rule's kinds. "
        near = [] if named else _nearest(rule.match, list(self._seen))
        return f"Did you mean {' or '.join(near)}? " if near else ""


def _short(rule: Selector) -> str:
    """Describes what a rule selects."""
    layers = "" if rule.layers is None else f", layers={rule.layers}"
    return f"{type(rule).__name__}(match={rule.match!r}{layers}, kinds={rule.kinds})"


def _nearest(match: str, names: list[str]) -> list[str]:
    """Returns names that a pattern without a match may mean: `layers.attn.q` for transformers' `*.q_proj`."""
    words = re.findall("[a-z0-9]+", match.rpartition(".")[2].lower())
    same = [name for name in names if name.rpartition(".")[2] in words]
    return same[:3] or difflib.get_close_matches(match, names, n=3, cutoff=0.4)


def kind_of(site: Any) -> Kind:
    """Returns the kind of a layer."""
    if isinstance(site, Embed):
        return "embedding"
    if isinstance(site, ExpertLinear):
        return "expert"
    return "router" if "router" in axes_of(site) else "dense"


def axes_of(site: Any) -> tuple[str, ...]:
    """Returns the axis names of a layer's weight."""
    w = site.w.values if isinstance(site.w, QuantizedWeight) else site.w
    assert isinstance(w, nnx.Variable)
    return tuple(w.get_metadata()["axes"])


def outputs(site: Any) -> tuple[int, ...]:
    """Returns the output dimensions of a layer's weight, those that are not summed over."""
    if isinstance(site, Einsum):
        letters, out = site.spec.partition(",")[2].split("->")
        return tuple(d for d, letter in enumerate(letters) if letter in out)
    if isinstance(site, ExpertLinear):
        return tuple(d for d, letter in enumerate(site.weight_order) if letter != "I")
    return (0,)


def dimensions(site: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the dimensions of a layer's weight, from its end: those of experts, of outputs, and of inputs."""
    axes, out = axes_of(site), outputs(site)
    count = len(axes) - num_layer_axes(axes)
    letters = site.weight_order if isinstance(site, ExpertLinear) else "." * count
    experts = tuple(d - count for d in out if letters[d] == "E")
    of_outputs = tuple(d - count for d in out if letters[d] != "E")
    return experts, of_outputs, tuple(d - count for d in range(count) if d not in out)


def unknown(model: Any) -> dict[str, nnx.Variable]:
    """Returns the floating matrices of layers of unknown types by path, without position tables and filters of
    convolutions.
    """
    owned_and_others = find(model, (*SITES, nnx.Variable))
    return {path: x for path, x in owned_and_others if isinstance(x, nnx.Variable) and _is_matrix(x)}


def _is_matrix(x: nnx.Variable) -> bool:
    """Returns True for floating matrices, judged by axis names or by the number of dimensions without the
    layer axis.
    """
    axes, value = x.get_metadata().get("axes"), x.get_value()
    rank = value.ndim if axes is None else len(axes) - num_layer_axes(axes)
    # Tables of positions and filters of convolutions are no matrices that multiply activations.
    is_table = bool({"position", "tap"} & {*(axes or ())})
    return rank >= 2 and not is_table and jnp.issubdtype(value.dtype, jnp.floating)


Decide = Callable[[Where], Hashable]
Change = Callable[[Any, Any, str, "tuple[int, ...] | None"], Any]


def change_sites(model: Any, decide: Decide, change: Change) -> Any:
    """Changes the layers of `model` that have a matmul.

    A stack whose layers are treated differently gets other groups, so that equal layers are still scanned.

    Args:
        model: A model.
        decide: Returns the treatment of a matmul, compared by value; None leaves it as it is.
        change: Called with a layer, its treatment, its pattern path and the indices of the layers that it stores (None
            outside stacks); returns the new layer.
    """

    def change_node(path, node):
        full = dotted(path)
        if isinstance(node, Stack):
            return _in_stack(node, full, decide, change)
        if not isinstance(node, SITES):
            return node
        treatment = decide(Where(full, kind_of(node)))
        return node if treatment is None else change(node, treatment, full, None)

    return jax.tree_util.tree_map_with_path(change_node, model, is_leaf=lambda x: isinstance(x, (*SITES, Stack)))


def map_sites(model: Any, f: Callable[[str, Any], Any]) -> Any:
    """Applies `f` to the path and the layer of every matmul."""
    return jax.tree_util.tree_map_with_path(
        lambda path, site: f(dotted(path), site) if isinstance(site, SITES) else site,
        model,
        is_leaf=lambda x: isinstance(x, SITES),
    )


def replace(site: Any, **changes: Any) -> Any:
    """Returns a copy of a layer with some attributes replaced; the copy shares the other arrays."""
    new = jax.tree.map(lambda a: a, site)
    for name, value in changes.items():
        # A matmul is a static attribute, unless it has arrays.
        static = name == "matmul" and not isinstance(value, nnx.Module)
        setattr(new, name, nnx.static(value) if static else nnx.data(value))
    return new


def _in_stack(stack: Stack, path: str, decide: Decide, change: Change) -> Stack:
    """Changes the matmuls of a stack, in which all layers of a slot then have one treatment."""
    stack = _restacked(stack, path, decide)
    new = jax.tree.map(lambda a: a, stack)

    def change_layers(layers: Any, numbers: tuple[int, ...]) -> Any:
        def change_site(inner: str, site: Any) -> Any:
            full = f"{path}.{inner}"
            treatments = [decide(Where(full, kind_of(site), i, len(stack))) for i in numbers]
            return site if treatments[0] is None else change(site, treatments[0], full, numbers)

        return map_sites(layers, change_site)

    for slots, group in zip(new.groups, stack.layer_groups, strict=True):
        for slot, layers in enumerate(slots):
            slots[slot] = change_layers(layers, (*group.layers(slot),))
    return new


def _restacked(stack: Stack, path: str, decide: Decide) -> Stack:
    """Returns the stack with groups in which all layers of a slot have one treatment."""
    layers = jax.eval_shape(lambda s: list(s), stack)
    kinds = [
        tuple(decide(Where(f"{path}.{inner}", kind_of(site), i, len(layers))) for inner, site in find(layer, SITES))
        for i, layer in enumerate(layers)
    ]
    slots = [stack.where(i)[0] for i in range(len(layers))]
    # As many pairs of slot and treatment as slots: each slot already has one treatment.
    if len(set(zip(slots, kinds, strict=True))) == len(set(slots)):
        return stack
    return stack.restacked(kinds)
