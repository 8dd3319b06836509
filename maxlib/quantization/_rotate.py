"""Rotates the residual stream, so that no channel has outliers (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).

An RMS norm without a weight commutes with rotations. So the weights of norms move into the matmuls that read them, and
every matrix is multiplied along its axis of the residual stream by the same orthogonal matrix: the model computes what
it did.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.quantization._blocks import hadamard
from maxlib.quantization._scales import Link, by_layer, without_weight

_TRIAL = (2, 16)  # rows and tokens of the text that shows what reads a norm, and that nothing changed
_TOLERANCE = 1e-3  # of the largest logit


def rotate(model: Any, key: Array) -> Any:
    """Returns a model that computes the same, with rotated activations between its layers; works in float32.

    A head that is tied to the embedding becomes a matrix of its own, because the last norm's weight moves into it.

        small = quantization.gptq(quantization.rotate(model, jax.random.key(0)), [tokens], "int4")

    Args:
        model: An `nn.Decoder` in full precision, with RMS norms before its branches, that reads text.
        key: Key of the random signs. The matrix is a Hadamard matrix of the largest power of two that divides the
            width, times (Kronecker) a random orthogonal matrix of the rest.

    Raises:
        ValueError: when the model cannot be rotated: norms have a bias or a mean, or stand after a branch.
    """
    plain: Any = nn.cast(model, jnp.float32)
    tokens = jax.random.randint(jax.random.key(0), _TRIAL, 0, plain.embed.w.shape[0])
    new = _without_weights(plain, tokens)
    rotation = _orthogonal(plain.embed.w.shape[-1], np.random.default_rng(np.asarray(jax.random.key_data(key))))
    rotated = {
        path: _along(variable[...], variable.get_metadata().get("axes", ()), rotation)
        for path, variable in nn.variables(new).items()
    }
    new = nn.combine(rotated, new)
    before, after = (m.logits(m(tokens, dtype=jnp.float32).hidden) for m in (plain, new))
    if not float(jnp.abs(before - after).max()) < _TOLERANCE * float(jnp.abs(before).max()):
        raise ValueError(
            f"this {type(model).__name__} cannot be rotated: its residual stream must be read by RMS norms without a bias "
            "alone, each followed by matmuls, and written by matmuls alone, without norms after them"
        )
    return nn.cast(new, model.embed.w.dtype)


def _without_weights(model: Any, tokens: Array) -> Any:
    """Returns a model whose norms of the residual stream have moved their weights into matmuls."""

    def change(i: int, layer: Any, links: Sequence[Link], records: Any) -> Any:
        return functools.reduce(without_weight, links, layer)

    new = by_layer(model, [tokens], change, jnp.float32)
    if isinstance(model.norm, nn.RMSNorm):
        weight = model.norm.scale[...] + (1.0 if model.norm.plus_one else 0.0)
        head = jax.tree.map(lambda a: a, model.head or model.embed)
        head.w = head.w.replace(head.w[...] * weight[None])
        new.head, new.norm = nnx.data(head), jax.tree.map(lambda a: jnp.ones_like(a) - model.norm.plus_one, model.norm)
        if model.head is None:
            new.cfg = dataclasses.replace(model.cfg, tied=False)
    return new


def _orthogonal(size: int, random: np.random.Generator) -> Float[np.ndarray, "D D"]:
    """Returns an orthogonal matrix that spreads every channel over all of them."""
    power = size & -size  # the largest power of two that divides it
    rest = np.linalg.qr(random.standard_normal((size // power, size // power)))[0]
    return np.kron(hadamard(power) / np.sqrt(power), rest) * random.choice([-1.0, 1.0], size)[:, None]


def _along(value: Array, axes: tuple[str, ...], rotation: np.ndarray) -> Array:
    """Multiplies an array by a matrix along the axis of the residual stream, if it has one."""
    of_stream = [axis for axis, name in enumerate(axes) if name in ("embed", "expert_embed")]
    if not of_stream or value.shape[of_stream[0]] != len(rotation):
        return value
    (axis,) = of_stream
    product = jnp.tensordot(value, jnp.asarray(rotation, value.dtype), axes=(axis, 0), precision="highest")
    return jnp.moveaxis(product, -1, axis)
