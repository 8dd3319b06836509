"""Residuals in several copies, which every branch reads and writes: manifold-constrained hyper-connections (Xie et al.
2026; DeepSeek V4), with weights that depend on the token, and gated residual streams (Qwen3.8-Flash-Next 2026), with a
gate of each channel and a weight of each stream.

Shapes: B rows, T tokens, n streams, D width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
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


@pytree
class StreamMix:
    """How a branch returns to the streams, in float32.

    Attributes:
        post: Weight of the branch's output in each stream, `B T n`.
        comb: Weight of stream j in the new stream i, `B T n n` by j and i; rows and columns sum to 1.
    """

    post: Float[Array, "B T n"]
    comb: Float[Array, "B T n n"]


class HyperConnection(nnx.Module):
    """Hyper-connection of one branch: `x_i <- post_i branch(sum_j pre_j x_j) + sum_j comb_ji x_j`.

    A norm without weight and one matrix over all streams give `pre` (a sigmoid), `post` (twice a sigmoid) and `comb`, a
    matrix that Sinkhorn's iterations make doubly stochastic, so that mixing neither grows nor shrinks the streams.

        connection = nn.HyperConnection(64, streams=4, rngs=nnx.Rngs(0))
        mlp = nn.GatedMLP(64, 128, rngs=nnx.Rngs(1))
        x = jnp.ones((2, 8, 4, 64))  # B T n D
        h, mix = connection.read(x)
        x = connection.write(x, mlp(h), mix, "mlp")

    Args:
        dim: Width D of a stream.
        streams: Number n of streams.
        sinkhorn_steps: Number of Sinkhorn's iterations.
        eps: Added to `pre`, to `comb` before the iterations, and to each sum in them.
        norm_eps: Epsilon of the norm.
        rngs: Source of initial values.
    """

    def __init__(
        self,
        dim: int,
        *,
        streams: int = 4,
        sinkhorn_steps: int = 20,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        rngs: nnx.Rngs,
    ):
        outputs = (2 + streams) * streams  # pre, post and comb
        self.mix = Einsum("...D,MD->...M", (outputs, streams * dim), ("stream", "embed"), rngs=rngs)
        self.scale = nnx.Param(jnp.ones(3), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(outputs), axes=("norm",))
        self.streams, self.sinkhorn_steps, self.eps, self.norm_eps = streams, sinkhorn_steps, eps, norm_eps

    def read(self, x: Float[Array, "B T n D"]) -> tuple[Float[Array, "B T D"], StreamMix]:
        """Returns the input of the branch, and what `write` needs."""
        pre, mix = jax.checkpoint(type(self)._weights, prevent_cse=False)(self, x)
        return _weighted_sum(pre, x), mix

    def _weights(self, x: Float[Array, "B T n D"]) -> tuple[Float[Array, "B T n"], StreamMix]:
        n = self.streams
        # [B, T, n, D] -> [B, T, n + n + n * n]
        pre, post, comb = jnp.split(_normed_product(self.mix, x, self.norm_eps), [n, 2 * n], axis=-1)
        (pre_bias, post_bias, comb_bias), scale = jnp.split(_row(self.bias), [n, 2 * n], axis=-1), self.scale[...]
        pre = jax.nn.sigmoid(scale[0] * pre + pre_bias) + self.eps
        post = 2 * jax.nn.sigmoid(scale[1] * post + post_bias)
        comb = (scale[2] * comb + comb_bias).reshape(*comb.shape[:2], n, n)
        return pre, StreamMix(post, sinkhorn(jax.nn.softmax(comb, axis=-1) + self.eps, self.sinkhorn_steps, self.eps))

    def write(
        self, x: Float[Array, "B T n D"], h: Float[Array, "B T D"], mix: StreamMix, name: str
    ) -> Float[Array, "B T n D"]:
        """Mixes the streams and adds the output of the branch.

        Args:
            x: The streams that `read` got.
            h: The output of the branch.
            mix: From `read`.
            name: Name of `h` for remat policies, "attn" or "mlp".
        """
        h = checkpoint_name(h, name)
        post, comb = mix.post.astype(x.dtype), mix.comb.astype(x.dtype)
        mixed = jnp.einsum("btji,btjd->btid", comb, x)
        # [B, T, n, 1] * [B, T, 1, D]
        x = constrain(post[..., None] * h[:, :, None] + mixed, "batch", "seq", None, "act_embed")
        return checkpoint_name(x, "resid_mid") if name == "attn" else x


class HyperHead(nnx.Module):
    """Sum of the streams for the head, `sum_i pre_i x_i`, weighted as a `HyperConnection` weighs the input of a branch.

    Args:
        dim: Width D of a stream.
        streams: Number n of streams.
        eps: Added to the weights.
        norm_eps: Epsilon of the norm.
        rngs: Source of initial values.
    """

    def __init__(self, dim: int, *, streams: int = 4, eps: float = 1e-6, norm_eps: float = 1e-6, rngs: nnx.Rngs):
        self.mix = Einsum("...D,MD->...M", (streams, streams * dim), ("stream", "embed"), rngs=rngs)
        self.scale = nnx.Param(jnp.ones(1), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(streams), axes=("norm",))
        self.eps, self.norm_eps = eps, norm_eps

    def __call__(self, x: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
        """Returns the weighted sum of the streams."""
        pre = self.scale[...][0] * _normed_product(self.mix, x, self.norm_eps) + _row(self.bias)
        return _weighted_sum(jax.nn.sigmoid(pre) + self.eps, x)


def sinkhorn(matrix: Float[Array, "... n n"], steps: int, eps: float = 0.0) -> Float[Array, "... n n"]:
    """Makes positive matrices doubly stochastic (Sinkhorn & Knopp 1967): divides columns, then rows, by their sums.

    Args:
        matrix: Positive matrices whose rows sum to about 1.
        steps: Number of iterations. The first one only divides columns.
        eps: Added to each sum.
    """

    def divided(a: Array, axis: int) -> Array:
        return a / (a.sum(axis=axis, keepdims=True) + eps)

    def step(a: Array, _: Any) -> tuple[Array, None]:
        return divided(divided(a, -1), -2), None

    return jax.lax.scan(step, divided(matrix, -2), length=steps - 1)[0]


def _normed_product(mix: Einsum, x: Float[Array, "B T n D"], eps: float) -> Float[Array, "B T M"]:
    """Returns `mix(rms_norm(x))` in float32, with one norm over all streams."""
    # [B, T, n, D] -> [B, T, n * D]. The norm's factor is applied to the few products instead of all streams.
    flat = x.reshape(*x.shape[:2], -1).astype(jnp.promote_types(x.dtype, jnp.float32))
    return mix(flat) * jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + eps)


def _row(bias: nnx.Param) -> Float[Array, "1 1 M"]:
    return bias[...][None, None]


def _weighted_sum(weights: Float[Array, "B T n"], x: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
    """Sums the streams in float32; returns the dtype of `x`."""
    return jnp.einsum("btn,btnd->btd", weights, x.astype(weights.dtype)).astype(x.dtype)
