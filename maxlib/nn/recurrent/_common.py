"""Helpers of layers with a recurrent state or a short convolution: splitting of sequences, and initial values."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib.nn._initial_values import normal
from maxlib.nn._linear import draw_key
from maxlib.sharding import current
from maxlib.sharding.layers import mesh_axes


def sequence_axis(tokens: int, channels: str = "act_heads") -> tuple[str | tuple[str, ...] | None, str | None]:
    """Returns the mesh axis over which a row's tokens are split within an op, and the name of their array axis.

    Both are None if each device has whole rows: without a layout, or if the number of tokens does not divide.

    Args:
        tokens: Number of tokens of a row.
        channels: Name of the axis of heads or channels; the op uses its mesh axes for them, not for tokens.
    """
    axes = tuple(axis for axis in mesh_axes("seq") if axis not in mesh_axes(channels))
    layout = current()
    if layout is None or not axes or tokens % math.prod(layout.mesh.shape[axis] for axis in axes):
        return None, None
    return (axes[0] if len(axes) == 1 else axes), "seq"


def taps(shape: tuple[int, ...], axes: tuple[str, ...], rngs: nnx.Rngs) -> nnx.Param:
    """Draws the filters of a convolution, `channels W`, with variance one over the number of taps.

    Args:
        shape: Sizes of the channels' axes, and W.
        axes: Names of the channels' axes.
        rngs: Source of initial values.
    """
    init = normal(shape[-1] ** -0.5)
    return nnx.Param(init(draw_key(rngs), shape, jnp.float32), axes=(*axes, "tap"))


def rates(num_heads: int, rngs: nnx.Rngs) -> tuple[nnx.Param, nnx.Param]:
    """Draws the logarithm of rates in [1, 16] and the bias of time steps in [0.001, 0.1], as for Mamba-2 (Dao & Gu
    2024, arXiv:2405.21060).
    """
    # Rates are uniform, steps log-uniform: some heads forget within a few tokens, others remember thousands.
    rates, steps = jax.random.uniform(draw_key(rngs), (2, num_heads))
    step = jnp.exp(math.log(1e-3) + steps * (math.log(0.1) - math.log(1e-3)))
    # softplus(dt_bias) = step
    bias = step + jnp.log(-jnp.expm1(-step))
    return nnx.Param(jnp.log(1 + 15 * rates), axes=("heads",)), nnx.Param(bias, axes=("heads",))
