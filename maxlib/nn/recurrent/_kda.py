"""Kimi delta attention (Kimi Team 2025, arXiv:2510.26692): gated DeltaNet whose state forgets channel by channel.

Shapes: B rows, T new tokens, D width, N heads of width H, R rank of the gates, W taps of the convolution.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.nn._linear import Einsum, of_same
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import RMSNorm
from maxlib.nn.recurrent._common import HEADS, StateCache, gather_traffic, rates, taps, wide
from maxlib.nn.recurrent._delta_net import delta_rule
from maxlib.sharding import constrain


class KimiDeltaAttention(SequenceMixer):
    """Kimi delta attention: `out(norm(o) * sigmoid(gate(x)))`; `o` is `ops.gated_delta_rule` of convolved
    projections.

    Queries, keys and values pass a short convolution and SiLU. With `f(x)` of a number for each channel of each head,
    the log decay is `-exp(a_log) softplus(f(x) + dt_bias)`, or with a bound `lower_bound sigmoid(exp(a_log) (f(x) +
    dt_bias))`, and the step is `sigmoid(b(x))`. `f` and the gate of the output are products of two matrices. Padding
    and other documents of a row change nothing; the cache has a fixed size. Tokens must be in order: devices that share
    a sequence pass on states, and zigzag order is refused.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of heads.
        head_dim: Width H of queries, keys and values, and rank R of the gates.
        conv_width: Number W of taps of the convolution.
        norm_eps: Added to the mean square in the norm of the output.
        lower_bound: Least log decay, a negative number; None for no bound.
        implementation: Name of an implementation of `ops.gated_delta_rule`; None chooses the best one.
        rngs: Source of initial values.

    Raises:
        ValueError: when `conv_width` is below 2.
    """

    op: ClassVar[str | None] = "gated_delta_rule"
    kind: ClassVar[str | None] = "Kimi delta attention"
    features: ClassVar[tuple[str, ...]] = ("short convolution",)

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        head_dim: int,
        conv_width: int = 4,
        norm_eps: float = 1e-6,
        lower_bound: float | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, H, R, W = dim, num_heads, head_dim, head_dim, conv_width

        def project() -> Einsum:
            return Einsum("...D,NHD->...NH", (N, H, D), ("heads", "head_dim", "embed"), rngs=rngs)

        def down() -> Einsum:
            return Einsum("...D,RD->...R", (R, D), ("rank", "embed"), gather_once=True, rngs=rngs)

        def up() -> Einsum:
            return Einsum("...R,NHR->...NH", (N, H, R), ("heads", "head_dim", "rank"), gather_once=True, rngs=rngs)

        self.q, self.k, self.v = project(), project(), project()
        # What the decay depends on, and the output's gate: x -> R numbers -> H numbers for each head.
        self.f_down, self.f_up, self.gate_down, self.gate_up = down(), up(), down(), up()
        self.b = Einsum("...D,ND->...N", (N, D), ("heads", "embed"), rngs=rngs)  # a step for each head
        self.q_conv, self.k_conv, self.v_conv = (taps((N, H, W), ("heads", "head_dim"), rngs) for _ in range(3))
        self.a_log, _ = rates(N, rngs)
        _, self.dt_bias = rates(N * H, rngs)  # of every channel of every head
        self.norm = RMSNorm(H, eps=norm_eps)
        self.o = Einsum("...NH,DNH->...D", (D, N, H), ("embed", "heads", "head_dim"), rngs=rngs)
        self.num_heads, self.head_dim, self.conv_width, self.implementation = N, H, W, implementation
        self.lower_bound = lower_bound

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: StateCache | None = None
    ) -> tuple[Float[Array, "B T D"], StateCache | None]:
        """Mixes the tokens of each document.

        Args:
            x: Input, `B T D`.
            ctx: Values shared by all layers (`nn.make_context`); None treats each row as one document from position 0.
            cache: Convolution inputs and state of earlier tokens, or None.

        Returns:
            The output, `B T D`, and the cache after the new tokens (None without one).
        """
        ctx = context_of(x, ctx)
        # [B, T, D] -> [B, T, N, H]
        q, k, v, f, b, gate = of_same(x, self.q, self.k, self.v, self.f_down, self.b, self.gate_down)
        q, k, v, log_decay, beta = (constrain(y, *HEADS[: y.ndim]) for y in (q, k, v, *self._rates(f, b)))
        out, cache = delta_rule(self, (q, k, v), log_decay, beta, ctx, cache)
        # In float32 until the product, as the norm is. [B, T, N, H]
        out = self.norm(checkpoint_name(out, "attention_out")).astype(jnp.promote_types(x.dtype, jnp.float32))
        # [B, T, D] -> [B, T, R] -> [B, T, N, H]
        gate = constrain(self.gate_up(gate), *HEADS).astype(out.dtype)
        heads = checkpoint_name((out * jax.nn.sigmoid(gate)).astype(x.dtype), "heads")
        return self.o(heads), cache

    def _rates(self, f: Array, b: Array) -> tuple[Array, Array]:
        """Returns log decays, `B T N H`, and steps, `B T N`, in float32 or wider."""
        f, b = wide(self.f_up(f)), wide(b)
        # [N] -> [1, 1, N, 1] and [N * H] -> [1, 1, N, H]
        a_log, dt_bias = wide(self.a_log[...])[None, None, :, None], wide(self.dt_bias[...]).reshape(1, 1, *f.shape[2:])
        if self.lower_bound is not None:
            return self.lower_bound * jax.nn.sigmoid(jnp.exp(a_log) * (f + dt_bias)), jax.nn.sigmoid(b)
        return -jnp.exp(a_log) * jax.nn.softplus(f + dt_bias), jax.nn.sigmoid(b)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> StateCache:
        """Makes an empty cache for `batch` rows; its size does not depend on `capacity`."""
        heads = (self.num_heads, self.head_dim)
        return StateCache.empty(batch, self.conv_width, (heads,) * 3, (*heads, self.head_dim), dtype)

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes of transitions, states and convolution inputs that devices gather in a training step."""
        N, H = self.num_heads, self.head_dim
        effect, tail = 4 * N * H * 2 * H, (self.conv_width - 1) * 3 * N * H * split.width  # the effect is float32
        return gather_traffic(split, (effect + tail) / split.heads)
