"""Parses the text of a compiled program (HLO)."""

import dataclasses
import math
import re
from collections.abc import Iterator

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
        if found := re.match(r"(ENTRY )?%([^\s(]+) \(.*\{$", line):
            current = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif found := _INSTRUCTION.match(line):
            one = _instruction(found[2], found[3], bool(found[1]))
            if one is not None:
                current[one.name] = one
    if not entry:
        raise ValueError("the program's text has no ENTRY computation")
    for computation in computations.values():
        _add_elements(computation)
    return computations, entry


def _add_elements(computation: dict[str, Instruction]) -> None:
    """Adds `get-tuple-element` for each operand `%name#2`: element 2 of `name`, as programs of jax 0.11 write it."""
    for name in {name for one in computation.values() for name in one.operands if "#" in name}:
        whole, _, index = name.rpartition("#")
        if whole in computation:
            type_ = types_of(computation[whole].type)[int(index)]
            computation[name] = Instruction(name, type_, "get-tuple-element", [whole], f", index={index}", False)


def _instruction(name: str, text: str, root: bool) -> Instruction | None:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    found = re.match(r" ?([\w\-]+)\(", text[end:])
    if found is None:
        return None
    start = end + found.end()
    stop = _closing(text, start - 1)
    operands = re.findall(r"%([^\s,()]+)", text[start:stop])
    rest = text[start:] if found[1] in ("parameter", "constant") else text[stop + 1 :]
    return Instruction(name, text[:end], found[1], operands, rest, root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


def constant_of(one: Instruction | None) -> int | None:
    found = re.match(r"(\d+)\)", one.rest) if one is not None and one.opcode == "constant" else None
    return int(found[1]) if found else None


def index_of(one: Instruction) -> int:
    found = re.search(r"index=(\d+)", one.rest)
    return int(found[1]) if found else 0


def computation_of(one: Instruction, attribute: str) -> str:
    found = re.search(rf"{attribute}=%([^\s,)]+)", one.rest)
    if found is None:
        raise ValueError(f"{one.opcode} {one.name} names no {attribute}")
    return found[1]


def branches_of(one: Instruction) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", one.rest)
    if found:
        return re.findall(r"%([^\s,]+)", found[1])
    return re.findall(r"(?:true|false)_computation=%([^\s,]+)", one.rest)


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
