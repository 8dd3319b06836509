"""Gated short convolution (LFM2, Liquid AI 2025, arXiv:2511.23404): a token mixer over the last few tokens.

Shapes: B rows, T new tokens, D width, W taps of the convolution.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import ops
from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
from maxlib.nn.cache import LayerCache
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.recurrent._common import gather_traffic, over_sequence, taps
from maxlib.sharding import constrain
from maxlib.sharding.layers import AllGatherArg

_CHANNELS = ("batch", "seq", "act_mlp")
_TAIL = ("batch", None, "act_mlp")


@pytree
class ConvCache(LayerCache):
    """Cache of a short convolution: its last inputs. Its size does not depend on the number of tokens, and it cannot be
    rewound.

    Attributes:
        tail: The last W - 1 inputs, `B W-1 D`.
    """

    kind: ClassVar[str | None] = "state"

    tail: Float[Array, "B U D"]


class ShortConvolution(SequenceMixer):
    """Gated short convolution: `out(out_gate(x) * conv(in_gate(x) * value(x)))`, without activations.

    Each channel has its own filter. Padding and other documents of a row have no effect. Tokens must be in order:
    devices that share a sequence pass their last inputs on (`ops.short_convolution`), and zigzag order raises an error.

    Args:
        dim: Width D of the residual stream, and number of channels.
        conv_width: Number W of taps.
        bias: True adds biases to the projections and to the convolution.
        rngs: Source of initial values.

    Raises:
        ValueError: when `conv_width` is below 2.
    """

    kind: ClassVar[str | None] = "gated short convolution"

    def __init__(self, dim: int, *, conv_width: int = 3, bias: bool = False, rngs: nnx.Rngs):
        D, W = dim, conv_width
        self.in_gate = Einsum("...D,FD->...F", (D, D), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.out_gate = Einsum("...D,FD->...F", (D, D), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.value = Einsum("...D,FD->...F", (D, D), ("mlp", "embed"), bias=bias, rngs=rngs)
        self.conv = taps((D, W), ("mlp",), rngs)
        self.conv_bias = nnx.Param(jnp.zeros(D), axes=("mlp",)) if bias else None
        self.o = Einsum("...F,DF->...D", (D, D), ("embed", "mlp"), bias=bias, rngs=rngs)
        self.dim, self.conv_width = D, W

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: ConvCache | None = None
    ) -> tuple[Float[Array, "B T D"], ConvCache | None]:
        """Mixes neighbouring tokens of each document.

        Args:
            x: Input, `B T D`.
            ctx: Values shared by all layers (`nn.make_context`); None treats each row as one document from position 0.
            cache: Inputs of the convolution of earlier tokens, or None.

        Returns:
            The output, `B T D`, and the cache after the new tokens (None without one).
        """
        ctx = context_of(x, ctx)
        # [B, T, D] -> [B, T, D], three times; channels are split like the hidden width of an MLP.
        gated = constrain(self.in_gate(x), *_CHANNELS) * constrain(self.value(x), *_CHANNELS)
        mixed, cache = self._convolve(checkpoint_name(gated, "v"), ctx, cache)
        return self.o(constrain(self.out_gate(x), *_CHANNELS) * mixed), cache

    def _convolve(self, x, ctx: Context, cache: ConvCache | None):
        """Applies the filters to each device's rows, channels and tokens."""
        bias = None if self.conv_bias is None else jnp.asarray(self.conv_bias[...])
        weights = [
            (jnp.asarray(self.conv[...]), AllGatherArg(("mlp", "tap"), ("act_mlp", None))),
            (bias, AllGatherArg(("mlp",), ("act_mlp",))),
        ]
        # Channels are independent: only devices that share a sequence communicate, W - 1 tokens each.
        states = [(None if cache is None else cache.tail, _TAIL)]
        out, new = over_sequence(_on_one_device, [(x, _CHANNELS), *weights], states, ctx, out=_CHANNELS)
        return out, None if new is None else ConvCache(*new)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> ConvCache:
        """Makes an empty cache for `batch` rows; its size does not depend on `capacity`."""
        return ConvCache(jnp.zeros((batch, self.conv_width - 1, self.dim), dtype))

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes of convolution inputs that devices gather in a training step."""
        return gather_traffic(split, (self.conv_width - 1) * self.dim * split.width)


def _on_one_device(x, weight, bias, tail, starts, valid, *, axis_name):
    """Convolves one device's part; returns the output and the next tail."""
    return ops.short_convolution(x, weight, bias=bias, tail=tail, is_start=starts, valid=valid, axis_name=axis_name)
