"""Compressed keys (DeepSeek V4): one entry for every `rate` tokens of a document, a mean weighted channel by channel.

Shapes: B rows, T new tokens, D width, C entries, H width of an entry, U last inputs that a cache keeps.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree, static
from maxlib.nn.cache import LayerCache
from maxlib.nn.decoder._context import Context
from maxlib.nn.norm import RMSNorm
from maxlib.ops import Rope, apply_rope


@pytree
class EntryCache(LayerCache):
    """Cache of a `Compressor`: its entries, and the inputs of those that are not complete.

    Attributes:
        entries: `B C H`; entry `i` is of the tokens from `i * rate` on.
        tail: The last inputs, `B U W`.
        rate: Tokens of an entry.
    """

    kind: ClassVar[str | None] = "compressed"

    entries: Float[Array, "B C H"]
    tail: Float[Array, "B U W"]
    rate: int = static()

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a row can hold."""
        return (self.entries.shape[-2] + 1) * self.rate - 1


class Windows(NamedTuple):
    """The tokens of each entry: the place of the first one among the inputs, `B C`, and the entry's number, `B C`."""

    first: Int[Array, "B C"]
    number: Int[Array, "B C"]


class Compressor(nnx.Module):
    """Makes an entry of every `rate` tokens: `norm(sum_i softmax_i(gate(x_i) + place_i) * kv(x_i))` per channel.

    An entry is rotated by the position of its first token. With `overlap` it is also made of the `rate` tokens before:
    `kv` and `gate` have twice the width, of which the first half counts for the next entry and the second half for a
    token's own. Entries count from the first token of a document, and an entry exists when its last token does.

    Args:
        dim: Width D of the residual stream.
        head_dim: Width H of an entry.
        rate: Tokens of an entry.
        overlap: True if entries overlap.
        rope: Rotation of the last `rope.dim` numbers of an entry.
        norm_eps: Epsilon of the norm.
        rngs: Source of initial values.
    """

    def __init__(
        self, dim: int, head_dim: int, *, rate: int, overlap: bool, rope: Rope, norm_eps: float, rngs: nnx.Rngs
    ):
        width = 2 * head_dim if overlap else head_dim
        self.kv = Einsum("...D,HD->...H", (width, dim), ("head_dim", "embed"), gather_once=True, rngs=rngs)
        self.gate = Einsum("...D,HD->...H", (width, dim), ("head_dim", "embed"), gather_once=True, rngs=rngs)
        self.place = nnx.Param(jnp.zeros((rate, width)), axes=("tap", "head_dim"))
        self.norm = RMSNorm(head_dim, eps=norm_eps)
        self.head_dim, self.rate, self.overlap, self.rope = head_dim, rate, overlap, rope

    @property
    def reach(self) -> int:
        """Tokens of which an entry is made."""
        return 2 * self.rate if self.overlap else self.rate

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context, cache: EntryCache | None = None
    ) -> tuple[Float[Array, "B C H"], EntryCache | None]:
        """Returns the entries, with a cache also those of earlier tokens, and the new cache."""
        # [B, T, 2 W]: values, then gates.
        inputs = jnp.concatenate([self.kv(x), self.gate(x)], axis=-1)
        pool = jax.checkpoint(type(self)._pool, prevent_cse=False)
        if cache is None:
            # Without packing the entries lie one after the other from the first token on.
            return pool(self, inputs, self._windows(ctx) if ctx.packed else None), None
        joined = jnp.concatenate([cache.tail, inputs.astype(cache.tail.dtype)], axis=1)
        windows, complete = self._new_windows(ctx, inputs.shape[1])
        entries = pool(self, joined, windows).astype(cache.entries.dtype)
        rows = jnp.arange(x.shape[0])[:, None]
        slot = jnp.where(complete, windows.number, cache.entries.shape[1])  # no such slot: dropped
        entries = cache.entries.at[rows, slot].set(entries, mode="drop")
        last = ctx.num_new[:, None] + jnp.arange(self.reach - 1)[None]
        return entries, EntryCache(entries, joined[rows, last], self.rate)

    def seen(self, ctx: Context, cache: EntryCache | None = None) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Returns the first entry that each token attends to, and one past the last: the complete ones of its
        document.
        """
        count = self._count(ctx)
        end = count if cache is not None else jnp.cumsum(self._is_last(ctx), axis=1, dtype=jnp.int32)
        return end - count, end

    def _count(self, ctx: Context) -> Int[Array, "B T"]:
        """Returns how many entries of its document are complete after each token."""
        count = (ctx.index - ctx.start + 1) // self.rate
        return count if ctx.valid is None else jnp.where(ctx.valid, count, 0)

    def _is_last(self, ctx: Context) -> Bool[Array, "B T"]:
        """Returns True for the last token of an entry."""
        last = (ctx.index - ctx.start + 1) % self.rate == 0
        return last if ctx.valid is None else last & ctx.valid

    def _windows(self, ctx: Context) -> Windows:
        """Returns the tokens of the entries of packed rows, in their order; what is left over is hidden from all."""
        last = self._is_last(ctx)
        B, T = last.shape
        entry = jnp.where(last, jnp.cumsum(last, axis=1, dtype=jnp.int32) - 1, T)
        first = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None] - self.rate + 1, (B, T))
        rows, empty = jnp.arange(B)[:, None], jnp.zeros((B, T // self.rate), jnp.int32)
        return Windows(*(empty.at[rows, entry].set(a, mode="drop") for a in (first, self._count(ctx) - 1)))

    def _new_windows(self, ctx: Context, new: int) -> tuple[Windows, Bool[Array, "B C"]]:
        """Returns the tokens of the entries that `new` tokens may complete, and which they do complete.

        The inputs begin with the last `reach - 1` ones of earlier tokens.
        """
        done = (ctx.length // self.rate)[:, None]
        number = done + jnp.arange(-(-new // self.rate))[None]
        first = number * self.rate - ctx.length[:, None] + self.reach - 1
        return Windows(first, number), (number + 1) * self.rate <= (ctx.length + ctx.num_new)[:, None]

    def _pool(self, inputs: Float[Array, "B T W"], windows: Windows | None) -> Float[Array, "B C H"]:
        """Returns the entries of some inputs."""
        # [B, T, 2 W] -> [B, C, reach, 2 W]
        taken = self._taken(inputs, windows)
        B, C = taken.shape[:2]
        number = jnp.broadcast_to(jnp.arange(C)[None], (B, C)) if windows is None else windows.number
        values, gates = jnp.split(taken.astype(jnp.promote_types(inputs.dtype, jnp.float32)), 2, axis=-1)
        gates = gates + jnp.tile(self.place[...], (self.reach // self.rate, 1))[None, None]
        if self.overlap:
            values, gates = self._halves(values), self._halves(gates)
            # The first entry of a document has no tokens before it.
            before = (number == 0)[:, :, None] & (jnp.arange(self.reach) < self.rate)[None, None]
            gates = jnp.where(before[..., None], -jnp.inf, gates)
        pooled = self.norm(jnp.sum(jax.nn.softmax(gates, axis=2) * values, axis=2)).astype(inputs.dtype)
        tables = self.rope.tables(number * self.rate)
        return rotate_last(pooled[:, :, None], *tables, interleaved=self.rope.interleaved)[:, :, 0]

    def _taken(self, inputs: Float[Array, "B T W"], windows: Windows | None) -> Float[Array, "B C reach W"]:
        """Returns the inputs of each entry."""
        before = self.reach - self.rate
        if windows is not None:
            # [B, C, reach]
            place = windows.first[..., None] - before + jnp.arange(self.reach)[None, None]
            return jax.vmap(lambda row, place: row[place])(inputs, jnp.maximum(place, 0))
        B, T, W = inputs.shape
        windows_of_row = inputs[:, : T // self.rate * self.rate].reshape(B, T // self.rate, self.rate, W)
        if not before:
            return windows_of_row
        earlier = jnp.pad(windows_of_row, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
        return jnp.concatenate([earlier, windows_of_row], axis=2)

    def _halves(self, x: Float[Array, "B C reach W"]) -> Float[Array, "B C reach H"]:
        """Returns the first half of the tokens before, and the second half of an entry's own."""
        return jnp.concatenate([x[:, :, : self.rate, : self.head_dim], x[:, :, self.rate :, self.head_dim :]], axis=2)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> EntryCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens."""
        entries = jnp.zeros((batch, max(capacity // self.rate, 1), self.head_dim), dtype)
        return EntryCache(entries, jnp.zeros((batch, self.reach - 1, 2 * self.place.shape[1]), dtype), self.rate)


def rotate_last(
    x: Float[Array, "B T N H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    interleaved: bool,
) -> Float[Array, "B T N H"]:
    """Rotates the last `2 * half` numbers of each head; `-sin` rotates back."""
    rest, turned = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([rest, apply_rope(turned, cos, sin, interleaved=interleaved)], axis=-1)
