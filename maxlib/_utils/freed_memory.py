"""Freed memory of the process, kept for what is computed next."""

import ctypes

_LARGEST = 2**31 - 1
# Parameters of glibc's `mallopt` (malloc.h), and their values: one heap for all threads, from which arrays of any size
# come, and which never shrinks.
_ONE_HEAP = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, _LARGEST)}


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees; call it before jax computes, in programs that train on CPUs.

    A program of XLA takes its temporary arrays from the C library and frees them at its end. glibc returns what is
    larger than 32 MiB to the system, which clears every page anew in the next step: 8 % of a step of four layers of
    512. The price is that the process does not get smaller any more, may hold the temporaries of a step twice, and has
    one heap for all threads.

    Returns:
        False where the C library has no such settings, as on macOS; then nothing changes.

    Raises:
        RuntimeError: when jax has already started its devices, whose threads have heaps of their own by then.
    """
    from jax._src import xla_bridge  # as jax.distributed.initialize does; there is no public function

    if xla_bridge.backends_are_initialized():
        raise RuntimeError("too late to keep freed memory: jax has started its devices; call this before it computes")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in _ONE_HEAP.values())
