"""Draws a model as an SVG diagram."""

import dataclasses
import html
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from maxlib._utils.text import ranges
from maxlib.nn._linear import Einsum
from maxlib.nn.describe import scaled
from maxlib.nn.experts._linear import ExpertLinear
from maxlib.nn.stack import Stack
from maxlib.nn.tree import is_variable, num_parameters

_TIMES = "\N{MULTIPLICATION SIGN}"
_WIDTH, _LINE, _PAD = 430, 17, 9  # pixels: of the picture, of a line of text, around it
_BOLD, _SMALL = 8.2, 6.6  # pixels: of a letter in a title, and in other text
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:currentColor}.small{font-size:11.5px;opacity:.75}"
    ".right{text-anchor:end}.name{font-weight:600}.detail{font-size:11.5px;font-weight:400;fill-opacity:.75}"
    "rect{stroke:currentColor;stroke-opacity:.35;fill-opacity:.13}"
)
_COLOURS = {"Attention": "#4477aa", "MLA": "#4477aa", "DeltaNet": "#66aaaa", "MLP": "#228833", "MoE": "#ee6677", "Embed": "#aa7744", "Norm": "#888888"}  # fmt: skip


# JAX sorts attributes by name when it maps over a model; this is the order in which they run.
_ORDER = (
    "tower", "projector", "patches", "embed", "PerLayerEmbed", "positions", "pre_norm", "attn_norm", "attn", "delta", "mamba", "conv",
    "attn_post_norm", "mlp_norm", "mlp", "moe", "mlp_post_norm", "layers",
    "norm", "router", "q_down", "q_norm", "q_up", "q", "kv_down", "kv_norm",
    "k_up", "v_up", "k", "v", "k_norm", "b", "a", "o", "gate", "up", "down", "shared", "head",
)  # fmt: skip
_MIXERS = {"attn", "delta", "mamba", "conv", "mlp", "moe"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One box of the picture.

    Attributes:
        name: The attribute that holds the module.
        kind: The module's class.
        parameters: Number of its parameters; repeated layers count once.
        lines: Details: shapes of its arrays, its mask.
        inside: Boxes within it.
        repeat: Number of equal blocks.
    """

    name: str
    kind: str
    parameters: int
    lines: tuple[str, ...] = ()
    inside: tuple["Block", ...] = ()
    repeat: int = 1


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Picture of a model, shown by notebooks; `svg` is its source."""

    svg: str

    def _repr_html_(self) -> str:
        return self.svg


def draw(model: Any) -> Drawing:
    """Draws a model as blocks with their shapes and parameters.

    Equal layers of a stack are one block with a count; if a stack has different layers, each block lists the indices of
    its layers.

    Also works on `jax.eval_shape` of a model, so a large model needs no memory.

    Args:
        model: A model, a stack or a layer.
    """
    block = _block(type(model).__name__, model)
    parts, height = _render(block, 1, 1, _WIDTH - 2)
    area = f'width="{_WIDTH}" height="{height + 2}" viewBox="0 0 {_WIDTH} {height + 2}"'
    label = html.escape(f"{block.kind}: {scaled(num_parameters(model))} parameters")
    body = "\n".join(parts)
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" {area} role="img" aria-label="{label}">'
        f"<style>{_STYLE}</style>\n{body}\n</svg>"
    )


def _block(name: str, module: Any) -> Block:
    """Describes a module: its arrays and projections as lines, its other submodules as boxes."""
    kind, parts = type(module).__name__, _submodules(module)
    if isinstance(module, Stack):
        return Block(name, f"{len(module)} layers", num_parameters(module), inside=tuple(_layers(module)))
    boxes = {n: submodule for n, submodule in parts.items() if not _is_projection(submodule)}
    if not any(_submodules(submodule) for submodule in boxes.values()):
        boxes = {}
    shapes = [
        line for n, submodule in {"": module, **parts}.items() if n not in boxes for line in _shapes(n, submodule)
    ]
    inside = tuple(_merged(_block(n, submodule) for n, submodule in boxes.items()))
    return Block(name, kind, num_parameters(module), (*_notes(module), *_in_rows(shapes)), inside)


def _is_projection(module: Any) -> bool:
    """Tells whether a module is one matrix, perhaps with limits around it."""
    if isinstance(module, Einsum | ExpertLinear):
        return True
    arrays, parts = vars(module).values(), list(_submodules(module).values())
    plain = not any(_notes(module)) and not any(is_variable(value) and value.shape for value in arrays)
    return plain and len(parts) == 1 and isinstance(parts[0], Einsum)


def _layers(stack: Stack) -> Iterator[Block]:
    """Yields each distinct block of a stack's layers; if there are several, its first lines are the layers' indices."""
    slots = [group.layers(slot) for group in stack.layer_groups for slot in range(group.period)]
    # One layer of each slot, without the leading axis of scanned layers.
    layers = jax.eval_shape(lambda stack: [stack[indices[0]] for indices in slots], stack)
    indices_of: dict[Block, list[int]] = {}
    for indices, layer in zip(slots, layers, strict=True):
        indices_of.setdefault(_block("", layer), []).extend(indices)
    for block, indices in indices_of.items():
        first, *others = ranges(sorted(indices))
        rows = _in_rows([f"layers {first}", *others], between=", ") if len(indices_of) > 1 else ()
        yield dataclasses.replace(block, lines=(*rows, *block.lines), repeat=len(indices))


