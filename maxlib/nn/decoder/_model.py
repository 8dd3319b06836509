"""Protocols of models: the output of a forward pass, the methods that trainers and generators call, and layers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Real

from maxlib.nn._pytree import pytree
from maxlib.nn.cache import Cache
from maxlib.nn.remat import Policy
from maxlib.sharding import constrain


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
class MultimodalModel(Protocol):
    """Protocol of models whose `__call__` may take more than tokens, such as `images=` or `audio=`, besides `Model`."""

    def check_inputs(self, tokens: Int[Any, "B T"], **inputs: Any) -> None:
        """Raises ValueError for an input that the model does not read, or that does not fit its placeholders.

        Args:
            tokens: Ids, with placeholders for the inputs.
            **inputs: Inputs by name; None for none.
        """
        ...


class InputCall(NamedTuple):
    """What the call of a `Decoder` has besides the value of an input.

    Attributes:
        positions: Positions for rotary tables, or None.
        segment_ids: Packed document of each token, or None.
        valid: False for padding, or None.
        cache: Cache of earlier tokens, or None.
        dtype: Dtype of the computation.
        remat: What layers of an encoder keep for the backward pass.
    """

    positions: Real[Array, "B T *R"] | None
    segment_ids: Int[Array, "B T"] | None
    valid: Bool[Array, "B T"] | None
    cache: Cache | None
    dtype: Any
    remat: Policy


@runtime_checkable
class Input(Protocol):
    """Protocol of what a `Decoder` reads besides tokens: vectors that take the places of placeholders among them.

    Attributes:
        moves_positions: True if positions of tokens after such an input do not count tokens.
    """

    @property
    def moves_positions(self) -> bool: ...

    def is_placeholder(self, tokens: Int[Any, "B T"]) -> Bool[Any, "B T"]:
        """Returns True for tokens that the input replaces."""
        ...

    def check(self, tokens: Int[Any, "B T"], value: Any) -> None:
        """Raises ValueError if a value, or None, does not fit the placeholders; inside jit, only for wrong shapes."""
        ...

    def embed(
        self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], value: Any, call: InputCall
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Puts the vectors of a value in place of its placeholders.

        Args:
            x: Token vectors.
            tokens: Ids.
            value: The argument of the model's call.
            call: Its other arguments.

        Returns:
            The vectors, and arguments of `nn.make_context` that the input sets.
        """
        ...


class Layer(nnx.Module):
    """Base class of a decoder layer, `layer(x, ctx, cache) -> (x, cache, aux)`, whose sequence mixer is `self.attn`.

    A subclass defines its parts and `__call__`. Its cache is that of `attn`; a layer with several mixers, or none,
    defines its own `init_cache`.

    Attributes:
        attn: The sequence mixer.
    """

    attn: Any

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> Any:
        """Returns an empty cache for `batch` rows of up to `capacity` tokens."""
        return self.attn.init_cache(batch, capacity, dtype)


def residual(
    x: Float[Array, "B T D"],
    h: Float[Array, "B T D"],
    name: str,
    *,
    norm: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]] | None = None,
) -> Float[Array, "B T D"]:
    """Adds the output of a branch to the residual stream, placed over the mesh as layers expect it.

    Args:
        x: The stream.
        h: The output of an attention or of the MLP.
        name: Name of `h` for remat policies: "attn", "cross_attn" or "mlp".
        norm: A norm of `h` after the branch; policies keep what it reads.
    """
    h = checkpoint_name(h, name)
    x = constrain(x + (h if norm is None else norm(h)), "batch", "seq", "act_embed")
    return checkpoint_name(x, "resid_mid") if name == "attn" else x
