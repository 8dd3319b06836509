"""Multi-token prediction (DeepSeek V3, arXiv:2412.19437): small modules that look further ahead than the next token."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._context import Context, context
from maxlib.nn._linear import Einsum
from maxlib.nn._norm import RMSNorm
from maxlib.nn._pytree import pytree
from maxlib.nn.cache import Cache
from maxlib.nn.remat import Policy, remat_policy
from maxlib.ops._attention import Causal, Mask
from maxlib.ops._rope import Rope
from maxlib.sharding import constrain


@pytree
class MTPOutput:
    """What the module of depth k knows: `hidden` at place `i`, normed for the model's head, foretells token `i + 1 +
    k`.

    valid: where token `i + k`, which that takes, belongs to the same document. aux: what the module's block reports.
    """

    hidden: Float[Array, "B T D"]
    valid: Bool[Array, "B T"]
    aux: dict[str, Any]


class MTP(nnx.Module):
    """One module: `norm(block(project([embed_norm(next token), hidden_norm(hidden)])))`.

    block: a layer as in a stack. eps: of the three norms.
    """

    def __init__(self, dim: int, *, block: nnx.Module, eps: float = 1e-6, rngs: nnx.Rngs):
        self.embed_norm = RMSNorm(dim, eps=eps)
        self.hidden_norm = RMSNorm(dim, eps=eps)
        self.project = Einsum("...F,DF->...D", (dim, 2 * dim), ("embed", "mlp"), rngs=rngs)
        self.block: Any = block
        self.norm = RMSNorm(dim, eps=eps)

    def __call__(
        self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], ctx: Context, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Any]]:
        """The next module's `hidden`, the block's cache and aux. embedded: the token after those that `hidden` has
        seen.
        """
        x = jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x, cache, aux = self.block(constrain(self.project(x), "batch", "seq", "act_embed"), ctx, cache)
        return self.norm(x), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> Any:
        return self.block.init_cache(batch, capacity, dtype)


def predict_ahead(
    modules: Sequence[MTP],
    embed: Callable[..., Array],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    masks: tuple[Mask, ...] = (Causal(),),
    ropes: tuple[Rope, ...] = (),
    remat: Policy = None,
) -> list[MTPOutput]:
    """Runs one module after the other on the model's final `hidden` and the tokens, positions and documents it is of.

    Each takes tokens one place further ahead, and never those of another document.
    """
    documents = context(*tokens.shape, segment_ids=segment_ids, valid=valid)
    positions = documents.positions if positions is None else positions
    found = []
    for depth, module in enumerate(modules, start=1):
        known = documents.index + depth < documents.stop
        ids = jnp.where(known, documents.start + 1, 0)  # the last tokens of a document are padding here
        ctx = context(*tokens.shape, positions=positions, segment_ids=ids, masks=masks, ropes=ropes)
        run = lambda module, hidden, embedded, ctx=ctx: module(hidden, embedded, ctx)
        if remat is not None:
            run = jax.checkpoint(run, policy=remat_policy(remat))
        hidden, _, aux = run(module, hidden, embed(shift_left(tokens, depth, fill=0), dtype=hidden.dtype))
        found.append(MTPOutput(hidden, known, aux))
    return found


def shift_left(x: Int[Array, "B T"], places: int, *, fill: int) -> Int[Array, "B T"]:
    """At `i` what stands at `i + places`; `fill` behind the end."""
    return jnp.pad(x[:, places:], ((0, 0), (0, min(places, x.shape[1]))), constant_values=fill)


def draft(
    module: MTP,
    embed: Callable[..., Array],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    cache: Cache,
    valid: Bool[Array, "B T"] | None = None,
    masks: tuple[Mask, ...] = (Causal(),),
    ropes: tuple[Rope, ...] = (),
) -> tuple[Float[Array, "B T D"], Cache]:
    """`module` at the places behind those in `cache`, for decoding: normed for the model's head, and the new cache.

    hidden: the model's final one at these places. tokens: the next token of each.
    """
    ctx = context(*tokens.shape, valid=valid, cache=cache, masks=masks, ropes=ropes)
    hidden, layers, _ = module(hidden, embed(tokens, dtype=hidden.dtype), ctx, cache.layers)
    return hidden, cache.advanced(layers, ctx)
