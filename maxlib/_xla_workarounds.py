"""Workarounds for XLA. Each function gives its reason and the version; a test fails when it is no longer needed.

Arrays are returned unchanged: a workaround affects how a program is compiled, never its result. The tests in
tests/test_xla_workarounds.py compile the program without the workaround and expect the problem to occur.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int

from maxlib.hardware import current_device

Arrays = TypeVar("Arrays")
_FEW = 64  # rows; twice as many take equally long both ways
_LARGE = 2**16  # elements of a weight whose rearranging takes time


def run_once_later(inputs: Any) -> tuple[Int[Array, ""], Any]:
    """Returns 1 as a trip count that XLA cannot see, and `inputs`, which the loop must use.

    XLA (jax 0.10.2) unrolls a loop that runs once. Its body can then move to where its operands are ready: an
    optimizer's update would copy all moments from the host before the backward pass and keep them on the device.
    """
    return lax.optimization_barrier((jnp.int32(1), inputs))


def cast_before_moving(x: Arrays) -> Arrays:
    """Returns `x`, and prevents XLA from postponing its cast to a narrower dtype until after communication.

    XLA (jax 0.10.2) swaps a cast to bfloat16 and the following all-gather, which then sends twice the bytes.
    """
    return lax.optimization_barrier(x)


def together(*arrays: Any) -> Any:
    """Returns the arrays, and prevents using any of them before all are computed.

    XLA for TPUs (libtpu 0.0.42) postpones the sum of a head's gradient over devices to the end of the step, and keeps
    the whole gradient (8 GiB for a large model) while the layers need all memory.
    """
    return lax.optimization_barrier(arrays)


def after(arrays: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    """Returns `arrays`, which are not available before `others` are computed.

    XLA for TPUs (libtpu 0.0.51) puts off the gradients of weights while there is room. In a loop over periods of layers
    it then keeps the weights, rows and gradients of rows of most layers of a period at once.
    """
    # The narrow copies are never used, and those of gradients that were just cast from it are no copies. The others
    # themselves do not pass the barrier, so that they are still written to where a loop collects them.
    narrow = min((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize, default=None)
    return lax.optimization_barrier((arrays, [array.astype(narrow) for array in others]))[0] if arrays else arrays


def keep_float32(weight: jax.Array) -> jax.Array:
    """Returns a float32 `weight` whose cast to bfloat16 stays in the loop that does it.

    XLA for TPUs (libtpu 0.0.42) otherwise casts a stack of layers before the loop over them, and keeps bfloat16 copies
    of all layers.
    """
    # float32 -> uint32 -> float32 with a barrier between: XLA cannot move a cast to bfloat16 across it.
    bits = lax.optimization_barrier(lax.bitcast_convert_type(weight, jnp.uint32))
    return lax.bitcast_convert_type(bits, jnp.float32)


def row_major(weight: jax.Array) -> jax.Array:
    """Returns `weight`, pinned to row-major order in memory.

    XLA for GPUs (jax 0.10.2) transposes every layer of a sharded stack, in float32, before the loop over them: it
    prefers the dimension that it gathers to be the outermost.
    """
    return with_layout_constraint(weight, Layout(tuple(range(weight.ndim))))


def gradient_as_stored(table: Array, parts: tuple[int, int]) -> Array:
    """Returns a table of rows, whose gradient has the order of dimensions in memory that the table has on a TPU.

    A TPU stores a matrix in the order that needs less padding, often columns first where a device has few of them. The
    gradient of a lookup has rows first, and XLA for TPUs (libtpu 0.0.51) then updates table and moments in that order:
    it copies all three before the update and back after it. Now it copies the gradient.

    Args:
        table: The table, `V D`.
        parts: Numbers of parts into which devices split its rows and its columns.
    """
    rows, columns = (-(-size // n) for size, n in zip(table.shape, parts, strict=True))
    columns_first = _padded(columns, rows) < _padded(rows, columns)
    return _with_columns_first(table) if columns_first and current_device()[0] == "tpu" else table


def _padded(rows: int, columns: int) -> int:
    """Returns how many numbers a TPU stores for a matrix in tiles of 8 x 128."""
    return -(-rows // 8) * 8 * -(-columns // 128) * 128


@jax.custom_vjp
def _with_columns_first(table: Array) -> Array:
    return table


_with_columns_first.defvjp(
    lambda table: (table, None), lambda _, gradient: (with_layout_constraint(gradient, Layout((1, 0))),)
)


def for_each_token(weight: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts a weight to the shape of activations; its gradient is a sum over all leading axes.

    With axes of one before the weight, the gradient of a single row is a sum over tokens that keeps the axis of rows.
    For that sum XLA for CPUs takes a hundred times as long (jax 0.10.2; no longer in 0.12).
    """
    return jnp.broadcast_to(weight, shape)


def last_axis_first(weight: Array) -> Array:
    """Returns `weight` with its last axis first, on CPUs as a matmul by the identity.

    In a loop over layers, XLA for CPUs (jax 0.10.2) moves the slice of a layer's weight into the loops that read it,
    and then does not vectorize them: a short convolution takes eight times as long. It does not move a matmul.
    """
    if current_device()[0] != "cpu":
        return jnp.moveaxis(weight, -1, 0)
    return jnp.einsum("wu,...w->u...", jnp.eye(weight.shape[-1], dtype=weight.dtype), weight, precision="highest")


def stored(a: Array) -> Array:
    """Returns vectors `... D`, computed once and stored; on CPUs as a matmul by the identity.

    XLA for CPUs (jax 0.10.2) fuses cheap operations into all that use them. The update of a recurrent state would
    convolve queries, keys and values again for each number of the state. It does not fuse a matmul. There an infinite
    number makes its vector NaN.
    """
    if current_device()[0] != "cpu":
        return a
    return jnp.einsum("...d,de->...e", a, jnp.eye(a.shape[-1], dtype=a.dtype), precision="highest")


def inner(a: Array, b: Array) -> Array:
    """Sums `a * b` over the last axis, `... D` to `...`; on CPUs as a matmul.

    XLA for CPUs (jax 0.10.2; no longer 0.12) computes a sum of products one number at a time, and takes up to eighty
    times as long.
    """
    if current_device()[0] != "cpu":
        return jnp.sum(a * b, axis=-1)
    return jnp.einsum("...d,...d->...", a, b, precision="highest")


def scaled(a: Array, factor: Array) -> Array:
    """Multiplies each vector of `... D` by its factor, `...`. On CPUs the factor's gradient is an `inner`, too."""
    if current_device()[0] != "cpu":
        return a * factor[..., None]
    return jnp.einsum("...d,...->...d", a, factor, precision="highest")


def multiply_few(rows: Array, weight: Array) -> Array:
    """Multiplies rows `M I` by a weight `O I` to `M O`; few rows on CPUs as the second operand.

    XLA for CPUs (jax 0.10.2) rearranges the second operand of a product in every call, which takes as long as the
    products of 16 rows themselves. A vector, a small weight, and a weight for many rows are multiplied as they are.
    """
    if current_device()[0] != "cpu" or not 1 < len(rows) <= _FEW or weight.size < _LARGE:
        return jnp.einsum("MI,OI->MO", rows, weight)
    columns = lax.optimization_barrier(rows.T)  # or XLA exchanges the operands again
    return lax.optimization_barrier(jnp.einsum("OI,IM->OM", weight, columns)).T
