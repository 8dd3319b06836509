"""What all kernels do with a tile of raw products of queries and keys."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

LOWEST = float(jnp.finfo(jnp.float32).min)  # in place of -inf where two infinities would be subtracted
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Logits:
    """How raw products become logits, in base 2: `factor` times what `bend` gives. `scale` must be positive."""

    scale: float
    softcap: float | None = None

    @property
    def factor(self) -> float:
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)

    def bend(self, products):
        """The soft-cap's curve, in units of the cap."""
        return products if self.softcap is None else jnp.tanh(products * (self.scale / self.softcap))

    def slope(self, bent, weights):
        """`weights` times the derivative of the logits by the products, over `scale`."""
        return weights if self.softcap is None else weights * (1.0 - bent * bent)


def hide(bent, start, end, first_key, axis: int):
    """`-inf` where a key is not seen; keys run along `axis`, `start` and `end` along the other one."""
    key = first_key + lax.broadcasted_iota(jnp.int32, bent.shape, axis)
    return jnp.where((start <= key) & (key < end), bent, -jnp.inf)


def dot(a, b, axis_a: int, axis_b: int):
    """A matmul over these axes, summed in float32."""
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)
