"""The base class of a layer in a stack, and the residual stream between its sublayers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.sharding import constrain


class Layer(nnx.Module):
    """Base class of a decoder layer, `layer(x, ctx, cache) -> (x, cache, aux)`, whose sequence mixer is `self.attn`.

    A subclass defines its sublayers and `__call__`. Its cache is that of `attn`; a layer with several mixers, or none,
    defines its own `init_cache`.

    Attributes:
        attn: The sequence mixer.
    """

    attn: Any

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> Any:
        """Returns an empty cache for `batch` rows of up to `capacity` tokens."""
        return self.attn.init_cache(batch, capacity, dtype)


def residual(
    x: Float[Array, "B T D"],
    h: Float[Array, "B T D"],
    name: str,
    *,
    norm: Callable[[Array], Array] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T D"]:
    """Adds the output of a sublayer to the residual stream: `x + scale * norm(h)`, sharded as layers expect it.

    Args:
        x: The residual stream.
        h: The output of a sublayer, such as attention.
        name: Name of `h` for remat policies: "attn", "mlp", or one of your own (`nn.remat`).
        norm: Norm of `h` before it is added; None for none.
        scale: Factor on `h`; None for 1.
    """
    h = checkpoint_name(h, name)
    h = h if norm is None else norm(h)
    return constrain(x + (h if scale is None else scale * h), "batch", "seq", "act_embed")
