"""Rotary embedding of what has a place in an image instead of one in a sequence."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from maxlib.ops._rope import Lengths, Rope


@dataclass(frozen=True)
class GridRope:
    """Rotary embedding of a square of `side` x `side` patches that are numbered row by row (Llama 4's image encoder).

    The first half of the pairs turns by the patch's column, the second by its row, both counted from 1. Tokens behind
    the last patch (a class token) are not turned. Raises ValueError when `dim` is no multiple of 4.
    """

    dim: int
    side: int
    theta: float = 10_000.0
    interleaved: bool = True

    def __post_init__(self):
        if self.dim % 4 or self.side < 1:
            raise ValueError(
                f"GridRope.dim must be a multiple of 4 (pairs for columns and for rows) and side at least 1, got {self}."
            )

    def tables(
        self, positions: Int[Array, "B T"] | Int[np.ndarray, "B T"], *, length: Lengths | None = None
    ) -> tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]:
        """Cosine and sine of every pair's angle, as `Rope.tables`; `length` changes nothing."""
        positions = jnp.asarray(positions)
        inside = positions < self.side**2
        column, row = (jnp.where(inside, n + 1, 0) for n in (positions % self.side, positions // self.side))
        axis = Rope(self.dim // 2, self.theta)
        (cos_x, sin_x), (cos_y, sin_y) = axis.tables(column), axis.tables(row)
        return jnp.concatenate([cos_x, cos_y], axis=-1), jnp.concatenate([sin_x, sin_y], axis=-1)
