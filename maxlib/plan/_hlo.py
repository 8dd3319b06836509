"""Reads the costs of a compiled program from its text: arithmetic, memory traffic, collectives.

The body of a loop counts as often as it runs.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from maxlib.kernels.vector_memory import DEFAULT_VMEM
from maxlib.ops.trip_counts import TripCounts, trips_of_loop
from maxlib.plan._hlo_text import (
    Instruction,
    axes_of_group,
    branches_of,
    bytes_of,
    computation_of,
    constant_of,
    index_of,
    is_on_host,
    parse,
    size_of,
    types_of,
)
from maxlib.plan._hlo_work import (
    custom_call_flops,
    estimate_of,
    grouped_bytes,
    grouped_flops,
    known_trips,
    matmul_flops,
    narrow_kind,
    repeated_flops,
    splash_bytes,
)

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_CHAIN = re.compile(r'chain_id="\d+"')
# How a program writes collectives between slices.
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# Within a fusion these are only computed for the elements that their user reads.
_VIEWS = ("bitcast", "convert", "copy", "pad", "reshape", "transpose")
_SLICES = ("slice", "dynamic-slice")
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
# What they run counts inside; they hand over buffers without a copy.
_AROUND = ("while", "conditional", "async-start", "async-update")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over the same mesh axes.

    Args:
        kind: Such as "all-gather".
        axes: The mesh axes.
        written: Instructions in the program.
        runs: Executions in a step.
        bytes: Input or output of one device, whichever is larger, summed over a step.
    """

    kind: str
    axes: tuple[str, ...]
    written: int
    runs: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one step on one device.

    Args:
        flops: Arithmetic.
        bytes: Traffic of the main memory.
        collectives: Communication, the most bytes first.
        unknown_loops: Loops whose trip count depends on data.
        to_host: Bytes copied to the host's memory.
        from_host: Bytes copied from the host's memory.
        assumes: Assumptions, as sentences for the report.
        narrow: The part of `flops` whose operands have eight bits, by "fp8" and "int8".
        repeated: Further arithmetic that is not in `flops`, of tiles with rows of two experts, computed once for each.
    """

    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    unknown_loops: int
    to_host: float = 0.0
    from_host: float = 0.0
    assumes: tuple[str, ...] = ()
    narrow: Mapping[str, float] = dataclasses.field(default_factory=dict)
    repeated: float = 0.0


def read_costs(
    text: str,
    mesh: Mapping[str, int],
    *,
    across: tuple[str, ...] = (),
    trips: TripCounts | None = None,
    cache: float = 0,
    vmem: int = DEFAULT_VMEM,
) -> Costs:
    """Reads the costs of an optimized HLO module.

    Args:
        text: The module.
        mesh: From mesh axis to size, in the order of the mesh.
        across: Mesh axes that cross slices.
        trips: Trip counts of loops that depend on data, by kind, and the "room" of buffers of experts' rows.
        cache: Bytes that stay on chip between instructions.
        vmem: Bytes of vector memory that a kernel may take.
    """
    program = _Program(text, mesh, across, trips or {}, cache, vmem)
    program.visit(program.entry, 1.0, in_fusion=False)
    collectives = (
        Collective(kind, axes, int(n), runs, size) for (kind, axes), (n, runs, size) in program.collectives.items()
    )
    ordered = tuple(sorted(collectives, key=lambda collective: -collective.bytes))
    return Costs(
        program.flops,
        program.bytes,
        ordered,
        program.unknown,
        program.to_host,
        program.from_host,
        tuple(_assumed(program.chosen, cache)),
        program.narrow,
        program.repeated,
    )


def _assumed(chosen: int, cache: float) -> Iterator[str]:
    yield "every fusion reads and writes what its shapes say"
    if cache:
        yield f"what together takes up to {cache / 2**20:.4g} MiB stays in the cache"
    if chosen:
        yield f"of {chosen} choices that data makes the one that computes and moves least: experts with about equal shares"


class _Program:
    """The computations of a module, and the sums of a walk over them."""

    def __init__(
        self, text: str, mesh: Mapping[str, int], across: tuple[str, ...], trips: TripCounts, cache: float, vmem: int
    ):
        self.computations, self.entry = parse(text)
        self.mesh, self.network, self.trips, self.cache = dict(mesh), across, trips, cache
        self.room, self.vmem = trips.get("room", 1), vmem
        self.flops, self.bytes, self.unknown, self.to_host, self.from_host = 0.0, 0.0, 0, 0.0, 0.0
        self.repeated = 0.0
        self.chosen = 0  # number of conditionals counted by their cheapest branch
        self.collectives: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self.chains: set[str] = set()
        self.narrow: dict[str, float] = {}  # FLOPs of operands of eight bits, by their kind

    def visit(self, name: str, times: float, *, in_fusion: bool) -> None:
        """Adds the costs of a computation that runs `times` times; inside a fusion nothing reads or writes memory."""
        computation = self.computations[name]
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if instruction.opcode == "while":
                self.visit(
                    computation_of(instruction, "body"), times * self._trips(instruction, computation), in_fusion=False
                )
                continue
            if kind == "send" and (sent := _MEGASCALE.search(instruction.rest)):
                kind = "collective-permute" if sent[1] == "ONE_TO_ONE" else sent[1].lower().replace("_", "-")
            if kind in COLLECTIVES:
                self._collective(instruction, kind, computation, name, times)
            elif kind in ("fusion", "call", "async"):
                for called in re.findall(r"calls=%([^\s,)]+)|to_apply=%([^\s,)]+)", instruction.rest):
                    self.visit(called[0] or called[1], times, in_fusion=in_fusion or kind == "fusion")
            elif kind == "conditional":
                self._cheapest(branches_of(instruction), times, in_fusion)
            elif kind in ("dot", "convolution"):
                self._compute(instruction, times * matmul_flops(instruction, computation), computation)
            elif kind == "custom-call":
                kernel_flops = grouped_flops(instruction, self.room) or estimate_of(instruction, "flops")
                flops = kernel_flops + custom_call_flops(instruction, computation, self.vmem)
                self._compute(instruction, times * flops, computation)
                self.repeated += times * repeated_flops(instruction, self.room, self.vmem)
            self._copy(instruction, computation, times)
            if not in_fusion:
                self.bytes += times * self._traffic(instruction, computation)

    def _compute(self, instruction: Instruction, flops: float, computation: dict[str, Instruction]) -> None:
        """Adds arithmetic, also to the sum of the kind of its operands."""
        self.flops += flops
        if flops and (kind := narrow_kind(instruction, computation)):
            self.narrow[kind] = self.narrow.get(kind, 0.0) + flops

    def _copy(self, instruction: Instruction, computation: dict[str, Instruction], times: float) -> None:
        """Adds copies between the device and the host, of whole arrays and of slices."""
        operands = [computation[name].type for name in instruction.operands if name in computation]
        if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
            source, target, size = operands[1], instruction.type, size_of(operands[1])
        elif instruction.opcode in ("copy", "copy-start", "dynamic-slice") and operands:
            source, target = operands[0], types_of(instruction.type)[0]
            size = size_of(target)
        else:
            return
        if is_on_host(target) and not is_on_host(source):
            self.to_host += times * size
        if is_on_host(source) and not is_on_host(target):
            self.from_host += times * size

    def _cheapest(self, branches: list[str], times: float, in_fusion: bool) -> None:
        """Visits the branch with the least work; others handle rare cases, such as an overloaded expert."""
        tried = []
        for branch in branches:
            alone = copy.copy(self)
            alone.flops, alone.bytes, alone.collectives, alone.chains = 0.0, 0.0, {}, set(self.chains)
            alone.narrow = {}
            alone.visit(branch, times, in_fusion=in_fusion)
            moved = sum(size for *_, size in alone.collectives.values())
            tried.append((alone.flops, moved, alone.bytes, len(tried)))
        self.chosen += len({what[:2] for what in tried}) > 1
        if tried:
            self.visit(branches[min(tried)[-1]], times, in_fusion=in_fusion)

    def _trips(self, loop: Instruction, computation: dict[str, Instruction]) -> float:
        """Returns a loop's trip count, `ceil((limit - first) / step)`, or the given one if data sets the limit."""
        # From a condition `i < limit` and a body with `i + step`. Loops begin at 0 unless the program has another
        # constant; the limit may be part of the loop's state.
        if (known := known_trips(loop.rest)) is not None:
            return known
        condition = self.computations[computation_of(loop, "condition")]
        numbers = [value for instruction in condition.values() if (value := constant_of(instruction)) is not None]
        index, *others = _compared(condition) or [None]

        def begin(element):
            return constant_of(_element(computation, loop.operands[0], element))

        numbers = numbers or [value for other in others if (value := begin(other)) is not None]
        if len(numbers) != 1:
            self.unknown += 1
            return trips_of_loop(loop.rest, self.trips)
        first = begin(index) or 0
        return max(
            1, math.ceil((numbers[0] - first) / self._step(self.computations[computation_of(loop, "body")], index))
        )

    def _step(self, body: dict[str, Instruction], index: int | None) -> int:
        """Returns the increment of the loop's counter: more than 1 in unrolled loops."""
        raised = _element(body, _root(body).name, index)
        if raised is None or raised.opcode != "add":
            return 1
        steps = [value for name in raised.operands if name in body and (value := constant_of(body[name])) is not None]
        return max(1, steps[0]) if steps else 1

    def _collective(self, instruction: Instruction, kind: str, computation: Any, name: str, times: float) -> None:
        """Adds a collective that runs `times` times."""
        # To overlap a collective, the TPU compiler splits it into several fusions with the same chain id: count one.
        if chain := _CHAIN.search(instruction.rest):
            if chain[0] in self.chains:
                return
            self.chains.add(chain[0])
        size = sum(size_of(computation[operand].type) for operand in instruction.operands if operand in computation)
        if kind == "ragged-all-to-all":  # in- and output are equal on average: take the smaller buffer
            size = min(size_of(computation[operand].type) for operand in instruction.operands[:2])
        if kind == "all-gather":
            size = max(size_of(instruction.type) - (size if instruction.opcode.endswith("-start") else 0), size)
        if name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # how the TPU compiler writes it
        if not size:
            return
        axes = self.network if instruction.opcode == "send" else axes_of_group(instruction.rest, self.mesh)
        entry = self.collectives.setdefault((kind, axes), [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += times
        entry[2] += times * size

    def _traffic(self, instruction: Instruction, computation: dict[str, Instruction]) -> float:
        """Returns the bytes read from and written to main memory; slices only count their own bytes."""
        if instruction.opcode in (*_FREE, *_AROUND) or instruction.opcode.endswith("-done"):
            return 0.0
        if 'custom_call_target="AllocateBuffer"' in instruction.rest:
            return 0.0
        operands = [computation[name] for name in instruction.operands if name in computation]
        if instruction.opcode in (*_SLICES, "gather"):
            read = min(bytes_of(operands[0].type), _sliced(instruction, operands[0])) if operands else 0.0
            return read + bytes_of(instruction.type) if operands else 0.0
        if instruction.opcode == "dynamic-update-slice":
            return (1 if is_on_host(instruction.type) else 2) * bytes_of(operands[1].type) if len(operands) > 1 else 0.0
        if instruction.opcode.startswith("ragged-all-to-all"):
            # Rows that leave are read and those that arrive are written, equally many on average.
            return 2 * min((bytes_of(operand.type) for operand in operands[:2]), default=0.0)
        if instruction.opcode.endswith("-start"):
            return bytes_of(instruction.type)  # the type of a start names operands and results
        if (
            kernel_bytes := grouped_bytes(instruction, self.room, self.vmem)
            or splash_bytes(instruction, self.vmem)
            or estimate_of(instruction, "bytes_accessed")
        ):
            return kernel_bytes
        if bytes_of(instruction.type) + sum(bytes_of(operand.type) for operand in operands) <= self.cache:
            return 0.0
        if instruction.opcode != "fusion":
            return bytes_of(instruction.type) + sum(bytes_of(operand.type) for operand in operands)
        inner = self.computations[computation_of(instruction, "calls")]
        read = sum(
            min(bytes_of(operand.type), self._read(_parameter(i, inner), inner)) for i, operand in enumerate(operands)
        )
        return read + self._written(_root(inner), inner, instruction.type)

    def _read(self, parameter: Instruction | None, inner: dict[str, Instruction]) -> float:
        """Returns the bytes that a fusion reads of an operand; fewer if it is sliced, updated or passed on."""
        if parameter is None:
            return math.inf
        return sum(self._used(parameter, user, inner) for user in inner.values() if parameter.name in user.operands)

    def _used(self, parameter: Instruction, user: Instruction, inner: dict[str, Instruction]) -> float:
        if user.opcode in _SLICES or (user.opcode == "gather" and user.operands[0] == parameter.name):
            return _sliced(user, parameter)
        if user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            return 0.0
        if user.opcode in _VIEWS:
            return self._read(user, inner)
        if user.opcode == "fusion":
            called = self.computations[computation_of(user, "calls")]
            return self._read(_parameter(user.operands.index(parameter.name), called), called)
        return 0.0 if _hands_on(user) else math.inf

    def _written(self, root: Instruction, inner: dict[str, Instruction], type_: str) -> float:
        """Returns the bytes that a fusion writes: only the slice of an update, and nothing for values passed
        through.
        """
        if root.opcode == "tuple":
            parts = zip(root.operands, types_of(type_), strict=True)
            return sum(self._written(inner[name], inner, part) for name, part in parts)
        if root.opcode == "parameter" or _hands_on(root):
            return 0.0
        if root.opcode == "bitcast" and root.operands[0] in inner:
            return self._written(inner[root.operands[0]], inner, type_)
        if root.opcode == "dynamic-update-slice" and root.operands[1] in inner:
            return min(bytes_of(type_), bytes_of(inner[root.operands[1]].type))
        return bytes_of(type_)


def _sliced(instruction: Instruction, operand: Instruction) -> float:
    """Returns the bytes that a slice or a gather reads from main memory; its result may be in another memory."""
    return size_of(instruction.type) if bytes_of(operand.type) else 0.0


def _element(computation: dict[str, Instruction], name: str, index: int | None) -> Instruction | None:
    """Returns the element of a tuple at `index`, looking through copies; None if unknown."""
    instruction = computation.get(name)
    if instruction is None or instruction.opcode != "tuple" or index is None or index >= len(instruction.operands):
        return None
    part = computation.get(instruction.operands[index])
    return computation.get(part.operands[0]) if part is not None and part.opcode == "copy" else part


def _compared(condition: dict[str, Instruction]) -> list[int]:
    """Returns the indices of the loop state that the condition compares, the counter first."""
    ends = [condition[name] for name in _root(condition).operands if name in condition]
    indices = [index_of(instruction) for instruction in ends if instruction.opcode == "get-tuple-element"]
    return (
        list(dict.fromkeys(indices))
        or [index_of(instruction) for instruction in condition.values() if "get-tuple" in instruction.opcode][:1]
    )


def _parameter(index: int, inner: dict[str, Instruction]) -> Instruction | None:
    return next(
        (
            instruction
            for instruction in inner.values()
            if instruction.opcode == "parameter" and instruction.rest.startswith(f"{index})")
        ),
        None,
    )


def _root(inner: dict[str, Instruction]) -> Instruction:
    return next(instruction for instruction in inner.values() if instruction.root)


def _hands_on(instruction: Instruction) -> bool:
    """Returns True if an instruction only passes buffers on: a tuple, or a collective started by another fusion."""
    return (
        instruction.opcode == "tuple"
        or bool(_CHAIN.search(instruction.rest))
        or "AsyncCollectiveDone" in instruction.rest
    )
