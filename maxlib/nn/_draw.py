"""Draws a model as an SVG diagram."""

import dataclasses
import html
import re
from collections.abc import Iterator
from typing import Any

from flax import nnx

from maxlib.nn._expert_linear import ExpertLinear
from maxlib.nn._linear import Einsum
from maxlib.nn._summary import scaled
from maxlib.nn.stack import Stack
from maxlib.nn.tree import is_variable, num_parameters
from maxlib.sharding.layers import num_layer_axes

_TIMES = "\N{MULTIPLICATION SIGN}"
_WIDTH, _LINE, _PAD = 430, 17, 9  # pixels: of the picture, of a line of text, around it
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:currentColor}.small{font-size:11.5px;opacity:.75}"
    ".right{text-anchor:end}.name{font-weight:600}rect{stroke:currentColor;stroke-opacity:.35;fill-opacity:.13}"
)
_COLOURS = {"Attention": "#4477aa", "MLA": "#4477aa", "DeltaNet": "#66aaaa", "MLP": "#228833", "MoE": "#ee6677", "Embed": "#aa7744", "Norm": "#888888"}  # fmt: skip


# JAX sorts attributes by name when it maps over a model; this is the order in which they run.
_ORDER = (
    "tower", "projector", "embed", "positions", "pre_norm", "attn_norm", "attn", "delta",
    "attn_post_norm", "mlp_norm", "mlp", "moe", "mlp_post_norm", "layers",
    "norm", "router", "q_down", "q_norm", "q_up", "q", "kv_down", "kv_norm",
    "k_up", "v_up", "k", "v", "k_norm", "b", "a", "o", "gate", "up", "down", "shared", "head",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Block:
    """One box of the picture.

    Attributes:
        name: The attribute that holds the module.
        kind: The module's class.
        parameters: Number of its parameters; repeated layers count once.
        lines: Details: shapes of its arrays, its mask.
        inside: Boxes within it.
        repeat: Number of times that the block is repeated.
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

    def save(self, path: Any) -> None:
        """Writes the picture to a file, such as `llama.svg`."""
        with open(path, "w") as file:
            file.write(self.svg)


def draw(model: Any) -> Drawing:
    """Draws a model as blocks with their shapes and parameters; identical layers are one block with a count.

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


def _block(name: str, module: Any, in_a_stack: bool = False) -> Block:
    """Describes a module: its arrays and projections as lines, its other submodules as boxes."""
    count = _parameters if in_a_stack else num_parameters
    kind, parts = type(module).__name__, _submodules(module)
    if isinstance(module, Stack):
        return Block(name, f"{len(module)} layers", num_parameters(module), inside=tuple(_layers(module)))
    boxes = {n: part for n, part in parts.items() if not isinstance(part, Einsum | ExpertLinear)}
    if not any(_submodules(part) for part in parts.values()) or isinstance(module, Einsum):
        boxes = {}
    shapes = [line for n, part in {"": module, **parts}.items() if n not in boxes for line in _shapes(n, part)]
    inside = tuple(_block(n, part, in_a_stack) for n, part in boxes.items())
    return Block(name, kind, count(module), (*_notes(module), *_in_rows(shapes)), inside)


def _layers(stack: Stack) -> Iterator[Block]:
    """Yields the blocks of a stack in the order in which they run; a period of several layers is a box of its own."""
    for name, group in stack.layer_groups.items():
        slots = list(_merged(_block("", layer, in_a_stack=True) for layer in getattr(stack, name)))
        if group.repeats is None:
            yield from slots
        elif len(slots) == 1:
            yield dataclasses.replace(slots[0], repeat=slots[0].repeat * group.repeats)
        elif slots:
            parameters = sum(slot.parameters * slot.repeat for slot in slots)
            yield Block("", "period", parameters, inside=tuple(slots), repeat=group.repeats)


def _merged(blocks: Any) -> Iterator[Block]:
    """Merges neighbours that differ only in name."""
    last: Block | None = None
    for block in blocks:
        if last is not None and dataclasses.replace(last, name="", repeat=1) == dataclasses.replace(block, name=""):
            last = dataclasses.replace(last, repeat=last.repeat + 1)
            continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last


def _submodules(module: Any) -> dict[str, Any]:
    """Returns the submodules that have arrays, in the order of execution as far as it is known."""
    found: dict[str, Any] = {}
    place = lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)
    for name, value in sorted(vars(module).items(), key=lambda item: place(item[0])):
        parts = enumerate(value) if isinstance(value, nnx.List) else [("", value)]
        found |= {f"{name}{i}": part for i, part in parts if isinstance(part, nnx.Module) and _arrays(part)}
    return found


