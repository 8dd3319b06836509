"""Counts what one instruction of a compiled program computes and moves.

FLOPs are those of one device's program, including recomputation and padding. `maxlib.observability.forward_flops`
counts the model's FLOPs on the trace.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import numpy as np

from maxlib.kernels.attention.tiles import causal_tiles
from maxlib.kernels.grouped_matmul.megablox_tiles import Sizes, Tiles, choose_tiles
from maxlib.kernels.vector_memory import DEFAULT_VMEM
from maxlib.ops.tiles import SplashBlock, SplashTiles, splash_tiles
from maxlib.plan._hlo_text import Instruction, shapes_of, size_of


def matmul_flops(instruction: Instruction, computation: dict[str, Instruction]) -> float:
    """Returns the FLOPs of a dot (2 * elements of the result * contracted elements) or of a convolution."""
    types = [computation[name].type for name in instruction.operands[:2] if name in computation]
    if len(types) < 2:
        return 0.0
    left, right = (next(shapes_of(type_))[1] for type_ in types)
    out = next(shapes_of(instruction.type))[1]
    if instruction.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        dims = [int(d) for d in summed[1].split(",") if d] if summed else []
        return 2.0 * math.prod(out) * math.prod(left[d] for d in dims)
    return _convolution_flops(instruction.rest, left, right, out)


def _convolution_flops(rest: str, left: list[int], right: list[int], out: list[int]) -> float:
    """Returns the FLOPs of a convolution; products with padding do not count."""
    # The TPU compiler turns matmuls into convolutions, and batch dimensions into windows that mostly cover padding.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if labels is None:
        return 0.0
    lhs, rhs, result = labels.groups()
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", rest) or [""])[0]))
    count = 2.0 * out[result.index("b")] * out[result.index("f")] * right[rhs.index("i")]
    for d in range(len(rhs) - 2):

        def pick(key, default, d=d):
            return window.get(key, "x".join([default] * (d + 1))).split("x")[d]

        low = int(pick("pad", "0_0").split("_")[0])
        steps = [int(pick(key, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate")]
        sizes = left[lhs.index(str(d))], right[rhs.index(str(d))], out[result.index(str(d))]
        count *= _meetings(*sizes, low, *steps)
    groups = re.search(r"batch_group_count=(\d+)", rest)
    return count / (int(groups[1]) if groups else 1)


@functools.cache
def _meetings(left: int, window: int, out: int, low: int, stride: int, left_dilation: int, right_dilation: int) -> int:
    """Counts pairs of output position and window element that read an input element and not padding."""
    at = np.arange(out)[:, None] * stride - low + np.arange(window)[None] * right_dilation
    return int(np.sum((at >= 0) & (at <= (left - 1) * left_dilation) & (at % left_dilation == 0)))


def custom_call_flops(instruction: Instruction, computation: dict[str, Instruction], vmem: int = DEFAULT_VMEM) -> float:
    """Returns the FLOPs of a custom call that is known by its target."""
    types = [computation[name].type for name in instruction.operands if name in computation]
    operands = [sizes for type_ in types for _, sizes, _ in shapes_of(type_)]
    return splash_flops(instruction, vmem) or custom_flops(
        instruction.rest, operands, [sizes for _, sizes, _ in shapes_of(instruction.type)]
    )


def narrow_kind(instruction: Instruction, computation: dict[str, Instruction]) -> str | None:
    """Returns "fp8" or "int8" if all matrices that an instruction multiplies have such elements, else None."""
    types = [computation[name].type for name in instruction.operands if name in computation]
    kinds = {_narrow(name) for type_ in types for name, sizes, _ in shapes_of(type_) if len(sizes) > 1}
    return kinds.pop() if len(kinds) == 1 else None


def _narrow(element: str) -> str | None:
    return "fp8" if element.startswith("f8") else "int8" if element in ("s8", "u8") else None


def estimate_of(instruction: Instruction, what: str) -> float:
    """Returns an entry of a kernel's own `cost_estimate`, such as "flops"; 0 without one."""
    match = re.search(rf'"cost_estimate":\s*\{{[^}}]*"{what}":\s*"?(\d+)', instruction.rest)
    return float(match[1]) if match else 0.0


Shapes = Sequence[Sequence[int]]

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CUBLAS = re.compile(r'custom_call_target="__cublas\$.*"lhs_contracting_dimensions":\[([^\]]*)\]')
_GPU_KERNEL = re.compile(
    r'custom_call_target="(?:mosaic_gpu|triton_kernel_call)\w*".*op_name="[^"]*\b(attention|grouped_matmul)_(\w+)/'
)
_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")
# Matmuls of attention's kernels for each pair of a query and a key, in widths of keys and of values.
_ATTENTION_MATMULS = {"forward": (1, 1), "dq": (2, 1), "dk": (2, 1), "dv": (1, 1), "dk_dv": (2, 2)}
_TILE = 128


def known_trips(rest: str) -> int | None:
    """Returns a loop's trip count if the compiler noted it; on GPUs the condition is hidden in a fusion."""
    match = _TRIPS.search(rest)
    return int(match[1]) if match else None


