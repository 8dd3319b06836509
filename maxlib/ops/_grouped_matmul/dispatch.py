"""The table of grouped matmul implementations, in order of preference, and the choice between them."""

import dataclasses
from typing import Any

import jax

from maxlib.hardware import is_hopper
from maxlib.kernels.grouped_matmul.mosaic_gpu.config import grouped_tiles
from maxlib.ops import _tuning
from maxlib.ops._explanation import Explanation, say_once
from maxlib.ops._findings import refused as failed_check
from maxlib.ops._grouped_matmul import jax_mosaic_gpu, tokamax_triton
from maxlib.ops._grouped_matmul.megablox import DTYPES, matmuls
from maxlib.ops._grouped_matmul.ragged_tiles import TritonTiles
from maxlib.ops._grouped_matmul.tiled import tiled_tiles


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a grouped matmul.

    Args:
        about: Description in one line.
        platforms: Platforms on which it runs; None for all.
        by_name: Why it runs only by name; None if it may be chosen.
    """

    about: str
    platforms: frozenset[str] | None = None
    by_name: str | None = None


TABLE = {
    "mosaic_gpu": Implementation("maxlib's kernels for NVIDIA's Hopper in both passes", frozenset({"gpu"})),
    "jax_mosaic_gpu": Implementation(
        "JAX's kernels for NVIDIA's Blackwell and Hopper, and for the gradient of the weights tokamax's or XLA",
        frozenset({"gpu"}),
    ),
    "tokamax": Implementation("tokamax's kernels in Triton for NVIDIA's GPUs since Ampere", frozenset({"gpu"})),
    "megablox": Implementation("JAX's TPU kernels in both passes", frozenset({"tpu"})),
    "tiled": Implementation("tiles of rows in XLA, at a cost proportional to the rows"),
    "ragged_dot": Implementation(
        "XLA's own",
        by_name="on CPUs and GPUs, and with libtpu 0.0.42 in the gradient of weights, XLA multiplies every row by every expert",
    ),
    "reference": Implementation("the reference, a loop over experts", by_name="it is the specification"),
}


def refusals(
    rows: Any, weights: Any, weight_order: str, out_dtype: Any, device: tuple[str, str]
) -> dict[str, str | None]:
    """Returns for each implementation why it cannot run a call, or None.

    Args:
        rows: `M I`, or its shape and dtype.
        weights: `E O I` or `E I O`, or their shape; None for the transposed matmul.
        weight_order: The dimensions of `weights`.
        out_dtype: Dtype of the result of narrow operands, or None.
        device: Platform and kind of the device.
    """
    found: dict[str, str | None] = {}
    for name, one in TABLE.items():
        wrong = one.platforms is not None and device[0] not in one.platforms
        found[name] = f"runs on {' and '.join(sorted(one.platforms or ()))}, not on {device[0]}" if wrong else None
    found["mosaic_gpu"] = (
        "has no transposed matmul"
        if weights is None
        else _hopper_refuses(rows, weights, weight_order, out_dtype, device)
    )
    for name, module in {"jax_mosaic_gpu": jax_mosaic_gpu, "tokamax": tokamax_triton}.items():
        found[name] = found[name] or module.refuses(rows, weights, weight_order, out_dtype, device)
    return {name: why or failed_check("grouped_matmul", name, device[1]) for name, why in found.items()}


def _hopper_refuses(rows: Any, weights: Any, weight_order: str, out_dtype: Any, device: tuple[str, str]) -> str | None:
    """Returns the reason why the Hopper kernels cannot run a call, or None."""
    if not is_hopper(device[1]):
        return f"is for NVIDIA's Hopper (H100, H200, GH200, H800, H20), not for {device[1]}"
    if str(rows.dtype) not in ("bfloat16", "float16"):
        return f"takes rows in bfloat16 or float16, not in {rows.dtype}"
    if out_dtype is not None:
        return "only returns the dtype of its rows"
    if not isinstance(weights, (jax.Array, jax.ShapeDtypeStruct)):
        return "takes arrays; it would restore a quantized weight for all experts at once"
    for name, width in zip(weight_order, weights.shape, strict=True):
        if name != "E" and width % 64:
            return f"takes widths that are multiples of 64, not {name}={width}"
    return None


def sizes(
    name: str | None, rows: Any, weights: Any, weight_order: str, device: tuple[str, str]
) -> _tuning.Tuned | None:
    """Returns the tile sizes that an implementation runs a call with; None if it has none."""
    M, (E, O, I) = rows.shape[0], (weights.shape[weight_order.index(axis)] for axis in "EOI")
    if name == "megablox" and str(rows.dtype) in DTYPES:
        default: Any = matmuls(rows, weights, weight_order, device[1]).tiles()
    elif name == "jax_mosaic_gpu":
        default = jax_mosaic_gpu.tiles_for(device[1], M, E)
    elif name == "tokamax":
        default = TritonTiles()
    elif name == "mosaic_gpu":
        default = grouped_tiles(I, O)
    elif name == "tiled":
        default = tiled_tiles(M, E)
    else:
        return None
    return _tuning.choose(default, _tuning.key_of({"M": M}, {"E": E, "I": I, "O": O}), device[1])


def explain(call: str, reasons: dict[str, str | None], name: str | None = None) -> Explanation:
    """Finds the implementation that would run a call.

    Raises:
        ValueError: No implementation has this name.
    """
    if name is not None and name not in reasons:
        raise ValueError(f"implementation must be None or one of {sorted(reasons)}, got {name!r}")
    refused = {one: why for one, why in reasons.items() if why is not None}
    unasked = {one: f"runs only by name: {TABLE[one].by_name}" for one in TABLE if TABLE[one].by_name is not None}
    if name is None:
        best = next(one for one in reasons if one not in refused and one not in unasked)
        return Explanation("grouped_matmul", call, best, TABLE[best].about, unasked | refused)
    if name in refused:
        return Explanation("grouped_matmul", call, None, f"{name} {refused[name]}", refused)
    return Explanation("grouped_matmul", call, name, "requested by name", refused)


def say_why(answer: Explanation, device: tuple[str, str]) -> None:
    """Logs why a GPU runs plain XLA, if it does."""
    if device[0] == "gpu" and answer.chosen == "tiled":
        why = ", and ".join(f"{one} {answer.refused[one]}" for one in ("mosaic_gpu", "jax_mosaic_gpu", "tokamax"))
        say_once(answer, device, why)
