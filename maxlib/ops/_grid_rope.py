"""Rotary embedding of image patches by row and column."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from maxlib.ops._rope import Lengths, Rope


@dataclass(frozen=True)
class GridRope:
    """Rotary embedding of a square of `side` x `side` patches, numbered row by row (Llama 4's image encoder).

    The first half of the pairs rotates by the patch's column, the second by its row, both counted from 1. Tokens after
    the last patch (a class token) are not rotated.

    Args:
      dim: number of rotary dimensions, a multiple of 4.
      side: number of patches along each side of the image.
      theta: base of the frequencies.
      interleaved: layout of the pairs, as in `Rope`.

    Raises:
      ValueError: when `dim` is not a multiple of 4 or `side` is below 1.
    """

    dim: int
    side: int
    theta: float = 10_000.0
    interleaved: bool = True
    needs_length: ClassVar[bool] = False  # as in `Rope`

    def __post_init__(self):
        if self.dim % 4 or self.side < 1:
            raise ValueError(
                f"GridRope.dim must be a multiple of 4 (pairs for columns and for rows) and side at least 1, got {self}."
            )

    @property
    def max_length(self) -> None:
        """Is None: patches beyond the grid are not rotated."""
        return None

    def tables(
        self, positions: Int[Array, "B T"] | Int[np.ndarray, "B T"], *, length: Lengths | None = None
    ) -> tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]:
        """Returns the cosine and sine of every pair's angle, as `Rope.tables` does.

        Args:
          positions: index of each patch, counted row by row from 0.
          length: ignored; present for the signature of `Rope.tables`.
        """
        positions = jnp.asarray(positions)
        inside = positions < self.side**2  # False for a class token: angle 0, no rotation
        column, row = (jnp.where(inside, n + 1, 0) for n in (positions % self.side, positions // self.side))
        axis = Rope(self.dim // 2, self.theta)
        # Two embeddings of dim / 2 dimensions each: [B, T, half / 2] by column and [B, T, half / 2] by row.
        (cos_x, sin_x), (cos_y, sin_y) = axis.tables(column), axis.tables(row)
        return jnp.concatenate([cos_x, cos_y], axis=-1), jnp.concatenate([sin_x, sin_y], axis=-1)
