"""What only programs for GPUs say: how often a loop runs, and which matmul a library computes."""

import math
import re
from collections.abc import Sequence

_GEMM = re.compile(r'custom_call_target="__cublas\$')
_SUMMED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def known_trips(rest: str) -> int | None:
    """How often a loop runs, where the compiler notes it; its condition lies in a fusion."""
    found = _TRIPS.search(rest)
    return int(found[1]) if found else None


def library_flops(rest: str, left: Sequence[int], out: Sequence[int]) -> float:
    """Of a custom call of cuBLAS; 0 for others. left and out are the shapes of its first operand and result."""
    summed = _SUMMED.search(rest) if _GEMM.search(rest) else None
    if summed is None:
        return 0.0
    return 2.0 * math.prod(out) * math.prod(left[int(d)] for d in re.findall(r"\d+", summed[1]))
