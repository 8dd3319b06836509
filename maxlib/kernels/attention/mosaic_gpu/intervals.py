"""Order of the tiles along one row (or column): full ones first, which changes only the rounding."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from maxlib.kernels.attention.tiles import tiles as tiles


def walk(visited: Bool[Array, "B R C"], full: Bool[Array, "B R C"]) -> Int[Array, "B R 4"]:
    """Describes each row of tiles by four numbers: first visited, number visited, first full, number full.

    The full ones are the first unbroken run of full tiles. Tiles between two visited ones are visited too; intervals
    leave no such holes.
    """
    first, stop = _run(visited, whole=True)
    full_first, full_stop = _run(full, whole=False)
    return jnp.stack([first, stop - first, full_first, full_stop - full_first], axis=-1).astype(jnp.int32)


def _run(chosen, *, whole: bool):
    """Returns the first chosen column, and the index after the last one (`whole`) or after the first unbroken run."""
    columns = jnp.arange(chosen.shape[-1], dtype=jnp.int32)[None, None]
    first = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    if whole:
        return first, jnp.max(jnp.where(chosen, columns + 1, first[..., None]), axis=-1)
    behind = ~chosen & (columns >= first[..., None])
    stop = jnp.min(jnp.where(behind, columns, chosen.shape[-1]), axis=-1)
    return first, jnp.where(chosen.any(-1), stop, first)
