"""How a layer multiplies its weight: a part of the layer, so that another one may take its place."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib import ops


@runtime_checkable
class Matmul(Protocol):
    """Products of activations and a stored weight, whose matrix is `w[...]`: a Param, an array or a `QuantizedWeight`.

    One must be hashable and compare by value: it is part of the layer's structure.
    """

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]: ...

    def grouped(self, rows: Float[Array, "M I"], w: Any, rows_per_expert: Int[Array, " E"]) -> Float[Array, "M O"]:
        """See `ops.grouped_matmul`."""
        ...


@dataclasses.dataclass(frozen=True)
class Exact:
    """In the dtype of the activations: weights follow them."""

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        return jnp.einsum(spec, x, jnp.asarray(w[...], x.dtype))

    def grouped(self, rows: Float[Array, "M I"], w: Any, rows_per_expert: Int[Array, " E"]) -> Float[Array, "M O"]:
        return ops.grouped_matmul(rows, w, rows_per_expert)
