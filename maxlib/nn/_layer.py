"""The base class of a layer in a stack."""

from typing import Any

import jax.numpy as jnp
from flax import nnx


class Layer(nnx.Module):
    """Base class of a decoder layer, `layer(x, ctx, cache) -> (x, cache, aux)`, whose sequence mixer is `self.attn`.

    A subclass defines its parts and `__call__`. Its cache is that of `attn`; a layer with several mixers, or none,
    defines its own `init_cache`.

    Attributes:
        attn: The sequence mixer.
    """

    attn: Any

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> Any:
        """Returns an empty cache for `batch` rows of up to `capacity` tokens."""
        return self.attn.init_cache(batch, capacity, dtype)