def custom_flops(rest: str, operands: Shapes, results: Shapes) -> float:
    """Returns the FLOPs of a call to cuBLAS, to a kernel of maxlib or to a grouped matmul; 0 for others.

    Kernels of Mosaic GPU carry no estimate into the program before jax 0.12, those in Triton never do. Attention counts
    for a causal mask, the tiles on its diagonal as a whole.
    """
    if match := _CUBLAS.search(rest):
        dims = [operands[0][int(d)] for d in re.findall(r"\d+", match[1])]
        return 2.0 * math.prod(results[0]) * math.prod(dims)
    if (match := _GPU_KERNEL.search(rest)) is None or '"cost_estimate"' in rest:
        return 0.0
    if listed := _OPERANDS.search(rest):  # an operand may come from another computation
        operands = [sizes for _, sizes, _ in shapes_of(listed[1])]
    if match[1] == "grouped_matmul":  # every row is multiplied by one expert of each matrix
        rows = next(shape for shape in operands if len(shape) == 2)  # in JAX's kernels the experts' counts come first
        if match[2] == "d_weights":  # from rows and one side of a matrix, which tokamax transposes, to its other side
            return 2.0 * math.prod(rows) * results[0][-1]
        matrices = [shape for shape in operands if len(shape) == 3]
        return 2.0 * rows[0] * sum(math.prod(shape[1:]) for shape in matrices)
    (*queries, Hk), (*_, S, _, Hv) = operands[0], operands[2]  # inside a pipeline with an axis of stages
    keys, values = _ATTENTION_MATMULS.get(match[2], (0, 0))
    return 2.0 * math.prod(queries) * min(S, (S + _TILE) / 2) * (keys * Hk + values * Hv)


# `maxlib.ops` names what the mask leaves, JAX names the kernel.
_SPLASH = re.compile(
    r'operand_layout_constraints=\{(.*?\})\}, .*op_name="[^"]*\bsplash_(causal|full|any)(?:_(\d+))?\b[^"]*splash_mha_(fwd|dq|dkv)'
)
_LANES, _SUBLANES = 128, 8  # a number per query or key that lies along the other is stored as often


