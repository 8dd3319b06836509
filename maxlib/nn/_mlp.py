"""Feed-forward layers. Shapes: D width of the residual stream, F width of the MLP."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.nn._linear import Einsum
from maxlib.sharding import constrain


def _constrain_hidden(h: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """Splits hidden activations `B T F` over the mesh by the rule `act_mlp`."""
    return constrain(h, "batch", "seq", "act_mlp") if h.ndim == 3 else h


class GatedMLP(nnx.Module):
    """Gated MLP `down(act(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202): SwiGLU with silu, GeGLU with gelu.

    Args:
        dim: Width D of input and output.
        mlp_dim: Hidden width F.
        act: Activation of the gate.
        bias: True adds biases to all three projections.
        rngs: Source of initial values.
    """

    def __init__(self, dim: int, mlp_dim: int, *, act: Callable = jax.nn.silu, bias: bool = False, rngs: nnx.Rngs):
        self.gate = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.up = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.down = Einsum("...F,DF->...D", (dim, mlp_dim), ("embed", "mlp"), bias=bias, rngs=rngs)
        self.act = act

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Applies the layer to each token."""
        # [..., D] -> [..., F] twice. Remat policies know both by name.
        gate, up = checkpoint_name(self.gate(x), "gate"), checkpoint_name(self.up(x), "up")
        # [..., F] -> [..., D]
        return self.down(_constrain_hidden(self.act(gate) * up))


class Fixed(nnx.Variable):
    """A stored number that is not trained."""


class XIELU(nnx.Module):
    """Activation with trained shape (Huang & Schlag 2024, arXiv:2411.13010).

    Computes `a_p x^2 + beta x` for positive `x` and `a_n (expm1(min(x, eps)) - x) + beta x` for others, where
    `a_p = softplus(alpha_p)` and `a_n = beta + softplus(alpha_n)`. All four numbers are stored; the alphas are trained.

    Args:
        a_p: Initial value of `a_p`.
        a_n: Initial value of `a_n`, more than `beta`.
        beta: Slope at zero.
        eps: Where the exponential ends, a little below zero.
    """

    def __init__(self, a_p: float = 0.8, a_n: float = 0.8, *, beta: float = 0.5, eps: float = -1e-6):
        # log(expm1(y)) is the inverse of softplus. [1] each, as files have them.
        before_softplus = lambda y: jnp.log(jnp.expm1(jnp.full(1, y, jnp.float32)))
        self.alpha_p = nnx.Param(before_softplus(a_p), axes=("norm",))
        self.alpha_n = nnx.Param(before_softplus(a_n - beta), axes=("norm",))
        self.beta, self.eps = Fixed(jnp.float32(beta), axes=()), Fixed(jnp.float32(eps), axes=())

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the function to each number, in float32, and returns the dtype of `x`."""
        x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        alphas, beta, eps = (self.alpha_p, self.alpha_n), self.beta[...], self.eps[...]
        a_p, a_n = (jax.nn.softplus(alpha[...][0].astype(x32.dtype)) for alpha in alphas)
        below = (a_n + beta) * (jnp.expm1(jnp.minimum(x32, eps)) - x32)
        return (jnp.where(x32 > 0, a_p * x32 * x32, below) + beta * x32).astype(x.dtype)


class MLP(nnx.Module):
    """MLP `down(act(up(x)))`.

    Args:
        dim: Width D of input and output.
        mlp_dim: Hidden width F.
        act: Activation.
        bias: True adds biases to both projections.
        rngs: Source of initial values.
    """

    def __init__(self, dim: int, mlp_dim: int, *, act: Callable = jax.nn.gelu, bias: bool = True, rngs: nnx.Rngs):
        self.up = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.down = Einsum("...F,DF->...D", (dim, mlp_dim), ("embed", "mlp"), bias=bias, rngs=rngs)
        self.act = act

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Applies the layer to each token."""
        # [..., D] -> [..., F] -> [..., D]
        return self.down(_constrain_hidden(self.act(checkpoint_name(self.up(x), "up"))))
