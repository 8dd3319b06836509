"""Differences between the supported versions of jax (0.10.2 and newer) that the kernels depend on.

No other module here checks the version of jax.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlib._utils.varying import vary_alike

# From 0.11 on the compiler infers layouts by default; before that, the older lowering is the one that is complete.
_OLD = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)
SEMANTICS = plgpu.LoweringSemantics.Lane if _OLD else plgpu.LoweringSemantics.Warpgroup
_TAKES_COST = "cost_estimate" in inspect.signature(plgpu.kernel).parameters  # from 0.12 on
_index = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_NEEDS_INDEX = _index is not None and _index.default is inspect.Parameter.empty  # before 0.11.2


def load(ref, layout):
    """Reads a whole reference (in shared or global memory) into registers."""
    index = ((),) if _LOAD_NEEDS_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def number(value):
    """Returns a number that was read from memory, as loops need it.

    Under `jax.shard_map` with `check_vma`, what a kernel reads varies over mesh axes and what it computes does not. The
    counter of a loop between numbers that were read would change its type.
    """
    return value + jnp.int32(0)


def transpose(ref):
    """Returns the transposed view of a matrix in shared memory; no data moves."""
    return plgpu.transpose_ref(ref, (1, 0)) if _OLD else ref.transpose((1, 0))


def compiler_params():
    """Returns the compiler parameters that all kernels use."""
    return plgpu.CompilerParams(approx_math=True, lowering_semantics=SEMANTICS)


def kernel(body: Callable, *, out_type: Any, flops: int, exps: int = 0, **options: Any) -> Callable:
    """Wraps `plgpu.kernel` and gives the compiler an estimate of its cost: each operand and result moves once."""

    def call(*operands):
        moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((operands, out_type)))
        estimate = pl.CostEstimate(flops=flops, transcendentals=exps, bytes_accessed=moved)
        more: dict[str, Any] = {"cost_estimate": estimate} if _TAKES_COST else {}
        results = plgpu.kernel(body, out_type=out_type, **options, **more)(*operands)
        return vary_alike((operands, results))[1]  # which `plgpu.kernel` leaves out

    return call
