"""What a forward pass returns, and the surface that trainers and generators rely on."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._pytree import pytree
from maxlib.nn.cache import Cache
from maxlib.nn.remat import Policy


@pytree
class Output:
    """hidden: `B T D` after the final norm. cache: the new cache, None without one. aux: per-layer arrays by name;
    those named `loss/...` are added to the training loss, all others are metrics.
    """

    hidden: Float[Array, "B T D"]
    cache: Cache | None
    aux: dict[str, Any]


@runtime_checkable
class Model(Protocol):
    """The contract of docs/decisions/0001: any pytree with these methods trains, generates, saves and is sharded."""

    softcap: float | None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        cache: Cache | None = None,
        dtype: Any = jnp.bfloat16,
        remat: Policy = None,
    ) -> Output: ...

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]: ...

    def head_weight(self) -> Float[Array, "V D"]: ...

    def init_cache(
        self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None
    ) -> Cache: ...


@runtime_checkable
class VisionModel(Protocol):
    """What a model has beside the contract if its `__call__` takes images."""

    def check_images(self, tokens: Int[Any, "B T"], images: Float[Any, "I C H W"] | None) -> None:
        """Raises ValueError when the placeholders among `tokens` are not those of `images`, or the model is blind."""
        ...


@runtime_checkable
class SupportsPipelining(Model, Protocol):
    """Methods that a model has beside the contract if a 1F1B pipeline may run its parts one by one (`nn.Decoder`)."""

    layers: Any  # an `nn.Stack`

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]: ...

    def enter(self, x: Float[Array, "B T D"], **inputs: Any) -> tuple[Float[Array, "B T D"], Any]:
        """Returns what the first layer gets: `x` in its place, and the context."""
        ...

    def leave(self, x: Float[Array, "B T D"], ctx: Any) -> Float[Array, "B T D"]:
        """Returns what the head gets of the last layer's `x`."""
        ...


@runtime_checkable
class SupportsDrafting(Model, Protocol):
    """What a model has beside the contract if it drafts the token after the next, as multi-token prediction does."""

    def draft(
        self,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        *,
        cache: Cache,
        valid: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """For `logits`, at places behind those in `cache`: `hidden` is the model's own there, `tokens` the next of
        each.
        """
        ...

    def init_draft_cache(self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16) -> Cache: ...
