"""Runs kernels in Mosaic GPU (those of `maxlib.kernels`) on a CPU, in numpy, one block of threads after the
other.

It executes the very functions that are compiled for the GPU, with stand-ins for the few primitives they use, and is
built to find mistakes in their synchronization: warpgroups take turns at random (but the same in every run), and
whatever is asynchronous happens as late as it may. A copy into shared memory first fills its place with NaN, and brings
its data when somebody waits for it; a copy out of it reads when somebody waits for it, which has to be before the end;
a matmul reads its operands when its result is waited for. Waiting for what never
comes is an error, and so is a barrier that completes twice before a waiter has seen it.
"""

import functools
import math
import random
import threading
import types

import jax
import numpy as np
import scipy.special
from jax.extend.core import Literal

from maxlib.kernels.attention import logits as any_logits
from maxlib.kernels.attention.mosaic_gpu import backward, forward, latents, logits, memory

# ---------------------------------------------------------------------------------------------- warpgroups


ONE_KERNEL = threading.Lock()  # XLA would run those that do not depend on each other at once


class Stopped(BaseException):
    """Ends a warpgroup's thread after another one has failed."""


class Block:
    """The warpgroups of one block. Exactly one runs at any time; it hands over where it waits or arrives."""

    current = None
    order = random.Random(0)

    def __init__(self, coordinates: dict[str, int], body, count: int):
        self.coordinates, self.count, self.error = coordinates, count, None
        self.blocked = [lambda: True] * count  # what each waits for
        self.queues = [[] for _ in range(count)]  # matmuls in flight
        self.stores = [[] for _ in range(count)]  # copies to global memory in flight
        self.alive, self.running = set(range(count)), None
        self.go = [threading.Semaphore(0) for _ in range(count)]
        self.back = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self._main, args=(i, body), daemon=True) for i in range(count)]

    def _main(self, i, body):
        self.go[i].acquire()
        try:
            with np.errstate(all="ignore"):
                body()
            assert not self.stores[i], "a block ended while a copy was reading its shared memory"
        except Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        self.alive.discard(i)
        self.back.release()

    def run(self):
        Block.current = self
        for thread in self.threads:
            thread.start()
        while self.alive:
            ready = [i for i in sorted(self.alive) if self.error or self.blocked[i]()]
            if not ready:
                self.error = RuntimeError(f"deadlock: warpgroups {sorted(self.alive)} wait for ever")
                continue
            self.running = self.order.choice(ready)
            self.go[self.running].release()
            self.back.acquire()
        if self.error is not None:
            raise self.error

    def hand_over(self, until=lambda: True):
        me = self.running
        self.blocked[me] = until
        self.back.release()
        self.go[me].acquire()
        if self.error is not None:
            raise Stopped

    def finish(self, allowed: int):
        """Runs matmuls of this warpgroup until no more than `allowed` are in flight."""
        queue = self.queues[self.running]
        while len(queue) > allowed:
            queue.pop(0)()


# ---------------------------------------------------------------------------------------------- references


class Ref:
    """A view of an array; global memory is sliced when it is copied, because slices may reach beyond its end."""

    def __init__(self, array, index=None):
        self.array, self.index = array, index
        self.dtype, self.shape = array.dtype, array.shape

    @property
    def at(self):
        return _At(self)

    def __getitem__(self, index):
        return self.array[index]

    def __setitem__(self, index, value):
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        self.array[index] = value

    def read(self):
        """Loads the elements, with zeros beyond the end."""
        if self.index is None:
            return self.array
        inside, sizes = self._clipped()
        part = self.array[inside]
        return np.pad(part, [(0, size - have) for size, have in zip(sizes, part.shape, strict=True)])

    def write(self, value):
        """Stores the elements, except those beyond the end."""
        inside, _ = self._clipped()
        self.array[inside] = value[tuple(slice(n) for n in self.array[inside].shape)]

    def _clipped(self):
        index = (*self.index, *(slice(None),) * (self.array.ndim - len(self.index)))
        sizes = [
            n if i == slice(None) else i.stop - i.start
            for i, n in zip(index, self.array.shape, strict=True)
            if isinstance(i, slice)
        ]
        return index, sizes


class _At:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        if isinstance(self.ref, Global):
            return Ref(self.ref.array, index if isinstance(index, tuple) else (index,))
        return Ref(self.ref.array[index])


class Global(Ref):
    pass


