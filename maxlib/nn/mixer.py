"""The contract of sequence mixers: properties that other code asks for, instead of listing types."""

from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib.nn._context import Context
from maxlib.nn.cache import is_quantized
from maxlib.sharding.strategies import SplitSequence

Traffic = dict[str, float]


class SequenceMixer(nnx.Module):
    """Base class of layers that mix the tokens of a sequence: attention, recurrences, convolutions.

    A mixer is called as `mixer(x, ctx, cache) -> (y, cache)` with `x` and `y` of shape `B T D`. It respects documents
    (`ctx.start`, `ctx.stop`), padding (`ctx.valid`), and with a cache the number of earlier tokens (`ctx.length`) and
    of real new ones (`ctx.num_new`), which come first. The default properties are those of a recurrence: they are
    correct, though slow, for any layer.

    Attributes:
        op: Op of `maxlib.ops` whose implementation `with_implementation` chooses, such as "attention".
        reorderable: True if tokens may come in another order, given by `ctx.index`. A `Decoder` then reorders them so
            that all devices of a split sequence have equal work under a causal mask (zigzag).
        quantizable_cache: True if `init_cache` accepts int8 and float8.
        probes_scores: True if `queries_and_keys` is implemented.
    """

    op: ClassVar[str | None] = None
    reorderable: ClassVar[bool] = False
    quantizable_cache: ClassVar[bool] = False
    probes_scores: ClassVar[bool] = False

    def __call__(self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: Any = None) -> tuple[Array, Any]:
        """Mixes the tokens of each document; see the class."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(x, ctx, cache) -> (y, cache)")

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Makes an empty cache: a pytree whose arrays begin with the axis `batch`, see `nn.cache.LayerCache`."""
        raise NotImplementedError(f"{type(self).__name__} must define init_cache(batch, capacity, dtype) to decode")

    def with_implementation(self, implementation: str | None) -> "SequenceMixer":
        """Returns a copy that shares its arrays and computes its op by `implementation`; None is the best one."""
        # Rebuilds the module with the same arrays; assigning to it does not change `self`.
        new = jax.tree.map(lambda a: a, self)
        new.implementation = implementation
        return new

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes that a device sends in a training step because it has only a part of each sequence.

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
        """Returns its name in tables, such as "GQA"."""
        return type(self).__name__

    def features(self) -> Iterator[str]:
        """Yields labels for tables of options that distinguish it from others of its kind."""
        yield from ()


def mixers(model: Any) -> Iterator[SequenceMixer]:
    """Yields all mixers of a model or of a part of it; one that is stored for a scan comes once for all its layers."""
    return (part for _, part in nnx.iter_modules(model) if isinstance(part, SequenceMixer))


def is_reorderable(layer: Any) -> bool:
    """Returns True if all parts of a layer allow tokens in another order.

    A layer may declare it by an attribute `reorderable`. Otherwise its mixers decide; a layer without any is assumed to
    need tokens in order, since it may mix them in its own way.
    """
    if not isinstance(layer, SequenceMixer) and (own := getattr(layer, "reorderable", None)) is not None:
        return own
    # all([]) is True, but a layer without a mixer needs tokens in order.
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
    """Raises ValueError if a mixer's state cannot be stored in `dtype`."""
    refusing = {type(mixer).__name__ for mixer in mixers(model) if not mixer.quantizable_cache}
    if refusing and is_quantized(dtype):
        raise ValueError(
            f"{', '.join(sorted(refusing))} cannot keep a state in {jnp.dtype(dtype).name}: every token rounds it again, so "
            "errors add up. Take a floating cache dtype of two bytes or more"
        )


def with_implementation(model: Any, implementation: str | None, *, op: str) -> Any:
    """Chooses the implementation of an op in all layers of a model, or of a part of it such as a stack.

    Args:
        model: Shares its arrays with the result, and is not changed.
        implementation: Name of an implementation of the op; None chooses the best one.
        op: Name of the op, such as "attention".

    Raises:
        ValueError: when no layer of the model uses the op.
    """
    # Treats matching mixers as leaves, so that all others, arrays included, are passed on unchanged.
    is_mixer = lambda x: isinstance(x, SequenceMixer) and x.op == op
    if not any(map(is_mixer, jax.tree.leaves(model, is_leaf=is_mixer))):
        raise ValueError(f"{type(model).__name__} has no layer (nn.SequenceMixer) whose op is {op!r}")
    choose = lambda layer: layer.with_implementation(implementation) if is_mixer(layer) else layer
    return jax.tree.map(choose, model, is_leaf=is_mixer)


def with_attention(model: Any, implementation: str | None) -> Any:
    """Chooses the implementation of `ops.attention` in all layers of a model.

    Args:
        model: Shares its arrays with the result, and is not changed.
        implementation: Name of an implementation; None chooses the best one.

    Raises:
        ValueError: when no layer of the model uses attention.
    """
    return with_implementation(model, implementation, op="attention")
