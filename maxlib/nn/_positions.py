"""Learned positions: a table of trained vectors, which ends where training did."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib.nn._context import Context
from maxlib.nn._linear import Init, draw_key
from maxlib.sharding import constrain


class LearnedPositions(nnx.Module):
    """A trained vector for each of the first `length` positions of a document, added to the token vectors (GPT-2).

    Args:
        length: Number of positions.
        dim: Width D of a vector.
        init: Initializer, by default normal with standard deviation 0.02.
        rngs: Source of initial values.
    """

    def __init__(self, length: int, dim: int, *, init: Init | None = None, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02) if init is None else init
        self.w = nnx.Param(init(draw_key(rngs), (length, dim), jnp.float32), axes=("position", "embed"))
        self.length = length

    def __call__(self, ctx: Context, *, dtype: Any = jnp.bfloat16) -> Float[Array, "B T D"]:
        """Returns the vectors of `ctx.positions` in `dtype`.

        Positions given explicitly, and documents of a packed row, are checked outside jit; inside, those beyond the
        table become NaN.

        Raises:
            ValueError: when a row or a cache is longer than the table.
        """
        self.check(ctx.rope_length or 0)
        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            self.check(int(ctx.positions.max()) + 1)
        # The table is small: gathered over the width, so that the lookup needs no exchange. [B, T] -> [B, T, D]
        w = constrain(self.w[...], "position", None)
        return jnp.asarray(jnp.take(w, ctx.positions, axis=0, mode="fill"), dtype)

    def check(self, length: int) -> None:
        """Raises ValueError if `length` tokens need positions that the table lacks."""
        if length > self.length:
            raise ValueError(
                f"this model has learned {self.length} positions, which {length} tokens (of a row, or the capacity of a "
                "cache) exceed: shorten the text, or give generation a smaller capacity"
            )
