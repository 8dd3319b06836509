"""What a compiled program does, read from its text: arithmetic, memory traffic and collectives, loops counted as often
as they run."""

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from maxlib.plan.hlo_gpu import custom_flops, known_trips
from maxlib.plan.loops import Trips, trips_of

WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CHAIN = re.compile(r'chain_id="\d+"')
# How a program writes collectives between slices.
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([^\s=]+) = (.*)$")
# Within a fusion they are computed only where what follows looks.
_VIEWS = ("bitcast", "convert", "copy", "pad", "reshape", "transpose")
_FREE = (
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind over some mesh axes: how many stand in the program, how many run in a step, and the bytes one device
    hands in or gets (the larger) in all of them."""

    kind: str
    axes: tuple[str, ...]
    written: int
    runs: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one step on one device. unknown_loops: how many loops run as often as data says, taken as `trips` say.
    to_host, from_host: bytes that are copied between its memory and the host's.
    """

    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    unknown_loops: int
    to_host: float = 0.0
    from_host: float = 0.0


@dataclasses.dataclass
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: list[str]
    rest: str
    root: bool


def read_costs(
    text: str,
    mesh: Mapping[str, int],
    *,
    across: tuple[str, ...] = (),
    trips: Trips | None = None,
    cache: float = 0,
) -> Costs:
    """The costs of an optimized HLO module. `mesh` is the shape of the mesh, in its own order; `across` are the axes
    that cross slices. trips: of loops that depend on data. cache: bytes that stay on the chip between instructions.
    """
    program = _Program(text, mesh, across, trips or {}, cache)
    program.visit(program.entry, 1.0, in_fusion=False)
    found = (
        Collective(kind, axes, int(n), runs, size) for (kind, axes), (n, runs, size) in program.collectives.items()
    )
    ordered = tuple(sorted(found, key=lambda one: -one.bytes))
    return Costs(program.flops, program.bytes, ordered, program.unknown, program.to_host, program.from_host)


class _Program:
    """The computations of a module, and what a walk over them has added up."""

    def __init__(self, text: str, mesh: Mapping[str, int], across: tuple[str, ...], trips: Trips, cache: float):
        self.computations, self.entry = _parse(text)
        self.mesh, self.across, self.trips, self.cache = dict(mesh), across, trips, cache
        self.flops, self.bytes, self.unknown, self.to_host, self.from_host = 0.0, 0.0, 0, 0.0, 0.0
        self.collectives: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self.chains: set[str] = set()

    def visit(self, name: str, times: float, *, in_fusion: bool) -> None:
        computation = self.computations[name]
        for one in computation.values():
            kind = one.opcode.removesuffix("-start")
            if one.opcode == "while":
                self.visit(_called(one, "body"), times * self._trips(one, computation), in_fusion=False)
                continue
            if kind == "send" and (sent := _MEGASCALE.search(one.rest)):
                kind = "collective-permute" if sent[1] == "ONE_TO_ONE" else sent[1].lower().replace("_", "-")
            if kind in COLLECTIVES:
                self._collective(one, kind, computation, name, times)
            elif kind in ("fusion", "call", "async"):
                for called in re.findall(r"calls=%([^\s,)]+)|to_apply=%([^\s,)]+)", one.rest):
                    self.visit(called[0] or called[1], times, in_fusion=in_fusion or kind == "fusion")
            elif kind == "conditional":
                self._cheapest(_branches(one), times, in_fusion)
            elif kind in ("dot", "convolution"):
                self.flops += times * _matmul_flops(one, computation)
            elif kind == "custom-call":
                self.flops += times * (_estimate(one, "flops") + _custom_flops(one, computation))
            self._copy(one, computation, times)
            if not in_fusion:
                self.bytes += times * self._traffic(one, computation)

    def _copy(self, one: _Instruction, computation: dict[str, _Instruction], times: float) -> None:
        """Between the device and the host: of whole arrays, and of slices."""
        operands = [computation[name].type for name in one.operands if name in computation]
        if one.opcode == "dynamic-update-slice" and len(operands) > 1:
            source, target, size = operands[1], one.type, _size(operands[1])
        elif one.opcode in ("copy", "copy-start", "dynamic-slice") and operands:
            source, target = operands[0], _types(one.type)[0]
            size = _size(target)
        else:
            return
        if _on_host(target) and not _on_host(source):
            self.to_host += times * size
        if _on_host(source) and not _on_host(target):
            self.from_host += times * size

    def _cheapest(self, branches: list[str], times: float, in_fusion: bool) -> None:
        """The branch that computes and moves least: the others are there for what is unusual, such as one busy
        expert.
        """
        tried = []
        for branch in branches:
            alone = copy.copy(self)
            alone.flops, alone.bytes, alone.collectives, alone.chains = 0.0, 0.0, {}, set(self.chains)
            alone.visit(branch, times, in_fusion=in_fusion)
            moved = sum(size for *_, size in alone.collectives.values())
            tried.append((alone.flops, moved, alone.bytes, len(tried)))
        if tried:
            self.visit(branches[min(tried)[-1]], times, in_fusion=in_fusion)

    def _trips(self, loop: _Instruction, computation: dict[str, _Instruction]) -> float:
        """From a condition `i < constant` and a body with `i + step`; loops begin at 0 unless another constant is
        seen. A loop may carry its limit along.
        """
        if (known := known_trips(loop.rest)) is not None:
            return known
        condition = self.computations[_called(loop, "condition")]
        numbers = [value for one in condition.values() if (value := _constant(one)) is not None]
        index, *others = _compared(condition) or [None]
        begin = lambda element: _constant(_element(computation, loop.operands[0], element))
        numbers = numbers or [value for other in others if (value := begin(other)) is not None]
        if len(numbers) != 1:
            self.unknown += 1
            return trips_of(loop.rest, self.trips)
        first = begin(index) or 0
        return max(1, math.ceil((numbers[0] - first) / self._step(self.computations[_called(loop, "body")], index)))

    def _step(self, body: dict[str, _Instruction], index: int | None) -> int:
        """By how much the body raises the loop's counter: more than 1 in unrolled loops."""
        raised = _element(body, _root(body).name, index)
        if raised is None or raised.opcode != "add":
            return 1
        steps = [value for name in raised.operands if name in body and (value := _constant(body[name])) is not None]
        return max(1, steps[0]) if steps else 1

    def _collective(self, one: _Instruction, kind: str, computation: Any, name: str, times: float) -> None:
        # The TPU compiler spreads a collective over several fusions, which bear its number, to compute beside it.
        if chain := _CHAIN.search(one.rest):
            if chain[0] in self.chains:
                return
            self.chains.add(chain[0])
        size = sum(_bytes(computation[operand].type) for operand in one.operands if operand in computation)
        if kind == "ragged-all-to-all":  # what comes in is as much as goes out, on average: the smaller of both buffers
            size = min(_bytes(computation[operand].type) for operand in one.operands[:2])
        if kind == "all-gather":
            size = max(_bytes(one.type) - (size if one.opcode.endswith("-start") else 0), size)
        if name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # how the TPU compiler writes it
        if not size:
            return
        axes = self.across if one.opcode == "send" else _axes(one.rest, self.mesh)
        entry = self.collectives.setdefault((kind, axes), [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += times
        entry[2] += times * size

    def _traffic(self, one: _Instruction, computation: dict[str, _Instruction]) -> float:
        """Bytes to and from the device's memory; those of scratch memories are free, and of a slice only the slice
        counts."""
        if one.opcode in (*_FREE, "while", "async-start") or one.opcode.endswith("-done"):
            return 0.0  # what is asynchronous counts inside
        operands = [computation[name] for name in one.operands if name in computation]
        if one.opcode == "dynamic-slice":
            return (1 if operands and _on_host(operands[0].type) else 2) * _bytes(one.type)
        if one.opcode == "dynamic-update-slice":
            return (1 if _on_host(one.type) else 2) * _bytes(operands[1].type) if len(operands) > 1 else 0.0
        if one.opcode.endswith("-start"):
            return _bytes(one.type)  # which names operands and results
        if own := _estimate(one, "bytes_accessed"):
            return own
        if _bytes(one.type) + sum(_bytes(operand.type) for operand in operands) <= self.cache:
            return 0.0
        if one.opcode != "fusion":
            return _bytes(one.type) + sum(_bytes(operand.type) for operand in operands)
        inner = self.computations[_called(one, "calls")]
        read = sum(
            min(_bytes(operand.type), self._read(_parameter(i, inner), inner)) for i, operand in enumerate(operands)
        )
        return read + self._written(_root(inner), inner, one.type)

    def _read(self, own: _Instruction | None, inner: dict[str, _Instruction]) -> float:
        """How much a fusion reads of its operand: less than all where it is sliced, updated in place, or handed on."""
        if own is None:
            return math.inf
        return sum(self._used(own, user, inner) for user in inner.values() if own.name in user.operands)

    def _used(self, own: _Instruction, user: _Instruction, inner: dict[str, _Instruction]) -> float:
        if user.opcode == "dynamic-slice":
            return _bytes(user.type)
        if user.opcode == "dynamic-update-slice" and user.operands[0] == own.name:
            return 0.0
        if user.opcode in _VIEWS:
            return self._read(user, inner)
        if user.opcode == "fusion":
            called = self.computations[_called(user, "calls")]
            return self._read(_parameter(user.operands.index(own.name), called), called)
        return 0.0 if _hands_on(user) else math.inf

    def _written(self, root: _Instruction, inner: dict[str, _Instruction], type_: str) -> float:
        """How much a fusion writes: of an updated slice only the slice, and nothing of an operand that it hands on."""
        if root.opcode == "tuple":
            parts = zip(root.operands, _types(type_), strict=True)
            return sum(self._written(inner[name], inner, part) for name, part in parts)
        if root.opcode == "parameter" or _hands_on(root):
            return 0.0
        if root.opcode == "bitcast" and root.operands[0] in inner:
            return self._written(inner[root.operands[0]], inner, type_)
        if root.opcode == "dynamic-update-slice" and root.operands[1] in inner:
            return min(_bytes(type_), _bytes(inner[root.operands[1]].type))
        return _bytes(type_)


def _element(computation: dict[str, _Instruction], name: str, index: int | None) -> _Instruction | None:
    """What a tuple has at `index`."""
    found = computation.get(name)
    if found is None or found.opcode != "tuple" or index is None or index >= len(found.operands):
        return None
    part = computation.get(found.operands[index])
    return computation.get(part.operands[0]) if part is not None and part.opcode == "copy" else part


def _compared(condition: dict[str, _Instruction]) -> list[int]:
    """Which elements of a loop's state its condition compares, the counter first."""
    ends = [condition[name] for name in _root(condition).operands if name in condition]
    found = [_index(one) for one in ends if one.opcode == "get-tuple-element"]
    return list(dict.fromkeys(found)) or [_index(one) for one in condition.values() if "get-tuple" in one.opcode][:1]


def _parameter(index: int, inner: dict[str, _Instruction]) -> _Instruction | None:
    return next((one for one in inner.values() if one.opcode == "parameter" and one.rest.startswith(f"{index})")), None)


def _root(inner: dict[str, _Instruction]) -> _Instruction:
    return next(one for one in inner.values() if one.root)


def _hands_on(one: _Instruction) -> bool:
    """Whether it only passes buffers on: a fusion's tuple, and a collective that other fusions have begun."""
    return one.opcode == "tuple" or bool(_CHAIN.search(one.rest)) or "AsyncCollectiveDone" in one.rest


# ---------------------------------------------------------------------------------------------- text


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    computations: dict[str, dict[str, _Instruction]] = {}
    current: dict[str, _Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%([^\s(]+) \(.*\{$", line):
            current = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif found := _INSTRUCTION.match(line):
            one = _instruction(found[2], found[3], bool(found[1]))
            if one is not None:
                current[one.name] = one
    if not entry:
        raise ValueError("the program's text has no ENTRY computation")
    return computations, entry


def _instruction(name: str, text: str, root: bool) -> _Instruction | None:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    found = re.match(r" ?([\w\-]+)\(", text[end:])
    if found is None:
        return None
    start = end + found.end()
    stop = _closing(text, start - 1)
    operands = re.findall(r"%([^\s,()]+)", text[start:stop])
    rest = text[start:] if found[1] in ("parameter", "constant") else text[stop + 1 :]
    return _Instruction(name, text[:end], found[1], operands, rest, root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


def _constant(one: _Instruction | None) -> int | None:
    found = re.match(r"(\d+)\)", one.rest) if one is not None and one.opcode == "constant" else None
    return int(found[1]) if found else None


def _index(one: _Instruction) -> int:
    found = re.search(r"index=(\d+)", one.rest)
    return int(found[1]) if found else 0


def _called(one: _Instruction, attribute: str) -> str:
    found = re.search(rf"{attribute}=%([^\s,)]+)", one.rest)
    if found is None:
        raise ValueError(f"{one.opcode} {one.name} names no {attribute}")
    return found[1]


def _branches(one: _Instruction) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", one.rest)
    if found:
        return re.findall(r"%([^\s,]+)", found[1])
    return re.findall(r"(?:true|false)_computation=%([^\s,]+)", one.rest)


def _shapes(type_: str) -> Iterator[tuple[str, list[int], str]]:
    for name, sizes, layout in _SHAPE.findall(type_):
        yield name, [int(n) for n in sizes.split(",") if n], layout


def _types(type_: str) -> list[str]:
    """Of the elements of a tuple, which may be tuples."""
    parts, depth = [""], 0
    for sign in type_[1:-1]:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _bytes(type_: str) -> float:
    """Of what lies in the device's main memory (`S(n)` in a layout is another one)."""
    return sum(_width(name) * math.prod(sizes) for name, sizes, layout in _shapes(type_) if "S(" not in layout)


def _size(type_: str) -> float:
    """Of what lies in any memory."""
    return sum(_width(name) * math.prod(sizes) for name, sizes, _ in _shapes(type_))


def _on_host(type_: str) -> bool:
    return "S(5)" in type_


def _width(name: str) -> float:
    digits = re.sub(r"\D", "", name.partition("e")[0])
    return WIDTHS.get(name) or (int(digits) / 8 if digits else 0)


# ---------------------------------------------------------------------------------------------- arithmetic


def _matmul_flops(one: _Instruction, computation: dict[str, _Instruction]) -> float:
    types = [computation[name].type for name in one.operands[:2] if name in computation]
    if len(types) < 2:
        return 0.0
    left, right = (next(_shapes(type_))[1] for type_ in types)
    out = next(_shapes(one.type))[1]
    if one.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
        dims = [int(d) for d in summed[1].split(",") if d] if summed else []
        return 2.0 * math.prod(out) * math.prod(left[d] for d in dims)
    return _convolution_flops(one.rest, left, right, out)


def _convolution_flops(rest: str, left: list[int], right: list[int], out: list[int]) -> float:
    """The TPU compiler turns matmuls into convolutions, with batch dimensions as windows that mostly see padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if labels is None:
        return 0.0
    lhs, rhs, result = labels.groups()
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", rest) or [""])[0]))
    count = 2.0 * out[result.index("b")] * out[result.index("f")] * right[rhs.index("i")]
    for d in range(len(rhs) - 2):
        pick = lambda key, default, d=d: window.get(key, "x".join([default] * (d + 1))).split("x")[d]
        low = int(pick("pad", "0_0").split("_")[0])
        steps = [int(pick(key, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate")]
        sizes = left[lhs.index(str(d))], right[rhs.index(str(d))], out[result.index(str(d))]
        count *= _meetings(*sizes, low, *steps)
    groups = re.search(r"batch_group_count=(\d+)", rest)
    return count / (int(groups[1]) if groups else 1)


@functools.cache
def _meetings(left: int, window: int, out: int, low: int, stride: int, left_dilation: int, right_dilation: int) -> int:
    """How many pairs of an output position and a window element meet an element of the input, not padding."""
    at = np.arange(out)[:, None] * stride - low + np.arange(window)[None] * right_dilation
    return int(np.sum((at >= 0) & (at <= (left - 1) * left_dilation) & (at % left_dilation == 0)))


def _custom_flops(one: _Instruction, computation: dict[str, _Instruction]) -> float:
    types = [computation[name].type for name in one.operands if name in computation]
    operands = [sizes for type_ in types for _, sizes, _ in _shapes(type_)]
    return custom_flops(one.rest, operands, [sizes for _, sizes, _ in _shapes(one.type)])


def _estimate(one: _Instruction, what: str) -> float:
    """From a kernel's own `cost_estimate`."""
    found = re.search(rf'"cost_estimate":\s*\{{[^}}]*"{what}":\s*"?(\d+)', one.rest)
    return float(found[1]) if found else 0.0


# ---------------------------------------------------------------------------------------------- devices


def _axes(rest: str, mesh: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes over which the devices of one group differ."""
    ids = _group(rest, math.prod(mesh.values()))
    if ids is None:
        return ("?",)
    places = np.array(np.unravel_index(ids, tuple(mesh.values())))
    differ = (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, is_over in zip(mesh, differ, strict=True) if is_over)


def _group(rest: str, count: int) -> list[int] | None:
    if pairs := re.search(r"source_target_pairs=\{([\d,{} ]*)\}", rest):
        found = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs[1] + "}")]
        return next((list(pair) for pair in found if pair[0] != pair[1]), [0])  # to itself only
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return [int(n) for n in found[1].split(",")]
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        ids = _turned(int(found[1]) * int(found[2]), found[3], found[4])
        return ids.reshape(int(found[1]), int(found[2]))[0].tolist()
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]" + order + r" \{([^}]*)\}", rest):
        return _named_group(found[1], found[4], _turned(count, found[2], found[3]))
    return list(range(count)) if re.search(r"replica_groups=\{\}", rest) else None


def _turned(count: int, sizes: str | None, order: str | None) -> np.ndarray:
    """The devices in the order in which a program counts them."""
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