def _arrays(module: Any) -> dict[str, nnx.Variable]:
    """Returns the parameters and buffers that belong to `module` or its submodules, by their last names."""
    pairs = [(path[-1], value) for path, value in nnx.iter_graph(module) if path and is_variable(value)]
    return {str(name): value for name, value in pairs}


def _shape(variable: nnx.Variable) -> tuple[int, ...]:
    """Returns the shape of one layer's array, without the leading axis of scanned layers."""
    shape = variable.get_value().shape
    return shape[num_layer_axes(variable.get_metadata().get("axes", ())) :] if len(shape) else shape


def _shapes(name: str, module: Any) -> Iterator[str]:
    own = vars(module) if name == "" else _arrays(module)
    for key, variable in own.items():
        if is_variable(variable):
            label = name if name and key in ("w", "scale") else f"{name} {key}".strip()
            yield f"{label} {_TIMES.join(map(str, _shape(variable))) or 'scalar'}"


def _parameters(module: Any) -> int:
    """Counts the parameters of one layer."""
    total = 0
    for _, value in nnx.iter_graph(module):
        if isinstance(value, nnx.Param):
            size = 1
            for length in _shape(value):
                size *= length
            total += size
    return total


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
        yield "1 expert for each token" if top_k == 1 else f"{top_k} experts for each token"


def _mask(mask: Any) -> str:
    sign = {"_And": " & ", "_Or": " | "}.get(type(mask).__name__)
    if sign is None:
        return re.sub(r"\b\w+=", "", str(mask)).replace("()", "")
    parts = [_mask(mask.left), _mask(mask.right)]
    return sign.join(f"({part})" if sign == " & " and "|" in part else part for part in parts)


def _in_rows(texts: list[str], width: int = 52) -> tuple[str, ...]:
    """Joins short texts into rows."""
    rows: list[str] = []
    for text in texts:
        if rows and len(rows[-1]) + len(text) + 3 <= width:
            rows[-1] += "   " + text
        else:
            rows.append(text)
    return tuple(rows)


def _render(block: Block, x: int, y: int, width: int) -> tuple[list[str], int]:
    """Returns the SVG elements of a block whose corner is at (x, y), and its height."""
    inner, top = [], y + _PAD + _LINE
    for line in block.lines:
        inner.append(_text(line, x + _PAD, top + _LINE - 5, "small"))
        top += _LINE
    for child in block.inside:
        parts, height = _render(child, x + _PAD, top + 4, width - 2 * _PAD)
        inner += parts
        top += height + 4
    height = top + _PAD - y - (2 if block.inside else 4)
    title = f"{block.name}: {block.kind}" if block.name and block.name != block.kind else block.kind
    count = f"{block.repeat} {_TIMES} " if block.repeat > 1 else ""
    fill = next((colour for part, colour in _COLOURS.items() if part in block.kind), "none")
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}"/>',
        _text(count + title, x + _PAD, y + _LINE + 2, "name"),
        _text(count + scaled(block.parameters), x + width - _PAD, y + _LINE + 2, "small right"),
        *inner,
    ], height


def _text(text: str, x: int, y: int, kind: str) -> str:
    spaced = html.escape(text).replace("   ", "&#160;&#160;&#160;")
    return f'<text x="{x}" y="{y}" class="{kind}">{spaced}</text>'
