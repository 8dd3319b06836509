"""Per-layer embeddings: a small vector of each token for every layer (Gemma 3n and 4).

Shapes: B rows, T tokens, D width of the residual stream, L layers, P width of a small vector.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib.nn._initial_values import normal
from maxlib.nn._linear import Einsum, Embed
from maxlib.nn.norm import RMSNorm
from maxlib.ops import geglu
from maxlib.sharding import constrain


class PerLayerEmbed(nnx.Module):
    """Small vectors of a token, one for each layer: `(table[id] + norm(proj(x))) / sqrt(2)`.

    They are `layer_inputs` of a stack: a decoder computes them once, and the scan passes each layer its own.

    Args:
        vocab: Number of tokens in the table.
        dim: Width D of the residual stream.
        num_layers: Number L of layers.
        per_layer_dim: Width P of a vector.
        eps: Of the norm.
        rngs: Source of initial values.
    """

    def __init__(self, vocab: int, dim: int, num_layers: int, per_layer_dim: int, *, eps: float = 1e-6, rngs: nnx.Rngs):
        # The table has standard deviation P^-0.5, so that sqrt(P) times a row has variance one.
        wide, init = num_layers * per_layer_dim, normal(per_layer_dim**-0.5)
        self.embed = Embed(vocab, wide, init=init, rngs=rngs)
        self.proj = Einsum("...D,RD->...R", (wide, dim), ("per_layer", "embed"), rngs=rngs)
        self.norm = RMSNorm(per_layer_dim, eps=eps)
        self.num_layers, self.dim = num_layers, per_layer_dim

    def __call__(self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"]) -> Float[Array, "L B T P"]:
        """Returns the vectors of all layers.

        Args:
            x: Token vectors, before the first layer.
            tokens: Ids.
        """

        def apart(y: Array) -> Array:
            # [B, T, L P] -> [B, T, L, P] -> [L, B, T, P]
            return jnp.moveaxis(y.reshape(*tokens.shape, self.num_layers, self.dim), 2, 0)

        # Each of the two has variance one, and so has their sum over sqrt(2).
        by_id = apart(self.embed(tokens, dtype=x.dtype) * self.dim**0.5)
        by_vector = self.norm(apart(self.proj(x) * x.shape[-1] ** -0.5))
        return constrain((by_id + by_vector) * 2**-0.5, None, "batch", "seq", None)


class PerLayerGate(nnx.Module):
    """Adds a layer's small vector to the residual stream through a gate: `norm(proj(gelu(gate(x)) * vector))`.

    Args:
        dim: Width D of the residual stream.
        per_layer_dim: Width P of a vector.
        eps: Of the norm.
        rngs: Source of initial values.
    """

    def __init__(self, dim: int, per_layer_dim: int, *, eps: float = 1e-6, rngs: nnx.Rngs):
        D, P = dim, per_layer_dim
        self.gate = Einsum("...D,PD->...P", (P, D), ("per_layer", "embed"), rngs=rngs)
        self.proj = Einsum("...P,DP->...D", (D, P), ("embed", "per_layer"), rngs=rngs)
        self.norm = RMSNorm(D, eps=eps)

    def __call__(self, x: Float[Array, "B T D"], vector: Float[Array, "B T P"]) -> Float[Array, "B T D"]:
        """Returns the update of the residual stream `x`."""
        # [B, T, D] -> [B, T, P] -> [B, T, D]
        return self.norm(self.proj(geglu(self.gate(x), vector)))
