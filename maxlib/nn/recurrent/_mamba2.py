"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): a selective state space, computed by state-space duality.

Shapes: B rows, T new tokens, D width, N heads of width P, G groups that share the S numbers by which a state is written
and read, W taps of the convolution.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import ops
from maxlib._xla_workarounds import for_each_token
from maxlib.nn._linear import Einsum
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import GroupRMSNorm
from maxlib.nn.recurrent._common import (
    HEADS,
    Convolved,
    StateCache,
    convolved_recurrence,
    gather_traffic,
    rates,
    taps,
    wide,
)
from maxlib.nn.remat import mark_heads
from maxlib.sharding import constrain

Factors = tuple[float, float, float, float, float]


class Mamba2(SequenceMixer):
    """Mamba-2: `out(norm(y * silu(gate(x))))`, where `y` is state-space duality (`ops.ssd`) of convolved projections.

    The state's input `x`, and `b` and `c`, which write and read it, pass through a short convolution and SiLU. A head's
    step is `softplus(dt(x) + dt_bias)`, within `dt_limit`, and its rate `-exp(a_log)`. Padding and other documents of a
    row have no effect. The cache has a fixed size. Tokens must be in order: devices that share a sequence pass states
    on, and zigzag order raises an error.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of heads.
        head_dim: Width P of a head.
        state_dim: Size S of `b` and `c`; a head's state is P S.
        num_groups: Number G of groups, which divides N; each has its own `b` and `c`, and is normalized separately.
        conv_width: Number W of taps of the convolution.
        conv_bias: True adds a bias to the convolution.
        bias: True adds biases to all projections of the input.
        out_bias: True adds a bias to the output projection; None means the same as `bias`.
        dt_limit: Smallest and largest step.
        norm: Whether the output is gated before it is normed ("gate_first") or after ("norm_first"); None for no norm.
        norm_eps: Added to the mean square in the norm.
        factors: Factors on the projections `gate`, `x`, `b`, `c` and `dt` (Falcon-H1's muP); None for ones.
        implementation: Name of an implementation of `ops.ssd`; None chooses the best one.
        rngs: Source of initial values.

    Raises:
        ValueError: when `num_heads` is not a positive multiple of `num_groups`, or `conv_width` is below 2.
    """

    op: ClassVar[str | None] = "ssd"
    kind: ClassVar[str | None] = "Mamba-2"
    features: ClassVar[tuple[str, ...]] = ("short convolution",)

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        head_dim: int,
        state_dim: int,
        num_groups: int = 1,
        conv_width: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        out_bias: bool | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        norm: Literal["gate_first", "norm_first"] | None = "gate_first",
        norm_eps: float = 1e-5,
        factors: Factors | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, P, G, S, W = dim, num_heads, head_dim, num_groups, state_dim, conv_width
        if N < 1 or G < 1 or N % G:
            raise ValueError(f"num_heads must be a multiple of num_groups; got {N} and {G}")
        # Heads and their width are one axis of the weights, as in published files. A single group is replicated on all
        # devices; several groups are split as heads are.
        C, E, groups = N * P, G * S, "kv_heads" if G > 1 else "state"

        def of_heads() -> Einsum:
            return Einsum("...D,FD->...F", (C, D), ("heads", "embed"), bias=bias, rngs=rngs)

        def of_groups() -> Einsum:
            return Einsum("...D,FD->...F", (E, D), (groups, "embed"), bias=bias, rngs=rngs)

        self.gate, self.x, self.b, self.c = of_heads(), of_heads(), of_groups(), of_groups()
        # One number per head: the length of a step.
        self.dt = Einsum("...D,ND->...N", (N, D), ("heads", "embed"), bias=bias, rngs=rngs)
        self.x_conv = taps((C, W), ("heads",), rngs)
        self.b_conv, self.c_conv = taps((E, W), (groups,), rngs), taps((E, W), (groups,), rngs)
        self.x_conv_bias = nnx.Param(jnp.zeros(C), axes=("heads",)) if conv_bias else None
        self.b_conv_bias = nnx.Param(jnp.zeros(E), axes=(groups,)) if conv_bias else None
        self.c_conv_bias = nnx.Param(jnp.zeros(E), axes=(groups,)) if conv_bias else None
        self.a_log, self.dt_bias = rates(N, rngs)
        self.d = nnx.Param(jnp.ones(N), axes=("heads",))
        self.norm = None if norm is None else GroupRMSNorm(C, groups=G, eps=norm_eps)
        out_bias = bias if out_bias is None else out_bias
        self.o = Einsum("...F,DF->...D", (D, C), ("embed", "heads"), bias=out_bias, rngs=rngs)
        self.num_heads, self.head_dim, self.num_groups, self.state_dim, self.conv_width = N, P, G, S, W
        self.dt_limit, self.norm_order, self.factors, self.implementation = dt_limit, norm, factors, implementation

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
        # [B, T, D] -> gate [B, T, N * P], x [B, T, N, P], b and c [B, T, G, S], dt [B, T, N]
        gate, inner, b, c, dt = self._project(x)
        y, cache = self._mix(inner, b, c, self._step(dt), ctx, cache)
        # [B, T, N, P] -> [B, T, N * P]
        y = checkpoint_name(y, "attention_out").reshape(gate.shape)
        return self.o(checkpoint_name(self._gated_norm(y, gate).astype(x.dtype), "heads")), cache

    def _project(self, x: Array) -> tuple[Array, ...]:
        """Returns gate, `B T N*P`, x, `B T N P`, b and c, `B T G S`, and dt, `B T N`."""
        parts = [self.gate(x), self.x(x), self.b(x), self.c(x), self.dt(x)]
        if self.factors is not None:
            parts = [factor * projection for factor, projection in zip(self.factors, parts, strict=True)]
        gate, inner, b, c, dt = parts
        # [B, T, heads * width] -> [B, T, heads, width]
        inner = constrain(inner.reshape(*inner.shape[:2], self.num_heads, -1), *HEADS)
        b, c = (y.reshape(*y.shape[:2], self.num_groups, -1) for y in (b, c))
        inner, b, c = mark_heads(inner, "v"), mark_heads(b, "k"), mark_heads(c, "q")
        return constrain(gate, *HEADS[:3]), inner, b, c, constrain(dt, *HEADS[:3])

    def _step(self, dt: Array) -> Array:
        """Returns the lengths of the steps, `B T N`, in float32 or wider."""
        # The step is in the exponent of the decay: rounding it to bfloat16 would be an error of about a percent.
        dt = wide(dt)
        # [N] -> [B, T, N]
        bias = for_each_token(self.dt_bias[...].astype(dt.dtype), dt.shape)
        return jnp.clip(jax.nn.softplus(dt + bias), *self.dt_limit)

    def _gated_norm(self, y: Array, gate: Array) -> Array:
        """Gates and norms the output, `B T N*P`, in float32 or wider."""
        # The norm and the gate are in float32, so multiply in float32, too.
        y, gate = wide(y), jax.nn.silu(wide(gate))
        if self.norm is None:
            return y * gate
        return self.norm(y * gate) if self.norm_order == "gate_first" else self.norm(y) * gate

    def _mix(self, x, b, c, dt, ctx: Context, cache: StateCache | None):
        """Applies the convolution and the recurrence to each device's rows, heads and tokens."""
        # b and c of a single group are replicated; those of several groups are split as the heads are.
        heads, groups = "act_heads", None if self.num_groups == 1 else "act_heads"
        inputs = [self._convolved("x", x, heads), self._convolved("b", b, groups), self._convolved("c", c, groups)]
        rates = [(dt, HEADS[:3]), (self.a_log[...], (heads,)), (self.d[...], (heads,))]
        return convolved_recurrence(self._recurrence, inputs, rates, ctx, cache)

    def _convolved(self, name: str, x: Array, axis: str | None) -> Convolved:
        """Returns an input, `B T heads width`, with its filters and biases by head or group."""
        taps, bias, shape = getattr(self, f"{name}_conv"), getattr(self, f"{name}_conv_bias"), x.shape[2:]
        # [heads * width, W] -> [heads, width, W]
        of_taps = taps[...].reshape(*shape, -1), (axis, None, None)
        of_bias = None if bias is None else bias[...].reshape(shape), (axis, None)
        return Convolved((x, ("batch", "seq", axis, None)), of_taps, of_bias)

    def _recurrence(self, x, b, c, dt, a_log, d, **options):
        # Negative for every a_log, so that states decay. [N]
        a = -jnp.exp(a_log.astype(dt.dtype))
        return ops.ssd(x, dt, a, b, c, d=d, **options, implementation=self.implementation)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> StateCache:
        """Makes an empty cache for `batch` rows; its size does not depend on `capacity`."""
        heads, groups = (self.num_heads, self.head_dim), (self.num_groups, self.state_dim)
        return StateCache.empty(batch, self.conv_width, (heads, groups, groups), (*heads, self.state_dim), dtype)

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes of state transitions, states and convolution inputs that devices gather in a
        training step.
        """
        N, P, G, S = self.num_heads, self.head_dim, self.num_groups, self.state_dim
        effect = 4 * N * (P * S + 1)  # float32; the transition is one number per head
        tail = (self.conv_width - 1) * (N * P + 2 * G * S) * split.width
        return gather_traffic(split, (effect + tail) / split.heads)
