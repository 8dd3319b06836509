"""Shared memory, barriers, and the memory warpgroup's loop: what all kernels of this room have in common.

A buffer that streams is guarded by two barriers per stage: `ready` completes when the bytes have arrived, `free` when
every compute warpgroup is done with them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlib.ops._attention.mosaic_gpu.config import Tiles


class Stream(NamedTuple):
    """A buffer of several stages, with what rides along (statistics of queries); one pair of barriers guards them."""

    buffers: tuple[Any, ...]
    ready: Any
    free: Any


def matrices(dtype, *widths: int) -> Callable:
    """Makes matrices in shared memory, in the widest swizzle pattern that divides all of `widths`, as wgmma reads
    them.
    """
    pattern = swizzle(*widths)
    transforms = (plgpu.TilingTransform((8, pattern // 2)), plgpu.SwizzleTransform(pattern))
    return lambda *shape: plgpu.SMEM(shape, dtype, transforms=transforms)


def swizzle(*widths: int) -> int:
    """Bytes of the widest swizzle pattern that divides rows of all these widths (16-bit elements)."""
    return math.gcd(128, *(2 * width for width in widths))


def barrier(count: int, arrivals: int = 1):
    return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)


def stream(tiles: Tiles, *buffers) -> Stream:
    return Stream(buffers, barrier(tiles.stages, len(buffers)), barrier(tiles.stages, tiles.warpgroups))


def own(buffer, warpgroup) -> Callable:
    """A warpgroup's part of a buffer, addressed anew at every use.

    Else the compiler keeps the address of each piece in a register all through the loop (64 of them for heads of 256),
    and spills.
    """
    return lambda: buffer.at[lax.optimization_barrier(warpgroup)]


def column(step, first, full_first, full):
    """The column of tiles visited in `step`: the full ones first, then what is left on both sides of them."""
    rest = first + step - full
    return jnp.where(step < full, full_first + step, jnp.where(rest >= full_first, rest + full, rest))


def feed(step, stages: int, streams: list[tuple[Stream, tuple]]):
    """Asks for the blocks of one step: waits until each place is free, then starts the copies into it."""
    slot = lax.rem(step, jnp.int32(stages))
    for (buffers, ready, free), sources in streams:
        pl.when(step >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        for buffer, source in zip(buffers, sources, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], ready.at[slot])


def finish_together(finished):
    """Waits until all compute warpgroups are here, before one writes where another one may still read."""
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)


def load(ready, *pairs):
    """Copies what stays for the whole kernel, and waits for it. `ready` expects one arrival per pair."""
    for source, buffer in pairs:
        plgpu.copy_gmem_to_smem(source, buffer, ready)
    plgpu.barrier_wait(ready)


def store(*pairs):
    """Copies from shared to global memory, and waits; elements beyond the end of an array are left out."""
    plgpu.commit_smem()
    for buffer, target in pairs:
        plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)
