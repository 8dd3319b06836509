"""Counts what JAX's splash attention for TPUs computes and moves; its kernels tell the compiler nothing about that.

Letters: B rows, N query heads, K key heads, T queries and S keys, padded to whole blocks.
"""

import dataclasses
import math
import re

from maxlib.kernels.attention.tiles import causal_tiles
from maxlib.ops.tiles import SplashBlock, SplashTiles, splash_tiles
from maxlib.plan._hlo_text import Instruction, shapes_of, size_of

# `maxlib.ops` names what the mask leaves, JAX names the kernel.
_KERNEL = re.compile(
    r'operand_layout_constraints=\{(.*?\})\}, .*op_name="[^"]*\bsplash_(causal|full|any)(?:_(\d+))?\b[^"]*splash_mha_(fwd|dq|dkv)'
)
_LANES, _SUBLANES = 128, 8  # a number per query or key that lies along the other is stored as often


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One call, from its operands."""

    phase: str
    kind: str
    window: int | None
    q: tuple[int, ...]  # B N T Hk, or N T Hk
    v: tuple[int, ...]  # B K S Hv, or K S Hv
    width: int  # bytes of an element
    marks: int  # numbers of 32 bits beside each query: its index, its segment

    @property
    def tiles(self) -> SplashTiles:
        return splash_tiles(self.q[-2], self.v[-2], self.q[-1], self.v[-1])

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


def _read(one: Instruction) -> _Kernel | None:
    if one.opcode != "custom-call" or (found := _KERNEL.search(one.rest)) is None:
        return None
    arrays = [(kind, sizes) for kind, sizes, _ in shapes_of(found[1])]
    (kind, q), (_, _), (_, v) = [one for one in arrays if not one[0].startswith(("s", "u", "pred"))][:3]
    marks = sum(kind == "s32" and sizes[-1] in (_LANES, q[-2]) and len(sizes) > 1 for kind, sizes in arrays[2:])
    window = None if found[3] is None else int(found[3])
    return _Kernel(found[4], found[2], window, tuple(q), tuple(v), round(size_of(f"{kind}[1]")), marks)


def splash_flops(one: Instruction) -> float:
    """Returns the FLOPs of a call of splash attention, 0 for any other instruction."""
    kernel = _read(one)
    return 0.0 if kernel is None else kernel.flops


def splash_bytes(one: Instruction) -> float | None:
    """Returns the bytes that a call of splash attention reads and writes, None for any other instruction."""
    kernel = _read(one)
    return None if kernel is None else kernel.bytes
