"""Quantization of a model: changes how its matmuls are computed, or how their weights are stored."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from maxlib import nn
from maxlib._utils.paths import dotted
from maxlib.nn._layer_axis import map_layers
from maxlib.quantization._formats import INFERENCE, TRAINING, Format, check_backend
from maxlib.quantization._matmul import Quantized
from maxlib.quantization._rules import SITES, Rule, Rules, Where, as_rules, axes_of, decide, kind_of, unknown

Model = TypeVar("Model")
Change = Callable[[Any, Format, str], Any]


def for_training(model: Model, rules: Rules) -> Model:
    """Returns a model whose matmuls round their operands; parameters, their paths and their dtype stay as they are.

    A stack whose layers are treated differently gets another layout, so that equal layers are still scanned. Works on
    `jax.eval_shape` of a model and inside `jit`, so that the function given to the Trainer may end with it. Matrices in
    layers of unknown types stay in full precision, with a warning.

    Args:
        model: A model in full precision.
        rules: "int8" (weights and activations), "int8_gradients", "fp8" (e4m3 forward, e5m2 backward), a `Format`, or
            `Rule`s, of which the first that fits decides; matmuls that none fits stay in full precision.

    Raises:
        ValueError: when a rule decides nothing, a layer cannot be quantized, or the backend does not multiply these
            dtypes.
    """
    return _apply(model, as_rules(rules, TRAINING), _round_operands)


def for_inference(model: Model, rules: Rules) -> Model:
    """Returns a model with quantized weights, which are no longer trainable.

    Args:
        model: A model in full precision.
        rules: As for `for_training`, with these names. Weights only: "int8", "fp8", "int4" (groups of 32), "nf4"
            (groups of 64). Weights and activations: "int8_w8a8", "fp8_w8a8".

    Raises:
        ValueError: when `for_training` would raise it.
    """
    return _apply(model, as_rules(rules, INFERENCE), store)


def full_precision(model: Model) -> Model:
    """Returns a model with plain matmuls, and with quantized weights as parameters again, in the dtype they had.

    Args:
        model: A model from `for_training` or `for_inference`.
    """
    return _map_sites(model, lambda path, site: _restored(site))


def _apply(model: Any, rules: Sequence[Rule], change: Change) -> Any:
    """Applies `change` to each matmul with the format that the rules give it, and checks that the rules make sense."""
    for rule in rules:
        if rule.format is not None:
            check_backend(rule.format)
    used: set[int] = set()
    places: list[Where] = []

    def visit(where: Where, site: Any) -> Format | None:
        places.append(where)
        if (n := decide(rules, where)) is None:
            return None
        used.add(n)
        return rules[n].format

    new = _in(model, "", rules, visit, change)
    _look_at_unknown(model, rules, visit)
    _check_use(rules, used, places)
    return new


def _look_at_unknown(model: Any, rules: Sequence[Rule], visit: Callable[[Where, Any], Format | None]) -> None:
    """Warns of matrices in unknown layers that no rule leaves on purpose; raises ValueError if a rule quantizes one."""
    short = nn.tree.pattern_paths(model)
    found = [Where(path, "unknown") for path in dict.fromkeys(short[path] for path in unknown(model))]
    if wrong := [where.path for where in found if visit(where, None) is not None]:
        raise ValueError(f"{wrong} belong to no layer that can be quantized; make it of nn.Einsum or nn.ExpertLinear")
    if left := [where.path for where in found if decide(rules, where) is None]:
        warnings.warn(
            f"left in full precision, as nothing is known of their layers: {left}. Make these of nn.Einsum or nn.ExpertLinear, or "
            'leave them on purpose by a rule, high(match="...", kinds=("unknown",))',
            stacklevel=4,
        )


def _check_use(rules: Sequence[Rule], used: set[int], places: Sequence[Where]) -> None:
    """Raises ValueError if a rule decides nothing, or names a layer that does not exist."""
    if idle := [rule for n, rule in enumerate(rules) if n not in used]:
        raise ValueError(
            f"each rule must decide the format of a matmul, these decide none: {idle}; earlier rules win. The matmuls are "
            f"{', '.join(dict.fromkeys(f'{where.path} ({where.kind})' for where in places))}"
        )
    most = max((where.count for where in places), default=0)
    for rule in rules:
        if absent := [i for i in rule.layers or () if not -most <= i < most]:
            raise ValueError(f"{rule} names the layers {absent}, the largest stack has {most}, numbered from 0")


def _in(tree: Any, prefix: str, rules, visit, change: Change) -> Any:
    """Changes the matmuls of `tree`, which is at the dotted path `prefix` of the model."""

    def one(path, node):
        full = ".".join(filter(None, (prefix, dotted(path))))
        if isinstance(node, nn.Stack):
            return _in_stack(node, full, rules, visit, change)
        if not isinstance(node, SITES):
            return node
        format = visit(Where(full, kind_of(node)), node)
        return node if format is None else change(node, format, full)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=_is_place)


def _in_stack(stack: nn.Stack, path: str, rules, visit, change: Change) -> nn.Stack:
    """Changes the matmuls of a stack, in a layout where the rules treat layers of a slot alike."""
    stack = _laid_out(stack, path, rules)
    new, count = jax.tree.map(lambda a: a, stack), stack.num_layers
    for name, segment in stack.segments.items():
        slots = []
        for slot, layer in enumerate(getattr(stack, name)):
            slots.append(_in_layer(layer, path, [*segment.layers(slot)], count, visit, change))
        setattr(new, name, nnx.List(slots))
    return new


def _in_layer(layer, path: str, numbers: list[int], count: int, visit, change: Change):
    """Changes a layer, or several on a leading axis, which the rules treat alike."""

    def one(inner, site):
        full = f"{path}.{dotted(inner)}"
        formats = [visit(Where(full, kind_of(site), i, count), site) for i in numbers]
        if formats[0] is None:
            return site
        made = functools.partial(_changed_by, change, formats[0], full)
        return map_layers(made, site)

    return jax.tree_util.tree_map_with_path(
        lambda p, s: one(p, s) if isinstance(s, SITES) else s, layer, is_leaf=_is_place
    )


def _changed_by(change: Change, format: Format, path: str, site: Any) -> Any:
    """Calls `change`; with functools.partial it binds the format of this iteration."""
    return change(site, format, path)


def _laid_out(stack: nn.Stack, path: str, rules: Sequence[Rule]) -> nn.Stack:
    """Returns the stack in a layout where the rules treat layers of a slot alike."""
    layers = jax.eval_shape(lambda s: list(s), stack)
    kinds = [_treatment(layer, path, i, len(layers), rules) for i, layer in enumerate(layers)]
    place = [stack.where(i)[0] for i in range(len(layers))]
    # Already so: each slot has one treatment.
    if len(set(zip(place, kinds, strict=True))) == len(set(place)):
        return stack
    shapes = [(jax.tree.structure(layer), tuple(jax.tree.leaves(layer))) for layer in layers]
    return stack.with_layout(**nn.layout_for(zip(shapes, kinds, strict=True)))


def _treatment(layer: Any, path: str, i: int, count: int, rules: Sequence[Rule]) -> tuple[int | None, ...]:
    """Returns the rule that decides each matmul of a layer."""
    leaves = jax.tree_util.tree_leaves_with_path(layer, is_leaf=_is_place)
    sites = [(f"{path}.{dotted(inner)}", site) for inner, site in leaves if isinstance(site, SITES)]
    return tuple(decide(rules, Where(full, kind_of(site), i, count)) for full, site in sites)


def _round_operands(site: Any, format: Format, path: str) -> Any:
    """Makes a layer round its operands in training."""
    if isinstance(site, nn.Embed):
        raise ValueError(f"{path}: embeddings and heads have no matmul that training could quantize; give it no rule")
    if format.activations is None or format.group is not None:
        raise ValueError(f"{path}: training rounds activations too, and has no groups; got {format}")
    return _changed(site, matmul=Quantized(format))


def store(site: Any, format: Format, path: str) -> Any:
    """Returns a layer with its weight in `format`; `path` names it in errors."""
    if isinstance(site, nn.Embed) and format.activations is not None:
        raise ValueError(f"{path}: embeddings and heads are quantized in their weights only; got {format}")
    if isinstance(site.w, nn.quantized.QuantizedWeight):
        raise ValueError(f"{path} is quantized already; begin with the model in full precision")
    w = site.w[...]
    if (format.weights in nn.quantized.FOUR_BITS and w.shape[-1] % 2) or (
        format.group is not None and w.shape[-1] % format.group
    ):
        raise ValueError(
            f"{path}: the last dimension of its weight {w.shape} must be a multiple of the group; got {format}"
        )
    summed = site.w.get_metadata().get("summed")
    stored = nn.quantized.QuantizedWeight(
        w, qtype=format.weights, outputs=_outputs(site), group=format.group, axes=axes_of(site), summed=summed
    )
    if isinstance(site, nn.Embed):
        return _changed(site, w=stored)
    return _changed(site, w=stored, matmul=nn.matmul.Exact() if format.activations is None else Quantized(format))


def _outputs(site: Any) -> tuple[int, ...]:
    """Returns the dimensions of its weight that are not summed over."""
    if isinstance(site, nn.Einsum):
        letters, out = site.spec.partition(",")[2].split("->")
        return tuple(d for d, letter in enumerate(letters) if letter in out)
    if isinstance(site, nn.ExpertLinear):
        return tuple(d for d, letter in enumerate(site.layout) if letter != "I")
    return (0,)


def _restored(site: Any) -> Any:
    """Returns a layer with a plain weight and a plain matmul."""
    if isinstance(site.w, nn.quantized.QuantizedWeight):
        site = _changed(site, w=site.w.restored())
    return site if isinstance(site, nn.Embed) else _changed(site, matmul=nn.matmul.Exact())


def _changed(site: Any, **parts: Any) -> Any:
    """Returns a copy of a layer with some attributes replaced."""
    new = jax.tree.map(lambda a: a, site)
    for name, part in parts.items():
        setattr(new, name, part)
    return new


def _map_sites(model: Any, f: Callable[[str, Any], Any]) -> Any:
    """Applies `f` to the path and the layer of every matmul."""
    one = lambda path, site: f(dotted(path), site) if isinstance(site, SITES) else site
    return jax.tree_util.tree_map_with_path(one, model, is_leaf=lambda x: isinstance(x, SITES))


def _is_place(x: Any) -> bool:
    """Returns True for a layer with a matmul, and for a stack."""
    return isinstance(x, (*SITES, nn.Stack))
