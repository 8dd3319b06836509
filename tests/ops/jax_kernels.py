"""Runs JAX's own grouped matmuls for Hopper and Blackwell (Mosaic GPU) on a CPU, in numpy, one block of threads after
the other.

It executes their functions with stand-ins for the primitives they use, to check which rows, columns and experts they
read, multiply and store: memory beyond the end of an array reads as zeros and is not written, shared memory is NaN
until it is filled, and so is a result that is not stored. Copies are done at once: synchronization is not checked.

On Blackwell a pair of blocks computes a tile: one of their warps copies operands, one multiplies those of both blocks,
a second warpgroup stores. Each runs to its end before the next begins, so a buffer holds all that was ever put into
it, in order (`Queue`).
"""

import collections
import itertools
import math
import types

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu import helpers
from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu, ragged_dot_mgpu

from tests.ops.attention.emulator import ONE_KERNEL, PL

PROCESSORS = 3  # few, so that each computes several tiles


class Memory:
    """An array in memory, or a slice of one: it begins at `begin`, and its `shape` may reach beyond the array's end."""

    def __init__(self, array, begin=None, shape=None):
        self.array, self.dtype = array, array.dtype
        self.begin, self.shape = begin or (0,) * array.ndim, shape or array.shape

    def __getitem__(self, index):
        return self.array[index]

    def __setitem__(self, index, value):
        assert value.dtype == self.dtype and self.array[index].shape == value.shape
        self.array[index] = value

    def __len__(self):
        return len(self.array)

    @property
    def at(self):
        return _At(self)

    def transpose(self, axes=(1, 0)):
        return Memory(self.array.transpose(axes))

    def inside(self):
        """The part of the array that the slice covers, a view."""
        return self.array[tuple(slice(b, b + n) for b, n in zip(self.begin, self.shape, strict=True))]

    def block(self, place, shape):
        """Loads the block that begins at `place`, with zeros beyond the end."""
        found = Memory(np.zeros(shape, self.dtype))
        part = Memory(self.array, tuple(map(sum, zip(self.begin, place, strict=True))), shape).inside()
        found.array[tuple(map(slice, part.shape))] = part
        return found


class _At:
    def __init__(self, memory):
        self.memory = memory

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        array, begin, shape = self.memory.array, self.memory.begin, self.memory.shape
        while not isinstance(index[0] if index else slice(None), slice):  # one matrix of several
            array, index, begin, shape = array[int(index[0])], index[1:], begin[1:], shape[1:]
        index = (*index, *[slice(None)] * (array.ndim - len(index)))
        whole = [slice(0, n) if i == slice(None) else i for i, n in zip(index, shape, strict=True)]
        begin = tuple(b + i.start for b, i in zip(begin, whole, strict=True))
        return Memory(array, begin, tuple(i.stop - i.start for i in whole))


class Spec(types.SimpleNamespace):
    """Shared memory or an accumulator, which `run_scoped` makes."""


def smem(shape, dtype, transforms=()):
    return Spec(make=lambda: Memory(np.full(shape, np.nan, dtype)))


def acc(shape, dtype=np.float32):
    return Spec(make=lambda: Memory(np.zeros(shape, dtype)))


def run_scoped(body, *specs, collective_axes=None, **named):
    if collective_axes is None:
        return body(*(one.make() for one in specs), **{name: one.make() for name, one in named.items()})
    if Block.number not in Block.memory:  # the warpgroups of a block share their memory
        Block.memory[Block.number] = {name: one.make() for name, one in named.items()}
    return body(**Block.memory[Block.number])


def wgmma(total, a, b):
    assert total.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0] and a.dtype == b.dtype
    total.array[...] += np.asarray(getattr(a, "array", a), np.float32) @ b.array.astype(np.float32)


def copy_out(source, target):
    assert source.shape == target.shape and source.dtype == target.dtype
    place = target.inside()
    place[...] = source.inside()[tuple(map(slice, place.shape))]


def emit_pipeline(body, *, grid, in_specs, max_concurrent_steps):
    def run(*operands):
        for step in itertools.product(*(range(int(n)) for n in grid)):
            places = [[int(i) * n for i, n in zip(spec.index(*step), spec.shape, strict=True)] for spec in in_specs]
            blocks = [x.block(at, spec.shape) for x, at, spec in zip(operands, places, in_specs, strict=True)]
            body(tuple(map(np.int32, step)), *blocks)

    return run


