"""Models small enough to test with."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import nn, ops
from maxlib.models import llama

LLAMA = llama.Config(
    vocab=61,
    num_layers=5,
    dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    rope=ops.Rope(12, theta=10_000.0),
)


def filled(make: Callable[[], Any], seed: int = 0) -> Any:
    """Builds `make()` with random parameters without compiling: matrices, and vectors near one. Other variables are
    zero, but factors (Gemma 4 has one for each layer) are one.
    """
    rng = np.random.default_rng(seed)
    model = jax.eval_shape(make)
    axes = nn.tree.axes(model)
    for path, variable in nn.variables(model).items():
        x, is_matrix = variable.get_value(), len(nn.tree.own_axes(axes[path])) > 1
        value = rng.normal(size=x.shape) * (0.15 if is_matrix else 0.1) + (not is_matrix)
        fixed = np.full(x.shape, float("norm" in nn.tree.own_axes(axes[path])))
        value = value if isinstance(variable, nnx.Param) else fixed
        variable.set_value(jnp.asarray(value.astype(x.dtype)))  # cast by JAX, each shape would compile
    return model


def filled_llama(seed: int = 0, **changes) -> llama.Llama:
    """`tiny_llama` with other initial values, at once."""
    cfg = dataclasses.replace(LLAMA, **changes)
    return filled(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)), seed)


def tiny_llama(seed: int = 0, **changes) -> llama.Llama:
    """Built under jit, so that initial values do not depend on how eager ops round; compiled once a process."""
    return _initial(dataclasses.replace(LLAMA, **changes), seed)()


@functools.cache
def _initial(cfg: llama.Config, seed: int):
    return jax.jit(lambda: llama.Llama(cfg, rngs=nnx.Rngs(seed)))


def tokens(batch: int, seq: int, *, vocab: int = LLAMA.vocab, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (batch, seq)).astype(np.int32))
