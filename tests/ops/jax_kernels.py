"""Runs JAX's own grouped matmuls for Hopper (Mosaic GPU) on a CPU, in numpy, one block of threads after the other.

It executes JAX's functions with stand-ins for the primitives they use, to check which rows, columns and experts they
read, multiply and store: memory beyond the end of an array reads as zeros and is not written, shared memory is NaN
until it is filled, and so is a result that is not stored. Copies are done at once: synchronization is not checked.
"""

import itertools
import math
import types

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu import helpers
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

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
        array = self.memory.array
        while not isinstance(index[0] if index else slice(None), slice):  # one matrix of several
            array, index = array[int(index[0])], index[1:]
        index = (*index, *[slice(None)] * (array.ndim - len(index)))
        whole = [slice(0, n) if i == slice(None) else i for i, n in zip(index, array.shape, strict=True)]
        return Memory(array, tuple(i.start for i in whole), tuple(i.stop - i.start for i in whole))


class Spec(types.SimpleNamespace):
    """Shared memory or an accumulator, which `run_scoped` makes."""


def smem(shape, dtype, transforms=()):
    return Spec(make=lambda: Memory(np.full(shape, np.nan, dtype)))


def acc(shape, dtype=np.float32):
    return Spec(make=lambda: Memory(np.zeros(shape, dtype)))


def run_scoped(body, *specs, **named):
    return body(*(one.make() for one in specs), **{name: one.make() for name, one in named.items()})


def wgmma(total, a, b):
    assert total.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0] and a.dtype == b.dtype
    total.array[...] += a.array.astype(np.float32) @ b.array.astype(np.float32)


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
    """The block of threads that runs."""

    processor = 0


def kernel(body, *, out_type, **_):
    def launch(*arrays):
        out = Memory(np.full(out_type.shape, np.nan, out_type.dtype))
        with ONE_KERNEL, np.errstate(all="ignore"):
            for Block.processor in range(PROCESSORS):
                body(*(Memory(np.asarray(x)) for x in arrays), out)
        return out.array

    return lambda *arrays: jax.pure_callback(launch, out_type, *arrays)


LAX = types.SimpleNamespace(
    # Towards zero. What is divided by zero, as on a GPU, is not used.
    div=lambda x, y: np.int32(int(x) / int(y) if y else 0),
    rem=lambda x, y: np.int32(math.fmod(int(x), int(y)) if y else 0),
    select=lambda which, a, b: np.int32(a if which else b),
    broadcasted_iota=lambda dtype, shape, axis: np.indices(shape, dtype)[axis],
)
JAX = types.SimpleNamespace(
    **vars(jax) | {"lax": LAX, "devices": lambda: [types.SimpleNamespace(core_count=PROCESSORS)]}
)
PLGPU = types.SimpleNamespace(
    ACC=acc,
    SMEM=smem,
    BlockSpec=lambda shape, index, **_: types.SimpleNamespace(shape=shape, index=index),
    CompilerParams=lambda **_: None,
    Layout=types.SimpleNamespace(WGMMA=None),
    LoweringSemantics=types.SimpleNamespace(Warpgroup=None),
    NDLoopInfo=None,
    SwizzleTransform=lambda swizzle: None,
    TilingTransform=lambda tiling: None,
    commit_smem=lambda: None,
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
    pl = types.SimpleNamespace(**vars(PL) | {"run_scoped": run_scoped, "cdiv": lambda x, y: -(-x // y)})
    monkeypatch.setattr(ragged_dot_mgpu, "jnp", np)
    for module in (ragged_dot_mgpu, transposed_ragged_dot_mgpu):
        for name, stand_in in {"plgpu": PLGPU, "pl": pl, "lax": LAX, "jax": JAX}.items():
            monkeypatch.setattr(module, name, stand_in)
    for name, stand_in in {"jnp": np, "lax": LAX, "jax": JAX}.items():
        monkeypatch.setattr(helpers, name, stand_in)
