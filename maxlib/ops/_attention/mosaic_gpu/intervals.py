"""How the kernels walk along one row (or column) of tiles: full ones first, which changes nothing but the rounding."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from maxlib.ops._attention.tiles import tiles as tiles


def walk(visited: Bool[Array, "B R C"], full: Bool[Array, "B R C"]) -> Int[Array, "B R 4"]:
    """For each row of tiles: first visited, number visited, first full, number full (of the first run of full ones).

    What lies between two visited tiles is visited too. All intervals at hand leave no such holes.
    """
    first, stop = _run(visited, whole=True)
    full_first, full_stop = _run(full, whole=False)
    return jnp.stack([first, stop - first, full_first, full_stop - full_first], axis=-1).astype(jnp.int32)


def _run(chosen, *, whole: bool):
    """From the first chosen column to behind the last (`whole`), or to behind the end of the first unbroken run."""
    columns = jnp.arange(chosen.shape[-1], dtype=jnp.int32)[None, None]
    first = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    if whole:
        return first, jnp.max(jnp.where(chosen, columns + 1, first[..., None]), axis=-1)
    behind = ~chosen & (columns >= first[..., None])
    stop = jnp.min(jnp.where(behind, columns, chosen.shape[-1]), axis=-1)
    return first, jnp.where(chosen.any(-1), stop, first)
