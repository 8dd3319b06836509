"""The arguments of an implementation of attention."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from maxlib.ops._attention.masks import MaskHint

Results = tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"] | None]
"""The output, and the log-sum-exp of each row's logits; None where an implementation does not differentiate it."""


class AttentionInputs(NamedTuple):
    """Arguments of an implementation of attention, which `ops.attention` has checked.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        start: Index of the first key that each query attends to.
        end: One past the index of the last key; it may be out of range.
        scale: Factor on the products of queries and keys.
        softcap: Bound of the logits, or None.
        sinks: An extra logit per head, without a value.
        bias: Added to the logits.
        mask_hint: Static description of the intervals, for implementations that take it.
    """

    q: Float[Array, "B T N Hk"]
    k: Float[Array, "B S K Hk"]
    v: Float[Array, "B S K Hv"]
    start: Int[Array, "B T"]
    end: Int[Array, "B T"]
    scale: float
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    bias: Float[Array, "#B #N T S"] | None = None
    mask_hint: MaskHint | None = None
