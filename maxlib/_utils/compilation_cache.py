"""Compiled programs on disk, so that the next process reads them instead of compiling."""

import os
from pathlib import Path
from typing import Any

import jax

MIN_SECONDS = 0.03  # programs that compile faster are not worth a file


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