@dataclasses.dataclass(frozen=True)
class _SplashCall:
    """One call, from its operands."""

    phase: str
    kind: str
    window: int | None
    q: tuple[int, ...]  # B N T Hk, or N T Hk
    v: tuple[int, ...]  # B K S Hv, or K S Hv
    width: int  # bytes of an element
    marks: int  # numbers of 32 bits beside each query: its index, its segment
    vmem: int  # bytes of vector memory of the chip

    @property
    def tiles(self) -> SplashTiles:
        return splash_tiles(self.q[-2], self.v[-2], self.q[-1], self.v[-1], self.window, vmem=self.vmem)

    @property
    def block(self) -> SplashBlock:
        # dq has the blocks of dk and dv.
        return self.tiles.forward if self.phase == "fwd" else self.tiles.dkv

    @property
    def fused(self) -> bool:
        """Tells whether the kernel for dk and dv makes dq too, in parts."""
        return self.phase == "dkv" and self.tiles.dq is None

    @property
    def heads(self) -> int:
        """Returns the number of query heads of all rows."""
        return math.prod(self.q[:-2])

    @property
    def visited(self) -> float:
        """Returns the blocks that one head visits: of a causal mask about half, on average over a ring's parts too."""
        rows, columns = -(-self.q[-2] // self.block.queries), -(-self.v[-2] // self.block.keys)
        if self.kind != "causal":
            return rows * columns
        if self.window is None:
            return causal_tiles(rows, columns)
        if self.q[-2] == self.v[-2]:  # whole rows: a block of queries sees keys up to its last one
            begin = self.block.queries * np.arange(rows)
            first = np.maximum(begin - self.window + 1, 0) // self.block.keys
            last = np.minimum((begin + self.block.queries - 1) // self.block.keys, columns - 1)
            return float((last - first + 1).sum())
        # A block of n queries sees window + n - 1 keys, whose first lies anywhere in its block.
        across = (self.window + self.block.queries - 2) / self.block.keys + 1
        return min(rows * across, causal_tiles(rows, columns))

    @property
    def flops(self) -> float:
        Hk, Hv = self.q[-1], self.v[-1]
        # Forward: q k and p v. dq: q k, d_out v and d_logits k. dk and dv: the first two, d_logits q and p d_out, and
        # d_logits k if it makes dq too.
        widths = {"fwd": Hk + Hv, "dq": 2 * Hk + Hv, "dkv": 2 * Hk + 2 * Hv}[self.phase] + Hk * self.fused
        return 2.0 * self.heads * self.visited * self.block.queries * self.block.keys * widths

    @property
    def bytes(self) -> float:
        (T, Hk), (S, Hv), block = self.q[-2:], self.v[-2:], self.block
        keys, queries = (Hk + Hv) * self.width, (Hk + Hv) * self.width
        segments = 4 * _SUBLANES * max(self.marks - 1, 0)
        if self.phase == "dkv":
            # Keys, values and their gradients stay; queries, d_out, two statistics and the marks pass.
            passing = block.queries * (queries + 4 * _SUBLANES * (2 + self.marks))
            # Every block of keys has a part of dq.
            parts = self.heads * -(-S // block.keys) * T * Hk * self.width * self.fused
            return 2 * S * keys * math.prod(self.v[:-2]) + self.heads * self.visited * passing + parts
        # Queries stay, with the output and the log-sum-exp, or with d_out, two statistics and dq.
        more = 4 * _LANES if self.phase == "fwd" else self.width * Hk + 8
        staying = T * (queries + more + 4 * _LANES * self.marks)
        return self.heads * (staying + self.visited * block.keys * (keys + segments))


def _splash_call(instruction: Instruction, vmem: int) -> _SplashCall | None:
    if instruction.opcode != "custom-call" or (match := _SPLASH.search(instruction.rest)) is None:
        return None
    arrays = [(kind, sizes) for kind, sizes, _ in shapes_of(match[1])]
    (kind, q), _, (_, v) = [array for array in arrays if not array[0].startswith(("s", "u", "pred"))][:3]
    marks = sum(kind == "s32" and sizes[-1] in (_LANES, q[-2]) and len(sizes) > 1 for kind, sizes in arrays[2:])
    window = None if match[3] is None else int(match[3])
    return _SplashCall(match[4], match[2], window, tuple(q), tuple(v), round(size_of(f"{kind}[1]")), marks, vmem)


def splash_flops(instruction: Instruction, vmem: int = DEFAULT_VMEM) -> float:
    """Returns the FLOPs of a call of splash attention, 0 for any other instruction."""
    kernel = _splash_call(instruction, vmem)
    return 0.0 if kernel is None else kernel.flops


def splash_bytes(instruction: Instruction, vmem: int = DEFAULT_VMEM) -> float | None:
    """Returns the bytes that a call of splash attention reads and writes, None for any other instruction."""
    kernel = _splash_call(instruction, vmem)
    return None if kernel is None else kernel.bytes


# The kernel by its operands: the number of tiles, each expert's first row, each tile's expert and its place, the first
# expert, rows, and matrices or, in the transposed matmul, rows again. jax 0.11 loses the name of what it traced once.
_NUMBERS = r"s32\[\], (?:s32\[\d+\]\{0\}, ){3}s32\[1\]\{0\}, "
_MEGABLOX = re.compile(
    rf'operand_layout_constraints=\{{({_NUMBERS}\w+\[\d+,\d+\]\S+ \w+\[\d+,\d+(,\d+)?\]\{{[\d,]+\}})\}}, .*pallas_call"'
)


def grouped_flops(instruction: Instruction, room: float = 1) -> float | None:
    """Returns the FLOPs of a grouped matmul, None for any other instruction.

    Args:
        instruction: The instruction.
        room: Size of the buffer of rows, as a multiple of the rows that arrive.
    """
    of = _megablox_sizes(instruction, room)
    return None if of is None else 2.0 * of.rows * of.summed * of.out


def repeated_flops(instruction: Instruction, room: float = 1, vmem: int = DEFAULT_VMEM) -> float:
    """Returns the FLOPs that a grouped matmul computes beyond those of its rows, 0 for any other instruction.

    A tile with rows of two experts is computed once for each.

    Args:
        instruction: The instruction.
        room: Size of the buffer of rows, as a multiple of the rows that arrive.
        vmem: Bytes of vector memory that the kernel may take.
    """
    of = _megablox_sizes(instruction, room)
    return 0.0 if of is None else _megablox_tiles(instruction, vmem).computed(of) - 2.0 * of.rows * of.summed * of.out


def grouped_bytes(instruction: Instruction, room: float = 1, vmem: int = DEFAULT_VMEM) -> float | None:
    """Returns the bytes that a grouped matmul reads and writes, None for any other instruction.

    Args:
        instruction: The instruction.
        room: Size of the buffer of rows, as a multiple of the rows that arrive.
        vmem: Bytes of vector memory that the kernel may take.
    """
    of = _megablox_sizes(instruction, room)
    return None if of is None else _megablox_tiles(instruction, vmem).moved(of)


def _megablox_tiles(instruction: Instruction, vmem: int) -> Tiles:
    """Returns the tiles of the kernel, which knows the size of its buffer only."""
    of = _megablox_sizes(instruction, 1)
    assert of is not None
    return choose_tiles(dataclasses.replace(of, vmem=vmem))


def _megablox_sizes(instruction: Instruction, room: float) -> Sizes | None:
    if instruction.opcode != "custom-call" or (match := _MEGABLOX.search(instruction.rest)) is None:
        return None
    *_, (kind, left, _), (_, right, _) = shapes_of(match[1])
    out = next(shapes_of(instruction.type))[1]
    transposed = match[2] is None
    matrices = out if transposed else right
    widths = _width_of(kind), round(size_of(instruction.type) / math.prod(out))
    rows = math.ceil(left[0] / room)
    return Sizes(rows, left[1], right[1] if transposed else out[1], matrices[0], *widths, transposed)


def _width_of(kind: str) -> int:
    return int(size_of(f"{kind}[1]"))