def nd_loop(grid, *, collective_axes):
    def run(body):
        for i in range(Block.processor, math.prod(grid), PROCESSORS):
            index = tuple(map(np.int32, np.unravel_index(i, grid)))
            body(types.SimpleNamespace(index=index, local_index=i // PROCESSORS))

    return run


class Block:
    """The block of threads that runs: which processor or pair of them, which of the pair, and which part of it."""

    processor = number = warpgroup = warp = 0
    place: dict  # of a block in a grid, by the names of its axes
    memory: dict  # of the blocks of a pair


def kernel(body, *, out_type=None, out_shape=None, grid=(), grid_names=(), cluster=(), **_):
    out_type = out_type or out_shape

    def launch(*arrays):
        out = Memory(np.full(out_type.shape, np.nan, out_type.dtype))
        with ONE_KERNEL, np.errstate(all="ignore"):
            for place in np.ndindex(*grid) if len(grid) > 1 else ():  # tokamax's blocks have one tile each
                Block.place = dict(zip(grid_names, place, strict=True))
                body(*(Memory(np.asarray(x)) for x in arrays), out)
            for Block.processor in range(PROCESSORS) if len(grid) < 2 else ():
                Block.memory = {}
                # Of a pair, the second block only copies; the first one also multiplies what both have copied.
                for Block.number, Block.warpgroup in ((1, 0), (0, 0), (0, 1), (1, 1)) if cluster else ((0, 0),):
                    body(*(Memory(np.asarray(x)) for x in arrays), out)
        return out.array

    return lambda *arrays: jax.pure_callback(launch, out_type, *arrays)


# ---------------------------------------------------------------------------------------------- Blackwell


class Queue:
    """Buffers, each with all that was put into it."""

    def __init__(self):
        self.slots = collections.defaultdict(collections.deque)

    @property
    def at(self):
        return _Slots(self.slots)


class _Slots:
    def __init__(self, slots):
        self.slots = slots

    def __getitem__(self, slot):
        return self.slots[int(slot)]


class Total:
    """Tensor memory: the sums of a block, and those that were finished, in order, by where they lie."""

    def __init__(self, shape, dtype):
        self.memory, self.finished = Memory(np.full(shape, np.nan, dtype)), Queue()

    @property
    def at(self):
        return self.memory.at


def smem_or_queue(shape, dtype, transforms=()):
    return smem(shape, dtype, transforms) if len(shape) == 2 else Spec(make=Queue)


def copy_in(source, target, barrier, *, leader_tracked, collective_axes):
    """Copies this block's half of what the pair needs, along the axis `leader_tracked`."""
    shape = [n // 2 if axis == leader_tracked else n for axis, n in enumerate(source.shape)]
    place = [Block.number * n if axis == leader_tracked else 0 for axis, n in enumerate(shape)]
    target.append(source.block(place, shape).array)


def mma(total, a, b, barrier, *, accumulate, collective_axis):
    """Multiplies each block's rows by the columns of both blocks; `a` and `b` are the first one's."""
    slot = next(i for i, one in Block.memory[0]["a_smem"].slots.items() if one is a)
    take = lambda number, name: Block.memory[number][name].slots[slot].popleft().astype(np.float32)
    columns = np.concatenate([take(number, "b_smem") for number in (0, 1)], axis=1)
    for number in (0, 1):
        place = Memory(Block.memory[number]["acc_tmem"].memory.array, total.begin, total.shape).inside()
        place[...] = take(number, "a_smem") @ columns + (place if accumulate else 0)


def finish(barrier, *, collective_axis):
    """Keeps the sums that a tile's last product completes, where the barrier's number says that they lie."""
    half = next(i for i, one in Block.memory[0]["mma_done_barrier"].slots.items() if one is barrier)
    for own in Block.memory.values():
        total = own["acc_tmem"].memory.array
        width = total.shape[1] // 2
        own["acc_tmem"].finished.slots[half].append(total[:, half * width : (half + 1) * width].copy())


def wait(barrier):
    """Takes the oldest sums that are finished, if this is what a warpgroup that stores waits for."""
    own = Block.memory[Block.number]
    if Block.warpgroup == 1:
        half = next(i for i, one in own["mma_done_barrier"].slots.items() if one is barrier)
        width = own["acc_tmem"].memory.shape[1] // 2
        done = own["acc_tmem"].finished.slots[half].popleft()
        own["acc_tmem"].memory.array[:, half * width : (half + 1) * width] = done


def every_warp(body, with_number=False):
    for Block.warp in range(4):
        body(Block.warp) if with_number else body()


AXES = {"x": lambda: Block.number, "wg": lambda: Block.warpgroup, "warp": lambda: Block.warp}


def fori_loop(first, last, body, carry):
    for i in range(first, last):
        carry = body(np.int32(i), carry)
    return carry


LAX = types.SimpleNamespace(
    # Towards zero. What is divided by zero, as on a GPU, is not used.
    div=lambda x, y: np.int32(int(x) / int(y) if y else 0),
    rem=lambda x, y: np.int32(math.fmod(int(x), int(y)) if y else 0),
    select=lambda which, a, b: np.int32(a if which else b),
    cond=lambda which, yes, no, *given: yes(*given) if which else no(*given),
    max=max,
    min=min,
    axis_index=lambda name: np.int32(AXES[name]() if name in AXES else Block.place[name]),
    fori_loop=fori_loop,
    broadcasted_iota=lambda dtype, shape, axis: np.indices(shape, dtype)[axis],
)
JAX = types.SimpleNamespace(**vars(jax) | {"lax": LAX})
PLGPU = types.SimpleNamespace(
    ACC=acc,
    SMEM=smem_or_queue,
    Barrier=lambda **_: Spec(make=Queue),
    TMEM=lambda shape, dtype, collective: Spec(make=lambda: Total(shape, dtype)),
    CopyPartition=types.SimpleNamespace(PARTITIONED=lambda axis: axis),
    WarpMesh=lambda axis_name: None,
    BlockSpec=lambda shape, index, **_: types.SimpleNamespace(shape=shape, index=index),
    CompilerParams=lambda **_: None,
    Layout=types.SimpleNamespace(WGMMA=None, TCGEN05=None),
    LoweringSemantics=types.SimpleNamespace(Warpgroup=None),
    NDLoopInfo=None,
    SwizzleTransform=lambda swizzle: None,
    TilingTransform=lambda tiling: None,
    broadcasted_iota=lambda dtype, shape, axis, layout: np.indices(shape, dtype)[axis],
    async_load_tmem=lambda ref, layout: ref.inside().copy(),
    barrier_arrive=lambda barrier: None,
    barrier_wait=wait,
    commit_smem=lambda: None,
    copy_gmem_to_smem=copy_in,
    tcgen05_commit_arrive=finish,
    tcgen05_mma=mma,
    wait_load_tmem=lambda: None,
    warp_map=lambda body: every_warp(body, with_number=True),
    copy_smem_to_gmem=copy_out,
    emit_pipeline=emit_pipeline,
    find_swizzle=lambda bits: 128,
    kernel=kernel,
    layout_cast=lambda x, layout: x,
    nd_loop=nd_loop,
    planar_snake=helpers.planar_snake,
    transpose_ref=lambda ref, axes: ref.transpose(axes),
    wait_smem_to_gmem=lambda n, wait_read_only=False: None,
    wgmma=wgmma,
    wgmma_wait=lambda n: None,
)


def install(monkeypatch):
    """Puts the stand-ins where JAX's kernels look for the primitives."""
    own = {"run_scoped": run_scoped, "cdiv": lambda x, y: -(-x // y), "core_map": lambda mesh: every_warp}
    pl = types.SimpleNamespace(**vars(PL) | own)
    for module in (ragged_dot_mgpu, blackwell_ragged_dot_mgpu, helpers):
        monkeypatch.setattr(module, "jnp", np)
    for module in (ragged_dot_mgpu, blackwell_ragged_dot_mgpu, helpers):
        for name, stand_in in {"plgpu": PLGPU, "pl": pl, "lax": LAX, "jax": JAX}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
