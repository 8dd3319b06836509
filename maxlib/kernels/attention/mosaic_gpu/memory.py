"""Shared memory, barriers, and the memory warpgroup's loop, which all Hopper kernels use.

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

from maxlib.kernels.attention.mosaic_gpu.config import Tiles


class Stream(NamedTuple):
    """Buffers of several stages that are filled together (a block, and statistics of its queries), and two barriers."""

    buffers: tuple[Any, ...]
    ready: Any
    free: Any


def matrices(dtype, *widths: int) -> Callable:
    """Returns a constructor of matrices in shared memory, in the widest swizzle pattern that divides all `widths`.

    wgmma reads its operands in this layout, without bank conflicts.
    """
    size = jnp.dtype(dtype).itemsize
    pattern = swizzle(*widths, size=size)
    transforms = (plgpu.TilingTransform((8, pattern // size)), plgpu.SwizzleTransform(pattern))
    return lambda *shape: plgpu.SMEM(shape, dtype, transforms=transforms)


def single_rows(dtype, *shape: int):
    """Allocates matrices of 16-bit numbers in shared memory, 64 columns wide; any number of rows can be copied out.

    Swizzled tiles have one row each. Without a swizzle, the rows that a warp stores together would conflict in a few
    banks; wider rows would conflict too, because the pattern repeats every 8 * 128 bytes.
    """
    transforms = (plgpu.TilingTransform((1, shape[-1])), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def swizzle(*widths: int, size: int = 2) -> int:
    """Returns the bytes of the widest swizzle pattern that divides rows of these widths; elements have `size` bytes."""
    return math.gcd(128, *(size * width for width in widths))


def barrier(count: int, arrivals: int = 1):
    """Returns `count` barriers, each of which completes after `arrivals` arrivals."""
    return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)


def stream(tiles: Tiles, *buffers) -> Stream:
    """Adds barriers to buffers: `ready` expects one copy per buffer, `free` every compute warpgroup."""
    return Stream(buffers, barrier(tiles.stages, len(buffers)), barrier(tiles.stages, tiles.warpgroups))


def local(buffer, warpgroup) -> Callable:
    """Returns a function that gives a warpgroup's part of a buffer, whose address is computed at every use.

    Otherwise the compiler keeps the address of each piece in a register throughout the loop (64 registers for heads of
    width 256) and spills.
    """
    return lambda: buffer.at[lax.optimization_barrier(warpgroup)]


def column(step, first, full_first, full):
    """Returns the column of tiles visited in `step`: the full ones first, then those on both sides of them."""
    # Number the partial tiles from `first`, and jump over the `full` ones once the numbers reach them.
    rest = first + step - full
    return jnp.where(step < full, full_first + step, jnp.where(rest >= full_first, rest + full, rest))


def deal(first, visited, full_first, full, *, part, parts: int):
    """Returns the steps of one part, how many of them have full tiles, and the block of keys in each step."""
    if parts == 1:
        return visited, full, lambda step: column(step, first, full_first, full)

    # A part takes the steps part, part + P, part + 2P, ... of the walk, so that the full tiles still come first.
    def share(steps):
        return lax.div(jnp.maximum(steps - part + parts - 1, 0), jnp.int32(parts))

    # A part without steps processes one masked tile after the visited ones, which no query attends to.
    def block(step):
        return column(part + step * parts, first, full_first, full)

    return jnp.maximum(share(visited), 1), share(full), block


class Turns:
    """Schedule of the tensor cores among warpgroups: while one multiplies, another computes its softmax."""

    def __init__(self, barrier, warpgroup, count: int):
        self.mine, self.next = barrier.at[warpgroup], barrier.at[lax.rem(warpgroup + 1, jnp.int32(count))]
        pl.when(warpgroup == count - 1)(self.give)

    def take(self):
        """Waits for this warpgroup's turn."""
        plgpu.barrier_wait(self.mine)

    def give(self):
        """Passes the turn to the next warpgroup."""
        plgpu.barrier_arrive(self.next)


def feed(step, stages: int, streams: list[tuple[Stream, tuple]]):
    """Starts the copies of one step: waits until each slot is free, then fills it."""
    slot = lax.rem(step, jnp.int32(stages))
    for (buffers, ready, free), sources in streams:
        # The first `stages` slots are free from the beginning.
        pl.when(step >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        for buffer, source in zip(buffers, sources, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], ready.at[slot])


def ahead(stream: Stream, step, steps, stages: int):
    """Waits until the buffers of `step` have arrived; does nothing if there are only `steps` steps."""
    ready = stream.ready.at[lax.rem(step, jnp.int32(stages))]
    pl.when(step < steps)(lambda: plgpu.barrier_wait(ready))


def finish_together(finished):
    """Waits for all compute warpgroups, before one of them writes where another may still read."""
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)


def load(ready, *pairs):
    """Copies the blocks that stay for the whole kernel, and waits for them; `ready` expects one arrival per pair."""
    for source, buffer in pairs:
        plgpu.copy_gmem_to_smem(source, buffer, ready)
    plgpu.barrier_wait(ready)


def store(*pairs):
    """Copies from shared to global memory, and waits; elements beyond the end of an array are left out."""
    plgpu.commit_smem()
    for buffer, target in pairs:
        plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)
