"""Details of programs for GPUs: noted trip counts, and the FLOPs of cuBLAS calls, Mosaic GPU and Triton kernels."""

import math
import re
from collections.abc import Sequence

from maxlib.plan._hlo_text import shapes_of

Shapes = Sequence[Sequence[int]]

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SUMMED = re.compile(r'custom_call_target="__cublas\$.*"lhs_contracting_dimensions":\[([^\]]*)\]')
_KERNEL = re.compile(
    r'custom_call_target="(?:mosaic_gpu|triton_kernel_call)\w*".*op_name="[^"]*\b(attention|grouped_matmul)_(\w+)/'
)
_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")
# Matmuls of attention's kernels for each pair of a query and a key, in widths of keys and of values.
_ATTENTION = {"forward": (1, 1), "dq": (2, 1), "dk": (2, 1), "dv": (1, 1), "dk_dv": (2, 2)}
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
    if match := _SUMMED.search(rest):
        dims = [operands[0][int(d)] for d in re.findall(r"\d+", match[1])]
        return 2.0 * math.prod(results[0]) * math.prod(dims)
    if (match := _KERNEL.search(rest)) is None or '"cost_estimate"' in rest:
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
    keys, values = _ATTENTION.get(match[2], (0, 0))
    return 2.0 * math.prod(queries) * min(S, (S + _TILE) / 2) * (keys * Hk + values * Hv)
