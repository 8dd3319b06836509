"""Launches Triton kernels of flash-linear-attention from JAX; imports them when they are first called."""

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a kernel is compiled.

    Args:
      warps: warps of a block of threads.
      stages: stages of its loops' pipelines.
      BK: channels of keys in a tile, where a kernel asks for it.
      BV: channels of values in a tile, likewise.
    """

    warps: int
    stages: int
    BK: int = 64
    BV: int = 64


def launch(kernel: Any, grid: tuple[int, ...], tile: Tile, out: dict[str, jax.ShapeDtypeStruct], **given: Any) -> Any:
    """Runs a kernel.

    Args:
      kernel: kernel of the package, with its decorators for tuning, which are left out.
      grid: blocks of threads.
      tile: how it is compiled.
      out: the arrays that it writes, by the names of its parameters, in their order.
      given: its other arguments, and sizes, of which a kernel need not take all. Pointers that are not given are None,
        as in the package.

    Returns:
      A tuple of the arrays that it writes.
    """
    import jax_triton

    # The package's decorators would time every tile that it lists, with PyTorch's tensors.
    flags, function = _undecorated(kernel)
    names = inspect.signature(function.fn).parameters
    given = {name: x for name, x in given.items() if name in names}
    # What a kernel does not annotate as a constant is a pointer or a number; those left out are pointers.
    pointers = [name for name, one in names.items() if one.annotation is inspect.Parameter.empty]
    given |= {name: None for name in pointers if name not in given and name not in out}
    given |= {name: size for name, size in (("BK", tile.BK), ("BV", tile.BV)) if name in names and name not in given}
    # The package's decorators derive constants, such as USE_INITIAL_STATE, from which pointers are None.
    given |= {name: flag(given | out) for name, flag in flags.items()}
    return jax_triton.triton_call(
        kernel=function,
        out_type=tuple(out[name] for name in names if name in out),
        grid=grid,
        name=function.fn.__name__,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **given,
    )


def _undecorated(kernel: Any) -> tuple[dict[str, Callable[[dict[str, Any]], Any]], Any]:
    """Returns a kernel without its decorators, and the constants that these compute."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    flags: dict[str, Callable[[dict[str, Any]], Any]] = {}
    while isinstance(kernel, Autotuner | Heuristics):
        flags |= kernel.values if isinstance(kernel, Heuristics) else {}
        kernel = kernel.fn
    return flags, kernel


def over_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of arrays whose first axis is rows so that `jax.vmap` gives it more rows."""
    wrapped = jax.custom_batching.custom_vmap(run)

    @wrapped.def_vmap
    def _(size: int, is_batched: Any, *arrays: Any):
        def join(x: jax.Array, batched: bool) -> jax.Array:
            x = x if batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        # A function of rows does not mix them, so that rows of all mapped calls can stand in one array.
        out = wrapped(*jax.tree.map(join, arrays, tuple(is_batched)))
        split = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return split, jax.tree.map(lambda _: True, out)

    return wrapped


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides the package's warning that Triton supports no GPU here: PyTorch need not see the one that JAX uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        yield


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Describes an array that a kernel writes."""
    return jax.ShapeDtypeStruct(shape, dtype)
