"""Test cases of recurrences: the gated delta rule, Kimi delta attention and state-space duality."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from maxlib import ops
from maxlib.ops._dispatch import Explanation

SMALL_ENOUGH = 4096  # tokens for which the definition can keep a state of each


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """One call of a recurrence in two parts; the second starts from the state of the first.

    Args:
        tokens: Tokens of a row.
        batch: Rows.
        key_heads: Heads of keys and queries, in Kimi delta attention as many as of values, or groups of state-space
            duality.
        heads: Heads of values.
        key_dim: Width of keys, or size of the state of state-space duality.
        value_dim: Width of values.
        documents: Documents in a row.
    """

    tokens: int = 8192
    batch: int = 1
    key_heads: int = 8
    heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    documents: int = 1

    op: ClassVar[str]
    deciding: ClassVar[tuple[str, ...]] = ("q", "v")  # arrays that decide the kernel
    gradients: ClassVar[bool] = True

    @property
    def truth(self) -> str:
        """Names the implementation to compare with: where the definition's states do not fit, one that was compared."""
        return "chunked" if self.tokens > SMALL_ENOUGH else "sequential"

    def call(self, run: Callable, arrays: dict[str, jax.Array]) -> jax.Array:
        """Runs `run`, a function like that of the operation in `ops`, on both parts."""
        third = self.tokens // 3  # not the border of a chunk
        # As layers do: rows of one document have no starts. Arrays of one axis belong to heads, not to tokens.
        x = arrays if self.documents == 1 else arrays | {"is_start": self._starts()}

        def tokens(at: slice) -> dict[str, jax.Array]:
            return {name: a if a.ndim == 1 else a[:, at] for name, a in x.items()}

        # Like prefill in two calls: the output and gradients of the second depend on the state in between.
        first, state = run(**tokens(slice(third)))
        last, _ = run(**tokens(slice(third, None)), initial_state=state)
        return jnp.concatenate([first, last], axis=1)

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns the operation's arrays and the output's cotangent; rates are float32, as in layers."""
        raise NotImplementedError

    def explain(self, arrays: dict[str, jax.Array], **options: Any) -> Explanation:
        """Explains which implementation would run the arrays."""
        return getattr(ops, f"explain_{self.op}")(*(arrays[name] for name in self.deciding), **options)

    def _starts(self) -> jax.Array:
        """Returns True for the first token of each document but the first, `B T`."""
        index, length = jnp.arange(self.tokens), -(-self.tokens // self.documents)
        return jnp.broadcast_to((index % length == 0) & (index > 0), (self.batch, self.tokens))

    def _normal(self, *shapes: tuple[int, ...]) -> list[jax.Array]:
        """Draws an array of normal numbers in float32 for each shape behind rows and tokens."""
        keys = jax.random.split(jax.random.key(0), len(shapes))
        leading = self.batch, self.tokens
        return [jax.random.normal(key, (*leading, *shape)) for key, shape in zip(keys, shapes, strict=True)]

    def _slow(self) -> jax.Array:
        """Returns how fast each head forgets: over ten to thousands of tokens."""
        return jnp.logspace(-4, -1, self.heads)


class GatedDelta(Recurrence):
    """One call of the gated delta rule in two parts."""

    op = "gated_delta_rule"
    by_channel: ClassVar[bool] = False  # True if every channel of a key forgets at its own rate

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns queries, keys, values, rates, and the output's cotangent; rates are float32, as in layers."""
        keys, values, heads = (self.key_heads, self.key_dim), (self.heads, self.value_dim), (self.heads,)
        q, k, v, decay, beta, d_out = self._normal(
            keys, keys, values, keys if self.by_channel else heads, heads, values
        )
        slow = self._slow().reshape(1, 1, -1, *[1] * (decay.ndim - 3))
        rates = {"log_decay": -slow * jax.nn.softplus(decay), "beta": jax.nn.sigmoid(beta)}
        return _narrow(dtype, q=q, k=k, v=v, d_out=d_out) | rates


class KimiDelta(GatedDelta):
    """One call of Kimi delta attention in two parts."""

    op = "kimi_delta_attention"
    by_channel = True


class StateSpace(Recurrence):
    """One call of state-space duality in two parts.

    The gradient of `a` has one number for each head, a sum over tokens that partly cancels. Only several heads together
    say something: of two, over 600 tokens, right kernels in bfloat16 were off by 1.9%; of six or more, by 0.4%.
    """

    op = "ssd"
    deciding = ("x", "b")

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns inputs, steps, rates, projections, and the output's cotangent; steps and rates are float32, as in
        layers.
        """
        keys, values = (self.key_heads, self.key_dim), (self.heads, self.value_dim)
        x, dt, b, c, d_out = self._normal(values, (self.heads,), keys, keys, values)
        return _narrow(dtype, x=x, b=b, c=c, d_out=d_out) | {"dt": jax.nn.softplus(dt), "a": -self._slow()}


def _narrow(dtype: Any, **arrays: jax.Array) -> dict[str, jax.Array]:
    return {name: x.astype(dtype) for name, x in arrays.items()}
