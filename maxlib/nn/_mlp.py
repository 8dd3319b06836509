"""Feed-forward layers. Shapes: D width of the residual stream, F width of the MLP."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.nn._linear import Einsum, of_same
from maxlib.sharding import constrain


def _constrain_hidden(h: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """Splits hidden activations `B T F` over the mesh by the rule `act_mlp`."""
    return constrain(h, "batch", "seq", "act_mlp") if h.ndim == 3 else h


def check_act(act: Any) -> Callable:
    """Returns the activation; raises TypeError for one that is not a function, such as its name."""
    if not callable(act):
        raise TypeError(f"act must be a function, such as jax.nn.gelu, got {act!r:.80}")
    return act


class GatedMLP(nnx.Module):
    """Gated MLP `down(act(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202): SwiGLU with silu, GeGLU with gelu.

        mlp = nn.GatedMLP(64, 256, rngs=nnx.Rngs(0))
        y = mlp(jnp.ones((2, 8, 64)))  # B T D

    Args:
        dim: Width D of input and output.
        mlp_dim: Hidden width F.
        act: Activation of the gate, such as `jax.nn.gelu`.
        bias: True adds biases to all three projections.
        limit: Clips the gate from above, and up to `[-limit, limit]` (DeepSeek V4); None for no limit.
        rngs: Source of initial values.

    Raises:
        TypeError: when `act` is not a function.
    """

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        act: Callable = jax.nn.silu,
        bias: bool = False,
        limit: float | None = None,
        rngs: nnx.Rngs,
    ):
        self.gate = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.up = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.down = Einsum("...F,DF->...D", (dim, mlp_dim), ("embed", "mlp"), bias=bias, rngs=rngs)
        self.act, self.limit = check_act(act), limit

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Applies the layer to each token."""
        # [..., D] -> [..., F] twice. Remat policies know both by name.
        gate, up = of_same(x, self.gate, self.up)
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        # The hidden values are cheap to compute again. With `down` in the checkpoint, its gradient does not keep them
        # either. Its matmul is not computed again, because the backward pass does not need the result.
        return jax.checkpoint(self._down, prevent_cse=False)(gate, up)

    def _down(self, gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... D"]:
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        # [..., F] -> [..., D]
        return self.down(_constrain_hidden(self.act(gate) * up))


class MLP(nnx.Module):
    """MLP `down(act(up(x)))`.

        mlp = nn.MLP(64, 256, act=jax.nn.gelu, rngs=nnx.Rngs(0))
        y = mlp(jnp.ones((2, 8, 64)))  # B T D

    Args:
        dim: Width D of input and output.
        mlp_dim: Hidden width F.
        act: Activation, such as `jax.nn.silu`.
        bias: True adds biases to both projections.
        rngs: Source of initial values.

    Raises:
        TypeError: when `act` is not a function.
    """

    def __init__(self, dim: int, mlp_dim: int, *, act: Callable = jax.nn.gelu, bias: bool = True, rngs: nnx.Rngs):
        self.up = Einsum("...D,FD->...F", (mlp_dim, dim), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.down = Einsum("...F,DF->...D", (dim, mlp_dim), ("embed", "mlp"), bias=bias, rngs=rngs)
        self.act = check_act(act)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Applies the layer to each token."""
        # [..., D] -> [..., F] -> [..., D]
        return self.down(_constrain_hidden(self.act(checkpoint_name(self.up(x), "up"))))
