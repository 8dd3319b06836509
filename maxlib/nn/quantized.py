"""Weights stored in fewer bits."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jaxtyping import Array, Float, Num

FOUR_BITS = ("int4", "nf4")  # two values per byte, the first in the low half
# The values of nf4 (arXiv:2305.14314, appendix E).
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class QuantizedWeight(nnx.Module):
    """A weight stored as `values * scale`, with a scale per output, or per group of inputs; `w[...]` is its matrix.

    With zero points, one for each scale, the matrix is `(values - zeros) * scale`. The arrays are not Params, so no
    optimizer trains them.

    Args:
        w: The weight.
        qtype: int8, int4, nf4 (Dettmers et al. 2023, arXiv:2305.14314) or a float8 dtype of jax.numpy.
        outputs: Output dimensions, which have separate scales.
        group: Number of neighbours in the last dimension that share a scale, in bfloat16; None uses one float32 scale
            for all inputs of an output.
        axes: Names of the dimensions, as for a Param.
        summed: Names of the dimensions that are summed over, as for a Param.
        symmetric: False spreads the values from the least to the largest of a group, by a zero point; int8 and int4.
    """

    def __init__(
        self,
        w: Float[Array, "..."],
        *,
        qtype: str,
        outputs: Collection[int],
        group: int | None,
        axes: tuple[str, ...],
        summed: tuple[str, ...] | None = None,
        symmetric: bool = True,
    ):
        last = w.ndim - 1
        q = qwix.quantize(
            w.astype(jnp.float32),
            _dtype(qtype),
            # With groups every other dimension has separate scales, so that a group has no more than `group` values.
            channelwise_axes=tuple(outputs) if group is None else range(last),
            tiled_axes={} if group is None else {last: group},
            calibration_method="absmax" if symmetric else "minmax",
            scale_dtype=jnp.float32 if group is None else jnp.bfloat16,
        )
        # [..., N] -> [..., N / 2] bytes
        values = pack(q.qvalue) if qtype in FOUR_BITS else q.qvalue
        # Values that share a scale are not split over devices: no rule names the axis "scale".
        scale_axes = tuple(
            "scale" if n < size else name for n, size, name in zip(q.scale.shape, w.shape, axes, strict=True)
        )
        self.values, self.scale = nnx.Variable(values, axes=axes), nnx.Variable(q.scale, axes=scale_axes)
        zeros = q.zero_point
        self.zeros = None if zeros is None else nnx.Variable(zeros.astype(jnp.int8), axes=scale_axes)
        self.qtype, self.group, self.summed, self.dtype = qtype, group, summed, w.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the matrix, after a stack's leading axis if it has one."""
        *rest, last = self.values.get_value().shape
        return (*rest, 2 * last if self.is_packed else last)

    @property
    def is_packed(self) -> bool:
        """Returns True if a byte has two values, as it is stored."""
        # An array of booleans stands for values that are absent (`inference.Generator.update`).
        return self.qtype in FOUR_BITS and self.values.get_value().dtype in (jnp.uint8, jnp.bool_)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of values, scales and zero points."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self))

    def widened(self, dtype: Any) -> "QuantizedWeight":
        """Returns the weight with unpacked values in another dtype, for devices that multiply it faster."""
        new, values = jax.tree.map(lambda a: a, self), self.values.get_value()
        # Weights that an update lacks are arrays of numpy, which take no memory.
        is_absent = isinstance(values, np.ndarray)
        wide = np.broadcast_to(False, self.shape) if is_absent else self.quantized().qvalue.astype(dtype)
        new.values = self.values.replace(wide)
        return new

    def restored(self) -> nnx.Param:
        """Returns the dequantized parameter, in its original dtype."""
        metadata: dict[str, Any] = {} if self.summed is None else {"summed": self.summed}
        return nnx.Param(self[...].astype(self.dtype), axes=self.values.get_metadata()["axes"], **metadata)

    def quantized(self) -> qwix.QArray:
        """Returns the weight as an unpacked qwix array."""
        values = self.values.get_value()
        values = unpack(values, self.qtype) if self.is_packed else values
        zeros = None if self.zeros is None else self.zeros.get_value()
        return qwix.QArray(values, self.scale.get_value().astype(jnp.float32), zeros, _dtype(self.qtype))

    def __getitem__(self, index: Any) -> Float[Array, "..."]:
        """Returns the matrix in float32, indexed."""
        return self.matrix(jnp.float32)[index]

    def matrix(self, dtype: Any) -> Float[Array, "..."]:
        """Returns the matrix `values * scale`, or `(values - zeros) * scale`, in `dtype`, rounded once."""
        low = self.quantized()
        # Integers and scales of groups are exact in bfloat16: there XLA for TPUs makes no copy in float32.
        is_exact = jnp.issubdtype(low.qvalue.dtype, jnp.signedinteger) and self.scale.get_value().dtype == dtype
        kind = dtype if is_exact else jnp.float32
        values = _nf4(low.qvalue) if self.qtype == "nf4" else low.qvalue.astype(kind)
        if low.zero_point is not None:
            values = values - _spread(low.zero_point.astype(kind), values.shape)
        return (values * _spread(low.scale.astype(kind), values.shape)).astype(dtype)


def _spread(x: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Repeats what groups share over their values; a dimension of size 1 broadcasts."""
    for dim, (count, size) in enumerate(zip(x.shape, shape, strict=True)):
        if 1 < count < size:  # [..., I / g] -> [..., I]
            x = jnp.repeat(x, size // count, axis=dim)
    return x


def _dtype(qtype: str) -> Any:
    """Returns the quantized type in qwix's notation."""
    return qtype if qtype == "nf4" else jnp.dtype(qtype)


def _nf4(codes: Num[Array, "..."]) -> Float[Array, "..."]:
    """Returns the values of codes, without a table lookup, which XLA for TPUs does element by element."""
    values = [jnp.float32(value) for value in _NF4]
    for bit in range(4):
        is_odd = (codes.astype(jnp.uint8) >> bit) & 1 == 1
        values = [jnp.where(is_odd, odd, even) for even, odd in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def pack(x: Any) -> Any:
    """Packs two 4-bit values of the last axis into a byte, the first in the low half; numpy arrays stay numpy's."""
    low, high = x[..., ::2], x[..., 1::2]
    return low.astype(jnp.uint8) & 0xF | (high.astype(jnp.uint8) & 0xF) << 4


def unpack(x: Num[Array, "... H"], qtype: str) -> Num[Array, "... N"]:
    """Undoes `pack`."""
    # [..., N / 2] -> [..., N / 2, 2] -> [..., N]
    codes = jnp.stack([x & 0xF, x >> 4], axis=-1).reshape(*x.shape[:-1], -1)
    if qtype == "nf4":
        return codes.astype(jnp.uint4)
    signed = jax.lax.bitcast_convert_type(codes << 4, jnp.int8) >> 4  # the sign bit spreads
    return signed.astype(jnp.int4)
