"""Parses the text of a compiled program (HLO)."""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_BROKEN = re.compile(r"=\{\n([^\n]*)\n\}")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([^\s=]+) = (.*)$")


@dataclasses.dataclass
class Instruction:
    """One line of a computation: `%name = type opcode(operands), rest`."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    rest: str
    root: bool


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Returns the computations, each from name to instruction, and the name of the entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    # The text of a kernel's own metadata breaks its instruction into three lines.
    for line in _BROKEN.sub(r"={\1}", text).splitlines():
        if match := re.match(r"(ENTRY )?%([^\s(]+) \(.*\{$", line):
            current = computations.setdefault(match[2], {})
            entry = match[2] if match[1] else entry
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match[2], match[3], bool(match[1]))
            if instruction is not None:
                current |= {element.name: element for element in _elements(instruction, current)}
                current[instruction.name] = instruction
    if not entry:
        raise ValueError("the program's text has no ENTRY computation")
    return computations, entry


def _elements(instruction: Instruction, current: dict[str, Instruction]) -> Iterator[Instruction]:
    """Yields the elements of tuples that an instruction names in place, `%loop#2`, as instructions of their own.

    libtpu 0.0.48 writes them so; other versions write a `get-tuple-element`.
    """
    for name in instruction.operands:
        tuple_name, _, index = name.rpartition("#")
        if tuple_name in current:
            type_ = types_of(current[tuple_name].type)[int(index)]
            yield Instruction(name, type_, "get-tuple-element", [tuple_name], f", index={index}", False)


def _instruction(name: str, text: str, root: bool) -> Instruction | None:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    match = re.match(r" ?([\w\-]+)\(", text[end:])
    if match is None:
        return None
    start = end + match.end()
    stop = _closing(text, start - 1)
    operands = re.findall(r"%([^\s,()]+)", text[start:stop])
    rest = text[start:] if match[1] in ("parameter", "constant") else text[stop + 1 :]
    return Instruction(name, text[:end], match[1], operands, rest, root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


def constant_of(instruction: Instruction | None) -> int | None:
    match = (
        re.match(r"(\d+)\)", instruction.rest) if instruction is not None and instruction.opcode == "constant" else None
    )
    return int(match[1]) if match else None


def index_of(instruction: Instruction) -> int:
    match = re.search(r"index=(\d+)", instruction.rest)
    return int(match[1]) if match else 0


def computation_of(instruction: Instruction, attribute: str) -> str:
    match = re.search(rf"{attribute}=%([^\s,)]+)", instruction.rest)
    if match is None:
        raise ValueError(f"{instruction.opcode} {instruction.name} names no {attribute}")
    return match[1]


def branches_of(instruction: Instruction) -> list[str]:
    match = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
    if match:
        return re.findall(r"%([^\s,]+)", match[1])
    return re.findall(r"(?:true|false)_computation=%([^\s,]+)", instruction.rest)


def shapes_of(type_: str) -> Iterator[tuple[str, list[int], str]]:
    for name, sizes, layout in _SHAPE.findall(type_):
        yield name, [int(n) for n in sizes.split(",") if n], layout


def types_of(type_: str) -> list[str]:
    """Returns the types of a tuple's elements, which may be tuples."""
    parts, depth = [""], 0
    for sign in type_[1:-1]:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def bytes_of(type_: str) -> float:
    """Returns the bytes of a type in the device's main memory (`S(n)` in a layout is another memory)."""
    return sum(_width(name) * math.prod(sizes) for name, sizes, layout in shapes_of(type_) if "S(" not in layout)


def size_of(type_: str) -> float:
    """Returns the bytes of a type, in any memory."""
    return sum(_width(name) * math.prod(sizes) for name, sizes, _ in shapes_of(type_))


def is_on_host(type_: str) -> bool:
    return "S(5)" in type_


def _width(name: str) -> float:
    digits = re.sub(r"\D", "", name.partition("e")[0])
    return WIDTHS.get(name) or (int(digits) / 8 if digits else 0)


def axes_of_group(rest: str, mesh: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes in which the devices of one group differ, `("?",)` if its groups cannot be read.

    Args:
        rest: The attributes of the instruction.
        mesh: From mesh axis to size, in the order of the mesh.
    """
    ids = _group(rest, math.prod(mesh.values()))
    if ids is None:
        return ("?",)
    places = np.array(np.unravel_index(ids, tuple(mesh.values())))
    differ = (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, is_over in zip(mesh, differ, strict=True) if is_over)


def _group(rest: str, count: int) -> list[int] | None:
    """Returns the device ids of the first group, in any of the notations of XLA; None if there is none."""
    if pairs := re.search(r"source_target_pairs=\{([\d,{} ]*)\}", rest):
        routes = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs[1] + "}")]
        return next((list(pair) for pair in routes if pair[0] != pair[1]), [0])  # to itself only
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return [int(n) for n in match[1].split(",")]
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        ids = _turned(int(match[1]) * int(match[2]), match[3], match[4])
        return ids.reshape(int(match[1]), int(match[2]))[0].tolist()
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]" + order + r" \{([^}]*)\}", rest):
        return _named_group(match[1], match[4], _turned(count, match[2], match[3]))
    return list(range(count)) if re.search(r"replica_groups=\{\}", rest) else None


def _turned(count: int, sizes: str | None, order: str | None) -> np.ndarray:
    """Returns device ids in the order of an iota with these sizes, transposed."""
    ids = np.arange(count)
    ids = ids if sizes is None else ids.reshape([int(n) for n in sizes.split(",")])
    return ids if order is None else ids.transpose([int(n) for n in order.split(",")])


def _named_group(sizes: str, named: str, devices: np.ndarray) -> list[int] | None:
    known = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    chosen = re.findall(r"'([^']+)'(?!:)", named)
    if not known or not set(chosen) <= set(known) or ":" in named:
        return None
    ids = devices.reshape(tuple(known.values()))
    return ids[tuple(slice(None) if name in chosen else 0 for name in known)].flatten().tolist()
