"""Gated residual streams (Qwen3.8-Flash-Next 2026): a residual in several copies, which every branch reads through a
gate of each channel, and adds to by a weight of each stream.

Shapes: B rows, T tokens, n streams, D width.
"""

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.nn._linear import Einsum
from maxlib.nn.norm import GroupRMSNorm
from maxlib.sharding import constrain


class GatedResidual(nnx.Module):
    """Streams of one branch: `x_i <- x_i + inject_i branch(mean_j gate_j norm(x_j))`.

    Of the normed streams, a product of two narrow matrices gives the gate of each channel of each stream (a sigmoid),
    and a matrix gives `inject` (twice a sigmoid). Streams are not mixed with each other.

        streams = nn.GatedResidual(64, streams=4, rank=8, rngs=nnx.Rngs(0))
        mlp = nn.GatedMLP(64, 128, rngs=nnx.Rngs(1))
        x = jnp.ones((2, 8, 4, 64))  # B T n D
        h, inject = streams.read(x)
        x = streams.write(x, mlp(h), inject, "mlp")

    Args:
        dim: Width D of a stream.
        streams: Number n of streams.
        rank: Width between the two matrices of the gate.
        norm_eps: Epsilon of the norm.
        writes: False for streams that are only read, `h = streams(x)`, before the head.
        rngs: Source of initial values.
    """

    def __init__(
        self, dim: int, *, streams: int = 4, rank: int, norm_eps: float = 1e-6, writes: bool = True, rngs: nnx.Rngs
    ):
        width = streams * dim
        self.norm = GroupRMSNorm(width, groups=streams, eps=norm_eps, plus_one=True)
        self.down = Einsum("...D,RD->...R", (rank, width), ("rank", "embed"), rngs=rngs)
        self.up = Einsum("...R,DR->...D", (width, rank), ("embed", "rank"), rngs=rngs)
        self.inject = Einsum("...D,ND->...N", (streams, width), ("stream", "embed"), rngs=rngs) if writes else None
        self.streams = streams

    def __call__(self, x: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
        """Returns the gated mean of the normed streams."""
        return self._read(x)[0]

    def read(self, x: Float[Array, "B T n D"]) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the input of the branch, and the weights of its output in the streams."""
        # Cheap to compute again; kept for the backward pass, it would take several times the memory of the streams.
        return jax.checkpoint(type(self)._read, prevent_cse=False)(self, x)

    def _read(self, x: Float[Array, "B T n D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T n"] | None]:
        normed = self.norm(x.reshape(*x.shape[:2], -1))
        gate = jax.nn.sigmoid(self.up(jax.nn.silu(self.down(normed) / self.streams)))
        # [B, T, n * D] -> [B, T, n, D] -> [B, T, D]
        h = constrain((gate * normed).reshape(x.shape).mean(axis=2), "batch", "seq", "act_embed")
        return h, None if self.inject is None else 2 * jax.nn.sigmoid(self.inject(normed) / self.streams)

    def write(
        self, x: Float[Array, "B T n D"], h: Float[Array, "B T D"], inject: Float[Array, "B T n"], name: str
    ) -> Float[Array, "B T n D"]:
        """Adds the output of the branch.

        Args:
            x: The streams that `read` got.
            h: The output of the branch.
            inject: From `read`.
            name: Name of `h` for remat policies, "attn" or "mlp".
        """
        h = checkpoint_name(h, name)
        # [B, T, n, 1] * [B, T, 1, D]
        x = constrain(x + inject[..., None] * h[:, :, None], "batch", "seq", None, "act_embed")
        return checkpoint_name(x, "resid_mid") if name == "attn" else x
