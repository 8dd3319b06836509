"""How kernels make logits of the raw products of queries and keys, a tile at a time."""

import dataclasses
import math

import jax.numpy as jnp

LOWEST = float(jnp.finfo(jnp.float32).min)  # in place of -inf where two infinities would be subtracted
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Logits:
    """How raw products become logits. `scale` must be positive.

    Logits are kept in base 2 and unscaled: `exp(logit - max)` is `exp2(factor * bent - max2)`, one multiply-add.
    """

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
