"""The base class of sequence mixers: other code asks for their properties instead of checking types."""

from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib.nn.cache import is_quantized
from maxlib.nn.decoder._context import Context
from maxlib.ops import BlockCausal, Mask, attention_implementations
from maxlib.sharding.pipelining import stages
from maxlib.sharding.strategies import SplitSequence

Traffic = dict[str, float]


class SequenceMixer(nnx.Module):
    """Base class of layers that mix the tokens of a sequence: attention, recurrences, convolutions.

    A mixer is called as `mixer(x, ctx, cache) -> (y, cache)` with `x` and `y` of shape `B T D`. It respects documents
    (`ctx.start`, `ctx.stop`), padding (`ctx.valid`), and with a cache the number of earlier tokens (`ctx.length`) and
    of real new tokens (`ctx.num_new`), which precede padding. The default flags are those of a recurrence, which
    are correct, though slow, for any layer; methods without a safe default raise.

    Attributes:
        op: Op of `maxlib.ops` whose implementation `with_implementation` chooses, such as "attention".
        reorderable: True if the layer supports tokens in any order, given by `ctx.index`. A `Decoder` then reorders
            tokens so that all devices of a split sequence have equal work under a causal mask (zigzag).
        quantizable_cache: True if `init_cache` accepts int8 and float8.
        probes_scores: True if `queries_and_keys` is implemented.
        takes_position_bias: True if its scores are those of `ctx.position_bias` too, or not those of self-attention.
        takes_pairs: True if it supports masks with pairs of rows (`ops.BlockCausal`).
        kind: Its name in tables, such as "GQA"; None means the name of the class.
        features: Labels, for tables, of the options that distinguish it from others of its kind.
    """

    op: ClassVar[str | None] = None
    reorderable: ClassVar[bool] = False
    quantizable_cache: ClassVar[bool] = False
    probes_scores: ClassVar[bool] = False
    takes_position_bias: ClassVar[bool] = False
    takes_pairs: ClassVar[bool] = False
    kind: ClassVar[str | None] = None
    features: ClassVar[tuple[str, ...]] = ()

    def __call__(self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: Any = None) -> tuple[Array, Any]:
        """Mixes the tokens of each document; see the class."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(x, ctx, cache) -> (y, cache)")

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Makes an empty cache: a pytree whose arrays begin with the axis `batch`, see `nn.cache.LayerCache`."""
        raise NotImplementedError(f"{type(self).__name__} must define init_cache(batch, capacity, dtype) to decode")

    def with_implementation(self, implementation: str | None) -> "SequenceMixer":
        """Returns a copy that shares its arrays and computes its op with `implementation`; None means the best one."""
        # A new module with the same arrays; assigning to it does not change `self`.
        new = jax.tree.map(lambda a: a, self)
        new.implementation = implementation
        return new

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes that a device sends in a training step because sequences are split over devices.

        Returns:
            Bytes by kind of collective, such as `{"all-gather": 2.0e6}`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define traffic(split) for plans with sequences split over devices: the "
            "bytes by kind of collective, {} if nothing is sent"
        )

    def queries_and_keys(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Array, Array]:
        """Returns queries `B T N H` and keys `B T K H` whose products, times `scale`, are scores under `mask`."""
        raise NotImplementedError(f"{type(self).__name__} has no attention scores")


def mixers(model: Any) -> Iterator[SequenceMixer]:
    """Yields all mixers of a model or a part of it; layers that are scanned together yield one mixer."""
    return (module for _, module in nnx.iter_modules(model) if isinstance(module, SequenceMixer))


def is_reorderable(layer: Any) -> bool:
    """Returns True if a layer supports reordered tokens.

    A layer may declare it by an attribute `reorderable`. Otherwise its mixers decide. A layer without mixers is assumed
    to need tokens in order, because it may mix them by other means.
    """
    if not isinstance(layer, SequenceMixer) and (declared := getattr(layer, "reorderable", None)) is not None:
        return declared
    # all([]) is True, but a layer without a mixer is assumed to need tokens in order.
    inner = list(mixers(layer))
    return bool(inner) and all(mixer.reorderable for mixer in inner)


def check_order(stack: Any, ctx: Any) -> None:
    """Raises ValueError if tokens were reordered (zigzag) for layers that need them in order."""
    if getattr(ctx, "zigzag", False) and not stack.is_reorderable:
        names = sorted({type(mixer).__name__ for mixer in mixers(stack) if not mixer.reorderable})
        raise ValueError(
            f"tokens are in zigzag order, but {', '.join(names) or 'layers without a SequenceMixer'} must get them in "
            "natural order: omit `zigzag_shard`, as nn.Decoder does for such layers, or set reorderable = True on "
            "a layer that uses ctx.index"
        )


