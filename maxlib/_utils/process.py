"""Settings of this process: the cache of compiled programs, and freed memory."""

import ctypes
import os
from pathlib import Path
from typing import Any

import jax

MIN_SECONDS = 0.03  # programs that compile faster are not worth a file

_LARGEST = 2**31 - 1
# Parameters of glibc's `mallopt` (malloc.h), and their values: one heap for all threads, from which arrays of any size
# come, and which never shrinks.
_ONE_HEAP = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, _LARGEST)}


def enable_compilation_cache(directory: str | Path | None = None) -> str | None:
    """Turns jax's compilation cache on, if it has no directory yet; call it before the first program is compiled.

    `training.Trainer` and the programs in `examples/` call it. jax finds a program by its text, the flags and
    devices, so that a changed program is compiled anew. Nothing is ever deleted: remove the directory to free its
    space. Whoever can write to it can run code in your processes.

    A directory that is set in jax, by `JAX_COMPILATION_CACHE_DIR` or otherwise, stays. `JAX_ENABLE_COMPILATION_CACHE=0`
    turns the cache off.

    Args:
        directory: A path or a URL (`gs://...`) that all hosts may share; by default `maxlib/compiled` in
            `$XDG_CACHE_HOME`, or in `~/.cache` without that variable.

    Returns:
        The directory in use; None if the cache is off, or the default directory cannot be made.
    """
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    if not config.jax_compilation_cache_dir:
        if directory is None:
            directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "maxlib" / "compiled"
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError:  # such as a home that is read-only
                return None
        config.update("jax_compilation_cache_dir", str(directory))
        if config.jax_persistent_cache_min_compile_time_secs == 1.0:  # jax's default
            config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)
    return config.jax_compilation_cache_dir


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