class Spec:
    """Shared memory to be allocated, full of NaN (or of the largest integer)."""

    def __init__(self, shape, dtype, transforms=()):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.bytes = math.prod(self.shape) * self.dtype.itemsize

    def make(self, raw=None):
        raw = np.zeros(self.bytes, np.uint8) if raw is None else raw
        array = raw[: self.bytes].view(self.dtype).reshape(self.shape)
        poison(array)
        return Ref(array)


class Union:
    def __init__(self, *specs):
        self.specs = specs

    def make(self):
        raw = np.zeros(max(spec.bytes for spec in self.specs), np.uint8)
        return [spec.make(raw) for spec in self.specs]


def poison(array):
    array[...] = np.nan if array.dtype.kind in "fV" else np.iinfo(array.dtype).max


class Barriers:
    """Barriers that complete a phase with every `num_arrivals` arrivals; each warpgroup waits for phase after phase."""

    def __init__(self, num_barriers=1, num_arrivals=1):
        self.count, self.arrivals = num_barriers, num_arrivals

    def make(self):
        return [Barrier(self.arrivals) for _ in range(self.count)]


class Barrier:
    def __init__(self, arrivals):
        self.arrivals, self.arrived, self.seen, self.copies = arrivals, 0, {}, []

    def arrive(self):
        self.arrived += 1

    def wait(self):
        block = Block.current
        phase = self.seen.get(block.running, 0)
        done = lambda: self.arrived // self.arrivals
        if done() <= phase:
            block.hand_over(until=lambda: done() > phase)
        assert done() == phase + 1, "a barrier completed twice before a waiter had seen it"
        self.seen[block.running] = phase + 1
        for copy in self.copies:
            copy()
        self.copies.clear()


def allocate(spec):
    if hasattr(spec, "make"):
        made = spec.make()
        return types.SimpleNamespace(at=made) if isinstance(spec, Barriers) else made
    if isinstance(spec, tuple):
        parts = [allocate(part) for part in spec]
        return type(spec)(*parts) if hasattr(spec, "_fields") else tuple(parts)
    return spec


# ---------------------------------------------------------------------------------------------- primitives


class Accumulator:
    def __init__(self, value):
        self.value, self.shape = value, value.shape

    def __setitem__(self, index, value):
        self.value = value

    def __getitem__(self, index):
        Block.current.finish(0)
        return self.value


class Acc:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype

    @staticmethod
    def init(value):
        return Accumulator(value)


def run_scoped(body, *specs):
    return body(*(Accumulator(np.zeros(spec.shape, spec.dtype)) for spec in specs))


def run_state(body):
    def run(accumulators):
        body(accumulators)
        return tuple(acc[...] for acc in accumulators)

    return run


def wgmma(acc, a, b):
    assert acc.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0] and a.dtype == b.dtype

    def multiply():
        left = a.array if isinstance(a, Ref) else a
        acc.value = acc.value + left.astype(np.float32) @ b.array.astype(np.float32)

    Block.current.queues[Block.current.running].append(multiply)


def accumulator_load(acc, wait_n):
    Block.current.finish(wait_n)
    return acc.value


def copy_in(source, target, barrier):
    data = source.read()
    assert data.shape == target.shape and data.dtype == target.dtype
    poison(target.array)

    def arrive():
        target.array[...] = data

    barrier.copies.append(arrive)
    barrier.arrive()
    Block.current.hand_over()


def copy_out(source, target):
    """Reads shared memory only when somebody waits for the copy."""
    Block.current.stores[Block.current.running].append(lambda: target.write(source.array))


def wait_for_stores(n, wait_read_only=False):
    stores = Block.current.stores[Block.current.running]
    while len(stores) > n:
        stores.pop(0)()


def arrive(barrier):
    barrier.arrive()
    Block.current.hand_over()


def when(condition):
    return lambda body: body() if condition else None


def loop(first, last):
    return lambda body: [body(i) for i in range(int(first), int(last))] and None


def fori_loop(first, last, body, carry):
    for i in range(int(first), int(last)):
        carry = body(np.int32(i), carry)
    return carry


def axis_index(name):
    block = Block.current
    return np.int32(block.running if name == "warpgroup" else block.coordinates[name])


def broadcast_in_dim(x, shape, dimensions):
    return np.broadcast_to(np.expand_dims(x, [a for a in range(len(shape)) if a not in dimensions]), shape)


def iota(dtype, shape, dimension, layout=None):
    return broadcast_in_dim(np.arange(shape[dimension], dtype=dtype), shape, [dimension])