def check_position_bias(stack: Any, ctx: Any) -> None:
    """Raises ValueError if there is a position bias that attention of a layer would leave out."""
    if getattr(ctx, "position_bias", None) is None:
        return
    others = {type(m).__name__ for m in mixers(stack) if m.op == "attention" and not m.takes_position_bias}
    if others:
        raise ValueError(
            f"{', '.join(sorted(others))} does not add a position bias to its scores: use nn.Attention, or no position_bias"
        )


def check_pairs(stack: Any, ctx: Any) -> None:
    """Raises ValueError for a mask with pairs of rows if a layer does not support it, or stages split the rows."""
    if not any(isinstance(mask, BlockCausal) and mask.pairs for mask in getattr(ctx, "masks", ())):
        return
    if others := sorted({type(mixer).__name__ for mixer in mixers(stack) if not mixer.takes_pairs}):
        raise ValueError(
            f"{', '.join(others)} does not support pairs of a text and its noisy copy: use nn.Attention, or a mask "
            "without pairs"
        )
    if stages() > 1:
        raise ValueError(
            "a pipeline would split pairs of a text and its noisy copy: use another layout, or a mask without pairs"
        )


def with_mask(model: Any, mask: Mask) -> Any:
    """Replaces the mask of all layers of a model, for example to train a decoder as a block-diffusion model:

        model = nn.with_mask(model, ops.BlockCausal(32))

    Args:
        model: The model. It is not changed, and shares its arrays with the result.
        mask: The mask of every layer.

    Raises:
        ValueError: when a layer mixes tokens in an order of its own, such as a recurrence.
    """
    if others := sorted({type(m).__name__ for m in mixers(model) if not isinstance(getattr(m, "mask", None), Mask)}):
        raise ValueError(f"every layer must have a mask, but {', '.join(others)} has none to replace")

    def is_mixer(x: Any) -> bool:
        return isinstance(x, SequenceMixer)

    def change(x: Any) -> Any:
        if not is_mixer(x):
            return x
        new = jax.tree.map(lambda a: a, x)
        new.mask = mask
        return new

    return jax.tree.map(change, model, is_leaf=is_mixer)


def block_mask(model: Any) -> BlockCausal | None:
    """Returns the mask of a block-diffusion model, None for a model without blocks.

    Args:
        model: Any model; `nn.Decoder.masks` lists its masks.

    Raises:
        ValueError: when its layers have different masks.
    """
    masks = list(getattr(model, "masks", ()))
    blocks = [mask for mask in masks if isinstance(mask, BlockCausal)]
    if not blocks and all(mask.block_size == 1 for mask in masks):
        return None
    if len(masks) > 1 or not blocks:
        raise ValueError(f"all layers must have the same mask with blocks, got {masks}; see nn.with_mask")
    return blocks[0]


def check_cache_dtype(model: Any, dtype: Any) -> None:
    """Raises ValueError if a mixer's state cannot be stored in `dtype`."""
    refusing = {type(mixer).__name__ for mixer in mixers(model) if not mixer.quantizable_cache}
    if refusing and is_quantized(dtype):
        raise ValueError(
            f"{', '.join(sorted(refusing))} cannot store a state in {jnp.dtype(dtype).name}: every token rounds it "
            "again, so errors add up. Use a floating cache dtype of two bytes or more"
        )


def with_implementation(model: Any, implementation: str | None, *, op: str) -> Any:
    """Chooses the implementation of an op in all layers of a model or a part of it, such as a stack.

    Args:
        model: The model. It is not changed, and shares its arrays with the result.
        implementation: Name of an implementation of the op; None chooses the best one.
        op: Name of the op, such as "attention".

    Raises:
        ValueError: when no layer of the model uses the op.
    """

    # Matching mixers are leaves here; everything else is passed on unchanged.
    def is_mixer(x: Any) -> bool:
        return isinstance(x, SequenceMixer) and x.op == op

    if not any(map(is_mixer, jax.tree.leaves(model, is_leaf=is_mixer))):
        raise ValueError(f"{type(model).__name__} has no layer (nn.SequenceMixer) whose op is {op!r}")
    return jax.tree.map(lambda x: x.with_implementation(implementation) if is_mixer(x) else x, model, is_leaf=is_mixer)


def with_attention(model: Any, implementation: str | None) -> Any:
    """Chooses the implementation of `ops.attention` in all layers of a model.

    Args:
        model: The model. It is not changed, and shares its arrays with the result.
        implementation: As in `ops.attention`: a name, None for the best one, or "offline".

    Raises:
        ValueError: when no layer of the model uses attention, or no implementation has this name.
    """
    names = sorted(kernel.name for kernel in attention_implementations())
    if implementation not in (None, "offline", *names):
        raise ValueError(f"implementation must be None or one of {', '.join(names)}, got {implementation!r}")
    return with_implementation(model, implementation, op="attention")
