"""Scale and soft-cap of logits, as the kernels apply them to a tile of raw products of queries and keys."""

import dataclasses
import math

import jax.numpy as jnp

LOWEST = float(jnp.finfo(jnp.float32).min)  # in place of -inf where two infinities would be subtracted
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Logits:
    """Map from raw products `q k` to logits: `scale * q k`, or `softcap * tanh(scale * q k / softcap)`.

    Kernels keep unscaled logits `bent` and a maximum `max2` in base 2, so that `exp(logit - max)` is
    `exp2(factor * bent - max2)`: one multiply-add and the hardware's exponential.

    Args:
        scale: Factor on the products; positive.
        softcap: Bound of the logits, or None.
    """

    scale: float
    softcap: float | None = None

    @property
    def factor(self) -> float:
        """Returns the factor from `bend`'s result to logits in base 2."""
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)

    def bend(self, products):
        """Applies the soft-cap's tanh, without multiplying by the cap; without a soft-cap returns the products."""
        return products if self.softcap is None else jnp.tanh(products * (self.scale / self.softcap))

    def slope(self, bent, weights):
        """Multiplies `weights` by the derivative of the logits with respect to the products, divided by `scale`."""
        # d/dx [c tanh(s x / c)] = s (1 - tanh^2)
        return weights if self.softcap is None else weights * (1.0 - bent * bent)
