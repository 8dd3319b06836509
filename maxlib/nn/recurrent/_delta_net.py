"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): linear attention whose state decays and is updated by the delta
rule.

Shapes: B rows, T new tokens, D width, K key heads of width Hk, N value heads of width Hv, W taps of the convolution.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import ops
from maxlib._xla_workarounds import for_each_token
from maxlib.nn._linear import Einsum, of_same
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import RMSNorm
from maxlib.nn.recurrent._common import (
    HEADS,
    Convolved,
    StateCache,
    convolved_recurrence,
    gather_traffic,
    gathered_weight,
    rates,
    taps,
    wide,
)
from maxlib.nn.remat import mark_heads
from maxlib.sharding import constrain


class GatedDeltaNet(SequenceMixer):
    """Gated DeltaNet: `out(norm(o) * out_gate_act(gate(x)))`; `o` is the gated delta rule of convolved projections.

    Queries, keys and values pass through a short convolution and SiLU. With a row of `a(x)` and `b(x)` for each value
    head, the log decay is `-exp(a_log) softplus(a(x) + dt_bias)` and the step `max_step * sigmoid(b(x))`. Padding and
    other documents of a row have no effect. The cache has a fixed size. Tokens must be in order: devices that share a
    sequence pass states on (`ops.gated_delta_rule`), and zigzag order raises an error.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of value heads.
        key_dim: Width Hk of a key head.
        value_dim: Width Hv of a value head.
        num_key_heads: Number K of heads of queries and keys, which divides N; None means N.
        conv_width: Number W of taps of the convolution.
        norm_eps: Added to the mean square in the norm of the output.
        out_gate_act: Activation of the output's gate.
        max_step: Largest step; above 1 the state's transition may have negative eigenvalues (2 in OLMo Hybrid).
        implementation: Name of an implementation of `ops.gated_delta_rule`; None chooses the best one.
        rngs: Source of initial values.

    Raises:
        ValueError: when `num_heads` is not a positive multiple of `num_key_heads`, or `conv_width` is below 2.
    """

    op: ClassVar[str | None] = "gated_delta_rule"
    kind: ClassVar[str | None] = "gated DeltaNet"
    features: ClassVar[tuple[str, ...]] = ("short convolution",)

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        num_key_heads: int | None = None,
        conv_width: int = 4,
        norm_eps: float = 1e-6,
        out_gate_act: Callable[[Array], Array] = jax.nn.silu,
        max_step: float = 1.0,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, K, Hk, Hv, W = dim, num_heads, num_key_heads or num_heads, key_dim, value_dim, conv_width
        if N < 1 or K < 1 or N % K:
            raise ValueError(f"num_heads must be a multiple of num_key_heads; got {N} and {K}")
        of_keys, of_values = ("kv_heads", "head_dim", "embed"), ("heads", "head_dim", "embed")
        self.q = Einsum("...D,KHD->...KH", (K, Hk, D), of_keys, rngs=rngs)
        self.k = Einsum("...D,KHD->...KH", (K, Hk, D), of_keys, rngs=rngs)
        self.v = Einsum("...D,NHD->...NH", (N, Hv, D), of_values, rngs=rngs)
        self.gate = Einsum("...D,NHD->...NH", (N, Hv, D), of_values, rngs=rngs)
        # One number per value head: `b` gives the step, `a` the decay.
        self.b = Einsum("...D,ND->...N", (N, D), ("heads", "embed"), rngs=rngs)
        self.a = Einsum("...D,ND->...N", (N, D), ("heads", "embed"), rngs=rngs)
        self.q_conv = taps((K, Hk, W), ("kv_heads", "head_dim"), rngs)
        self.k_conv = taps((K, Hk, W), ("kv_heads", "head_dim"), rngs)
        self.v_conv = taps((N, Hv, W), ("heads", "head_dim"), rngs)
        self.a_log, self.dt_bias = rates(N, rngs)
        self.norm = RMSNorm(Hv, eps=norm_eps)
        self.o = Einsum("...NH,DNH->...D", (D, N, Hv), ("embed", "heads", "head_dim"), rngs=rngs)
        self.num_heads, self.num_key_heads, self.key_dim, self.value_dim = N, K, Hk, Hv
        self.conv_width, self.out_gate_act, self.max_step = W, out_gate_act, max_step
        self.implementation = implementation

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
        # [B, T, D] -> [B, T, heads, width]
        projections = of_same(x, self.q, self.k, self.v, self.gate, self.a, self.b)
        q, k, v, gate, a, b = (constrain(y, *HEADS[: y.ndim]) for y in projections)
        out, cache = delta_rule(self, (q, k, v), *self._rates(a, b), ctx, cache)
        # Cheap to compute again; kept for the backward pass, it would take several times the memory of its inputs.
        return jax.checkpoint(self._leave, prevent_cse=False)(checkpoint_name(out, "attention_out"), gate), cache

    def _leave(self, out: Array, gate: Array) -> Array:
        """Norms the output, gates it and projects it, `B T N Hv` to `B T D`."""
        # The norm and the gate are in float32, so multiply in float32, too.
        heads = (wide(self.norm(out)) * self.out_gate_act(wide(gate))).astype(out.dtype)
        return self.o(checkpoint_name(heads, "heads"))

    def _rates(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Returns log decays and steps, `B T N` each, in float32 or wider."""
        a, b = wide(a), wide(b)
        # [N] -> [B, T, N]
        a_log, dt_bias = (for_each_token(wide(w[...]), a.shape) for w in (self.a_log, self.dt_bias))
        return -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias), self.max_step * jax.nn.sigmoid(b)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> StateCache:
        """Makes an empty cache for `batch` rows; its size does not depend on `capacity`."""
        keys, values = (self.num_key_heads, self.key_dim), (self.num_heads, self.value_dim)
        state = (self.num_heads, self.key_dim, self.value_dim)
        return StateCache.empty(batch, self.conv_width, (keys, keys, values), state, dtype)

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes of state transitions, states and convolution inputs that devices gather in a
        training step.
        """
        N, K, Hk, Hv = self.num_heads, self.num_key_heads, self.key_dim, self.value_dim
        effect = 4 * N * Hk * (Hk + Hv)  # float32
        tail = (self.conv_width - 1) * (2 * K * Hk + N * Hv) * split.width
        return gather_traffic(split, (effect + tail) / split.heads)


def delta_rule(
    layer: Any,
    qkv: tuple[Array, Array, Array],
    log_decay: Array,
    beta: Array,
    ctx: Context,
    cache: StateCache | None,
) -> tuple[Array, StateCache | None]:
    """Applies the convolutions and the gated delta rule to each device's rows, heads and tokens.

    Args:
        layer: The layer, with `q_conv`, `k_conv`, `v_conv` and `implementation`.
        qkv: Projected queries, keys and values, `B T N H` each.
        log_decay: Log decays, `B T N`, or `B T N H` of each channel.
        beta: Steps, `B T N`.
        ctx: Documents and padding.
        cache: Convolution inputs and state of earlier tokens, or None.

    Returns:
        The output, `B T N Hv`, and the new cache.
    """
    inputs = [
        Convolved((mark_heads(y, name), HEADS), gathered_weight(taps))
        for y, name, taps in zip(qkv, "qkv", (layer.q_conv, layer.k_conv, layer.v_conv), strict=True)
    ]
    rates = [(log_decay, HEADS[: log_decay.ndim]), (beta, HEADS[:3])]
    run = functools.partial(ops.gated_delta_rule, implementation=layer.implementation)
    return convolved_recurrence(run, inputs, rates, ctx, cache)
