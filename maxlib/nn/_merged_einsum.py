"""Einsums with neighbouring dimensions merged, which XLA for CPUs would otherwise copy and transpose."""

import math
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float


def merged_einsum(
    einsum: Callable[..., Array],
    spec: str,
    x: Float[Array, "..."],
    w: Any,
    *,
    rows: bool = False,
    matrix: bool = False,
) -> Float[Array, "..."]:
    """Computes `einsum(spec, x, w)` with neighbouring dimensions merged, where `spec` allows it.

    Args:
        einsum: Function of a spec and two arrays.
        spec: Einsum of an input and a weight, such as `"...D,NHD->...NH"`.
        x: Input.
        w: Weight; an array if `matrix` is True.
        rows: True merges the dimensions that `...` stands for: `[B, T, D]` becomes `[B * T, D]`.
        matrix: True merges the weight's dimensions to outputs and inputs: `[N, H, D]` becomes `[N * H, D]`.
    """
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    if not of_x.startswith("...") or not of_y.startswith("..."):
        return einsum(spec, x, w)
    summed = len(of_x) - len("...")
    # [*lead, *inputs], for example [B, T, N, H]
    lead, inputs, outputs = x.shape[: x.ndim - summed], x.shape[x.ndim - summed :], None
    rows = rows and len(lead) > 1
    if matrix := matrix and len(of_w) > 2 and of_w == of_y[3:] + of_x[3:]:
        outputs, inputs = w.shape[: w.ndim - summed], (math.prod(inputs),)
        spec, w = "...I,OI->...O", w.reshape(-1, *inputs)
    if not rows and not matrix:
        return einsum(spec, x, w)
    merged = (-1,) if rows else lead
    y = einsum(spec, x.reshape(*merged, *inputs), w)
    return y.reshape(*lead, *(y.shape[len(merged) :] if outputs is None else outputs))
