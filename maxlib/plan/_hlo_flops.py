"""Counts the floating-point operations of an instruction of a compiled program.

These are the FLOPs of one device's program, including recomputation and padding. `maxlib.observability.forward_flops`
counts the model's FLOPs on the trace.
"""

import functools
import math
import re

import numpy as np

from maxlib.plan._hlo_gpu import custom_flops
from maxlib.plan._hlo_splash import splash_flops
from maxlib.plan._hlo_text import Instruction, shapes_of


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


def custom_call_flops(instruction: Instruction, computation: dict[str, Instruction]) -> float:
    """Returns the FLOPs of a custom call that is known by its target."""
    types = [computation[name].type for name in instruction.operands if name in computation]
    operands = [sizes for type_ in types for _, sizes, _ in shapes_of(type_)]
    return splash_flops(instruction) or custom_flops(
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
