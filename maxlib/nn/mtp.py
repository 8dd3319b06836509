"""Multi-token prediction (DeepSeek V3, arXiv:2412.19437): small modules that predict further ahead than the next
token.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
from maxlib.nn.cache import Cache
from maxlib.nn.decoder._context import AnyRope, Context, make_context
from maxlib.nn.decoder._model import Model
from maxlib.nn.norm import RMSNorm
from maxlib.nn.remat import Policy, remat_policy
from maxlib.ops import Causal
from maxlib.sharding import constrain


@pytree
class MTPOutput:
    """Output of MTP module k: `hidden[:, i]` predicts token i + 1 + k.

    Attributes:
        hidden: Hidden states, normed for the model's head.
        valid: True if token i + k, an input of the module, is in the same document as token i.
        aux: Losses and metrics of the module's block.
    """

    hidden: Float[Array, "B T D"]
    valid: Bool[Array, "B T"]
    aux: dict[str, Any]


@runtime_checkable
class SupportsDrafting(Model, Protocol):
    """Protocol of models that can also draft the token after the next one, as with multi-token prediction."""

    def draft(
        self,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        *,
        cache: Cache,
        valid: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Returns hidden states for `logits` that predict one token further ahead, and the new cache.

        Args:
            hidden: The model's output at the tokens after those in `cache`.
            tokens: The next token at each position.
            cache: Cache from `init_draft_cache`.
            valid: False for padding.
        """
        ...

    def init_draft_cache(self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16) -> Cache: ...


@runtime_checkable
class Drafter(Protocol):
    """Protocol of models that draft several tokens for another model, the target, from its hidden states and cache."""

    def check_target(self, target: Any) -> None:
        """Raises ValueError if this drafter does not fit the target model."""
        ...

    def draft(
        self, target: Any, hidden: Float[Array, "B 1 D"], token: Int[Array, " B"], cache: Cache, *, count: int
    ) -> Int[Array, "B N"]:
        """Returns `count` drafts of the tokens after `token`.

        Args:
            target: The target model.
            hidden: The target's output at the last token of `cache`.
            token: The next token.
            cache: The target's cache.
            count: Number N of drafts.
        """
        ...


class MTP(nnx.Module):
    """Module that predicts one token further: `norm(block(project([embed_norm(next token), hidden_norm(hidden)])))`.

    Args:
        dim: Width D of the model.
        block: A layer as in a stack.
        eps: Epsilon of the three norms.
        plus_one: True if the norms multiply by `1 + scale`, as in `RMSNorm`.
        rngs: Source of initial values.
    """

    def __init__(self, dim: int, *, block: nnx.Module, eps: float = 1e-6, plus_one: bool = False, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, dim, eps=eps, plus_one=plus_one)
        self.embed_norm, self.hidden_norm = norm(), norm()
        self.project = Einsum("...F,DF->...D", (dim, 2 * dim), ("embed", "mlp"), rngs=rngs)
        self.block: Any = block
        self.norm = norm()

    def __call__(
        self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], ctx: Context, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Any]]:
        """Applies the module.

        Args:
            hidden: Output of the model or of the previous module.
            embedded: Vectors of the tokens that follow the inputs of `hidden`.
            ctx: Values shared by all layers.
            cache: The block's cache, or None.

        Returns:
            The new `hidden`, the block's cache and its `aux`.
        """
        # [B, T, D] twice -> [B, T, 2 D]; projected back to [B, T, D].
        x = jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        x, cache, aux = self.block(constrain(self.project(x), "batch", "seq", "act_embed"), ctx, cache)
        return self.norm(x), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> Any:
        """Makes an empty cache of the module's block."""
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
    ropes: tuple[AnyRope, ...] = (),
    remat: Policy = None,
) -> list[MTPOutput]:
    """Runs one module after the other on the model's final `hidden`.

    Each module takes tokens one position further ahead, and never tokens of another document.

    Args:
        modules: The MTP modules.
        embed: Maps ids to vectors, as the model's `Embed` does.
        hidden: The model's output after the final norm.
        tokens: Ids.
        positions: Positions for rotary tables.
        segment_ids: Packed document of each token, 0 for padding.
        valid: False for padding.
        ropes: Rotary embeddings of the modules.
        remat: What modules keep for the backward pass; None keeps all.

    Returns:
        One output per module.
    """
    # This context only gives the bounds of documents; each module gets its own.
    documents = make_context(*tokens.shape, segment_ids=segment_ids, valid=valid)
    positions = documents.positions if positions is None else positions
    outputs = []
    for depth, module in enumerate(modules, start=1):
        # Token i + depth must exist in the same document.
        known = documents.index + depth < documents.stop
        ids = jnp.where(known, documents.start + 1, 0)  # the last tokens of a document become padding
        ctx = make_context(*tokens.shape, positions=positions, segment_ids=ids, masks=(Causal(),), ropes=ropes)

        def run(module: MTP, hidden: Array, embedded: Array, ctx: Context = ctx) -> Any:
            return module(hidden, embedded, ctx)

        if remat is not None:
            run = jax.checkpoint(run, policy=remat_policy(remat))
        # Module k gets token i + k at position i.
        hidden, _, aux = run(module, hidden, embed(shift_left(tokens, depth, fill=0), dtype=hidden.dtype))
        outputs.append(MTPOutput(hidden, known, aux))
    return outputs


def shift_left(x: Shaped[Array, "B T"], places: int, *, fill: int) -> Shaped[Array, "B T"]:
    """Shifts an array of tokens left by `places` and fills the end with `fill`."""
    return jnp.pad(x[:, places:], ((0, 0), (0, min(places, x.shape[1]))), constant_values=fill)
