"""The base class of a layer in a stack, and its residual connection."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.sharding import constrain


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


def residual(
    x: Float[Array, "B T D"],
    h: Float[Array, "B T D"],
    name: str,
    *,
    norm: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]] | None = None,
) -> Float[Array, "B T D"]:
    """Adds the output of a branch to the residual stream, placed over the mesh as layers expect it.

    Args:
        x: The stream.
        h: The output of an attention or of the MLP.
        name: Name of `h` for remat policies: "attn", "cross_attn" or "mlp".
        norm: A norm of `h` after the branch; policies keep what it reads.
    """
    h = checkpoint_name(h, name)
    x = constrain(x + (h if norm is None else norm(h)), "batch", "seq", "act_embed")
    return checkpoint_name(x, "resid_mid") if name == "attn" else x
