"""The contract of layers that mix tokens of a sequence: what they are asked instead of being listed by type."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib.nn._context import Context
from maxlib.nn.cache import is_quantized


@dataclasses.dataclass(frozen=True)
class SplitSequence:
    """A sequence that several devices share, as a plan describes it to a layer that states its traffic.

    Args:
        strategy: How attention brings it together: "ring" (keys and values travel around), "gather" (they are
            gathered) or "ulysses" (tokens are exchanged for heads).
        parts: Devices that share a sequence.
        heads: Devices that share the heads (tensor parallelism).
        rows: Sequences on a device.
        tokens: Tokens on a device.
        width: Bytes of a number in the compute dtype.
        passes: 2 for forward and backward, 3 if the forward pass is computed again.
    """

    strategy: Literal["ring", "gather", "ulysses"]
    parts: int
    heads: int
    rows: float
    tokens: float
    width: int
    passes: int


Traffic = dict[str, float]


class SequenceMixer(nnx.Module):
    """Base of layers through which tokens of a sequence act on each other: attention, recurrences, convolutions.

    A mixer is called as `mixer(x, ctx, cache) -> (y, cache)` with `x` and `y` of shape `B T D`. It keeps to what `ctx`
    says: documents (`ctx.start`, `ctx.stop`), padding (`ctx.valid`), and with a cache the number of tokens before
    (`ctx.length`) and of real new ones (`ctx.num_new`), which come first. Whoever needs to know something of a mixer
    asks it; the defaults are the answers of a recurrence, which are right, if slow, for any layer.

    Attributes:
        op: The op of `maxlib.ops` whose implementation `with_implementation` chooses, such as "attention".
        reorderable: True if tokens may stand in another order, by `ctx.index`. A `Decoder` then deals them out so that
            all devices of a split sequence have the same work under a causal mask (zigzag).
        quantizable_cache: True if `init_cache` takes int8 and float8.
        probes_scores: True if `queries_and_keys` returns something.
    """

    op: ClassVar[str | None] = None
    reorderable: ClassVar[bool] = False
    quantizable_cache: ClassVar[bool] = False
    probes_scores: ClassVar[bool] = False

    def __call__(self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: Any = None) -> tuple[Array, Any]:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(x, ctx, cache) -> (y, cache)")

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Makes an empty cache: a pytree whose arrays begin with the axis `batch`, see `nn.cache.LayerCache`."""
        raise NotImplementedError(f"{type(self).__name__} must define init_cache(batch, capacity, dtype) to decode")

    def with_implementation(self, implementation: str | None) -> "SequenceMixer":
        """Returns a copy, which shares its arrays, that computes its op so; None is the best one."""
        new = jax.tree.map(lambda a: a, self)
        new.implementation = implementation
        return new

    def traffic(self, split: SplitSequence) -> Traffic:
        """States the bytes that a device sends in a training step because it holds a part of each sequence.

        Returns:
            Bytes by kind of collective, such as `{"all-gather": 2.0e6}`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define traffic(split) for plans of sequences that several devices share: the "
            "bytes by kind of collective, {} if nothing travels"
        )

    def queries_and_keys(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Array, Array]:
        """Returns queries `B T N H` and keys `B T K H` whose products, times `scale`, are scores under `mask`."""
        raise NotImplementedError(f"{type(self).__name__} has no scores to look at")

    @property
    def kind(self) -> str:
        """Names it in tables, such as "GQA"."""
        return type(self).__name__

    def features(self) -> Iterator[str]:
        """Yields what distinguishes it from others of its kind, in words for tables."""
        yield from ()


def attention_traffic(split: SplitSequence, *, queries: int, keys: int) -> Traffic:
    """States what attention moves, as `nn.attend` brings a split sequence together.

    Args:
        split: How.
        queries: Numbers in a token's queries and results.
        keys: Numbers in a token's keys and values.
    """
    one = split.tokens * split.width / split.heads
    if split.strategy == "ulysses":  # all four are exchanged in every pass
        return {"all-to-all": split.passes * one * (queries + keys)}
    if split.strategy == "ring":  # backward with the sums of their gradients, in float32
        return {"collective-permute": (split.passes + 4 / split.width) * one * keys * split.parts}
    whole = one * keys * split.parts
    return {"all-gather": (split.passes - 1) * whole, "reduce-scatter": whole}


def mixers(model: Any) -> Iterator[SequenceMixer]:
    """Yields all mixers of a model or of a part of it; one that a stack scans comes once for all its layers."""
    return (part for _, part in nnx.iter_modules(model) if isinstance(part, SequenceMixer))


def is_reorderable(layer: Any) -> bool:
    """Tells whether all of a layer allows tokens in another order.

    A layer may say so itself by an attribute `reorderable`. Otherwise its mixers are asked, and a layer without any is
    taken for one that needs tokens in order, since it may mix them in a way of its own.
    """
    if not isinstance(layer, SequenceMixer) and (own := getattr(layer, "reorderable", None)) is not None:
        return own
    found = list(mixers(layer))
    return bool(found) and all(mixer.reorderable for mixer in found)


def check_order(stack: Any, ctx: Any) -> None:
    """Raises ValueError if tokens were reordered (zigzag) for layers that need them in order."""
    if getattr(ctx, "zigzag", False) and not stack.is_reorderable:
        names = sorted({type(mixer).__name__ for mixer in mixers(stack) if not mixer.reorderable})
        raise ValueError(
            f"tokens stand in zigzag order, but {', '.join(names) or 'layers without a SequenceMixer'} must see them in "
            "their own order: leave `zigzag_shard` out, as nn.Decoder does for such layers, or set reorderable = True on "
            "a layer that goes by ctx.index"
        )


def check_cache_dtype(model: Any, dtype: Any) -> None:
    """Raises ValueError if the state of a mixer cannot be kept in `dtype`."""
    refusing = {type(mixer).__name__ for mixer in mixers(model) if not mixer.quantizable_cache}
    if refusing and is_quantized(dtype):
        raise ValueError(
            f"{', '.join(sorted(refusing))} cannot keep a state in {jnp.dtype(dtype).name}: every token rounds it again, so "
            "errors add up. Take a floating cache dtype of two bytes or more"
        )


def with_implementation(model: Any, implementation: str | None, *, op: str) -> Any:
    """Chooses the implementation of an op in all layers of a model, or of a part of it such as a stack.

    Args:
        model: Shares its arrays with the result, and stays as it is.
        implementation: A name that the op knows; None is the best one again.
        op: The op's name, such as "attention".

    Raises:
        ValueError: No layer of the model uses that op.
    """
    is_mixer = lambda x: isinstance(x, SequenceMixer) and x.op == op
    if not any(map(is_mixer, jax.tree.leaves(model, is_leaf=is_mixer))):
        raise ValueError(f"{type(model).__name__} has no layer (nn.SequenceMixer) whose op is {op!r}")
    choose = lambda layer: layer.with_implementation(implementation) if is_mixer(layer) else layer
    return jax.tree.map(choose, model, is_leaf=is_mixer)


def with_attention(model: Any, implementation: str | None) -> Any:
    """Chooses the implementation of `ops.attention` in a whole model; see `with_implementation`."""
    return with_implementation(model, implementation, op="attention")