def kernel(body, *, out_type, scratch_types, grid, grid_names, num_threads, **_):
    """Any number of blocks in any order: here in the order of the grid."""
    many = isinstance(out_type, (tuple, list))

    def launch(*arrays):
        with ONE_KERNEL:
            return run_all(*arrays)

    def run_all(*arrays):
        inputs = jax.tree.map(lambda x: Global(np.asarray(x)), arrays)
        made = [np.full(x.shape, np.nan, x.dtype) for x in (out_type if many else [out_type])]
        for place in np.ndindex(*grid):
            scratch = [allocate(spec) for spec in scratch_types]
            run = functools.partial(body, *inputs, *map(Global, made), *scratch)
            Block(dict(zip(grid_names, place, strict=True)), run, num_threads).run()
        return tuple(made) if many else made[0]

    return lambda *arrays: jax.pure_callback(launch, out_type, *arrays)


ELEMENTWISE = {
    "add": np.add,
    "broadcast_in_dim": lambda x, shape, **_: np.broadcast_to(x, shape),
    "convert_element_type": lambda x, new_dtype, **_: np.asarray(x, new_dtype),
    "div": np.divide,
    "exp": np.exp,
    "integer_pow": lambda x, y: x**y,
    "logistic": scipy.special.expit,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "sub": np.subtract,
    "tanh": np.tanh,
}


def in_numpy(fn):
    """An elementwise function of jax, computed by numpy on numpy's arrays: inside a callback jax may not compute."""
    return lambda *args: _evaluate(jax.make_jaxpr(fn)(*args), args) if isinstance(args[0], np.ndarray) else fn(*args)


def _evaluate(closed, args):
    values = dict(zip(closed.jaxpr.invars, args, strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for eqn in closed.jaxpr.eqns:
        operands, params = [read(atom) for atom in eqn.invars], eqn.params
        if "jaxpr" in params:
            values[eqn.outvars[0]] = _evaluate(params["jaxpr"], operands)
        else:
            attributes = {name: params[name] for name in ("y", "shape", "new_dtype") if name in params}
            values[eqn.outvars[0]] = ELEMENTWISE[eqn.primitive.name](*operands, **attributes)
    return read(closed.jaxpr.outvars[0])


REDUCED = types.SimpleNamespace(reduce=lambda axis: None)
PLGPU = types.SimpleNamespace(
    SMEM=Spec,
    RefUnion=Union,
    Barrier=Barriers,
    TilingTransform=lambda tiling: None,
    SwizzleTransform=lambda swizzle: None,
    Layout=types.SimpleNamespace(WGMMA=REDUCED),
    WGMMAAccumulatorRef=Acc,
    set_max_registers=lambda count, action: None,
    layout_cast=lambda x, layout: x,
    broadcasted_iota=iota,
    copy_gmem_to_smem=copy_in,
    copy_smem_to_gmem=copy_out,
    commit_smem=lambda: None,
    wait_smem_to_gmem=wait_for_stores,
    barrier_wait=lambda barrier: barrier.wait(),
    barrier_arrive=arrive,
    wgmma=wgmma,
    wgmma_wait=lambda n: Block.current.finish(n),
    wgmma_accumulator_load=accumulator_load,
)


def multiple_of(x, n):
    assert x % n == 0, f"{x} was said to be a multiple of {n}"
    return x


PL = types.SimpleNamespace(
    when=when,
    loop=loop,
    ds=lambda i, n: slice(int(i), int(i) + n),
    multiple_of=multiple_of,
    run_scoped=run_scoped,
    run_state=run_state,
)
LAX = types.SimpleNamespace(
    axis_index=axis_index,
    rem=lambda x, y: np.int32(x % y),
    div=lambda x, y: np.int32(x // y),
    fori_loop=fori_loop,
    slice=lambda x, start, stop: x[tuple(map(slice, start, stop))],
    broadcast_in_dim=broadcast_in_dim,
    optimization_barrier=lambda x: x,
)
COMPAT = types.SimpleNamespace(
    load=lambda ref, layout: ref.read() if ref.index else ref.array.copy(),
    transpose=lambda ref: Ref(ref.array.T),
    number=lambda value: value,
    compiler_params=lambda: None,
    kernel=kernel,
)


def install(monkeypatch, *modules):
    """Puts the stand-ins where the kernels of attention, or of these modules, look for the primitives."""
    for module in (any_logits, memory, *(modules or (forward, backward, latents, logits))):
        for name, stand_in in {"plgpu": PLGPU, "pl": PL, "lax": LAX, "_compat": COMPAT, "jnp": np}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
