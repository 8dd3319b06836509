"""Protocols of models: the output of a forward pass, and the methods that trainers and generators call."""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._pytree import pytree
from maxlib.nn.cache import Cache
from maxlib.nn.remat import Policy


@pytree
class Output:
    """Output of a forward pass.

    Attributes:
        hidden: `B T D` after the final norm.
        cache: The new cache; None without one.
        aux: Arrays by name, with a row per layer. Those named `loss/...` are added to the training loss; all others are
            metrics.
    """

    hidden: Float[Array, "B T D"]
    cache: Cache | None
    aux: dict[str, Any]

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes

        def __getattr__(self, name: str):
            hint = "call model.logits(output.hidden)" if name == "logits" else "its hidden states are output.hidden"
            raise AttributeError(f"an Output has no {name}: {hint}")


@runtime_checkable
class Model(Protocol):
    """Protocol of models (docs/decisions.md): any pytree with these methods can be trained, sharded, saved and used
    to generate.

    Attributes:
        softcap: `c` in `c * tanh(logits / c)`; None leaves logits as they are.
    """

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
    """Protocol of models whose `__call__` takes images, in addition to `Model`."""

    def check_images(self, tokens: Int[Any, "B T"], images: Any) -> None:
        """Raises ValueError when placeholders among `tokens` and `images` do not match, or the model reads text
        only.
        """
        ...