def _merged(blocks: Iterable[Block]) -> Iterator[Block]:
    """Merges neighbours that differ only in name."""
    for _, group in itertools.groupby(blocks, lambda block: dataclasses.replace(block, name="", repeat=1)):
        alike = list(group)
        names = [block.name for block in alike if block.name]
        name = ", ".join(names) if len(names) < 3 else f"{names[0]} ... {names[-1]}"
        yield dataclasses.replace(alike[0], name=name, repeat=sum(block.repeat for block in alike))


def _submodules(module: Any) -> dict[str, Any]:
    """Returns the submodules that have arrays, in the order of execution as far as it is known."""
    submodules: dict[str, Any] = {}
    for name, value in sorted(vars(module).items(), key=lambda item: _place(module, *item)):
        parts = enumerate(value) if isinstance(value, nnx.List) else [("", value)]
        submodules |= {
            f"{name}{i}": submodule
            for i, submodule in parts
            if isinstance(submodule, nnx.Module) and _arrays(submodule)
        }
    return submodules


def _place(module: Any, name: str, value: Any) -> int:
    """Returns when a part runs: the one norm of a block before its mixer, that of a model after its layers."""
    if name == "norm" and not _MIXERS.isdisjoint(vars(module)):
        return -1
    return next((_ORDER.index(key) for key in (type(value).__name__, name) if key in _ORDER), len(_ORDER))


def _arrays(module: Any) -> dict[str, nnx.Variable]:
    """Returns the parameters and buffers that belong to `module` or its submodules, by their last names."""
    pairs = [(path[-1], value) for path, value in nnx.iter_graph(module) if path and is_variable(value)]
    return {str(name): value for name, value in pairs}


def _shapes(name: str, module: Any) -> Iterator[str]:
    variables = vars(module) if name == "" else _arrays(module)
    for key, variable in variables.items():
        if is_variable(variable) and (variable.shape or isinstance(variable, nnx.Param)):
            label = name if name and key in ("w", "scale") else f"{name} {key}".strip()
            yield f"{label} {_TIMES.join(map(str, variable.shape)) or 'scalar'}"


def _notes(module: Any) -> Iterator[str]:
    """Yields details that shapes do not show: heads, mask, experts."""
    if isinstance(getattr(module, "num_heads", None), int):
        heads = f"{module.num_heads} query heads"
        kv = getattr(module, "num_kv_heads", None)
        yield heads if kv in (None, module.num_heads) else f"{heads}, {kv} for keys and values"
    mask = getattr(module, "mask", None)
    if mask is not None and len(text := _mask(mask)) < 60:
        yield text
    if isinstance(top_k := getattr(module, "top_k", None), int):
        kind = "expert" if hasattr(module, "num_experts") else "key"  # of a router, or of an index of keys
        yield f"{top_k} {kind}{'s' if top_k > 1 else ''} for each token"


def _mask(mask: Any) -> str:
    sign = {"_And": " & ", "_Or": " | "}.get(type(mask).__name__)
    if sign is None:
        return re.sub(r"\b\w+=", "", str(mask)).replace("()", "")
    parts = [_mask(mask.left), _mask(mask.right)]
    return sign.join(f"({side})" if sign == " & " and "|" in side else side for side in parts)


def _in_rows(texts: list[str], width: int = 48, between: str = "   ") -> tuple[str, ...]:
    """Joins short texts into rows."""
    rows: list[str] = []
    for text in texts:
        if rows and len(rows[-1]) + len(between) + len(text) <= width:
            rows[-1] += between + text
        else:
            rows.append(text)
    return tuple(rows)


def _render(block: Block, x: int, y: int, width: int) -> tuple[list[str], int]:
    """Returns the SVG elements of a block whose corner is at (x, y), and its height."""
    inner, top = [], y + _PAD + _LINE
    count = f"{block.repeat} {_TIMES} " if block.repeat > 1 else ""
    title = f"{block.name}: {block.kind}" if block.name not in ("", block.kind) else count + block.kind
    amount = count + scaled(block.parameters)
    needed = _BOLD * len(title) + _SMALL * (len("".join(block.lines)) + len(amount)) + 2 * _PAD + 16
    beside = len(block.lines) == 1 and not block.inside and needed < width
    for line in block.lines[beside:]:
        inner.append(_text(line, x + _PAD, top + _LINE - 5, "small"))
        top += _LINE
    for child in block.inside:
        parts, height = _render(child, x + _PAD, top + 4, width - 2 * _PAD)
        inner += parts
        top += height + 4
    height = top + _PAD - y - (2 if block.inside else 4)
    fill = next((colour for kind, colour in _COLOURS.items() if kind in block.kind), "none")
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}"/>',
        _text(title, x + _PAD, y + _LINE + 2, "name", block.lines[0] if beside else ""),
        _text(amount, x + width - _PAD, y + _LINE + 2, "small right"),
        *inner,
    ], height


def _text(text: str, x: int, y: int, kind: str, detail: str = "") -> str:
    span = f'<tspan class="detail" dx="8">{_spaced(detail)}</tspan>' if detail else ""
    return f'<text x="{x}" y="{y}" class="{kind}">{_spaced(text)}{span}</text>'


def _spaced(text: str) -> str:
    return html.escape(text).replace("   ", "&#160;&#160;&#160;")
