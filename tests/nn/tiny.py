"""Models small enough to test with."""

import dataclasses
import functools

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


def tiny_llama(seed: int = 0, **changes) -> llama.Llama:
    """Built under jit, so that initial values do not depend on how eager ops round; compiled once a process."""
    return _initial(dataclasses.replace(LLAMA, **changes), seed)()


@functools.cache
def _initial(cfg: llama.Config, seed: int):
    return jax.jit(lambda: llama.Llama(cfg, rngs=nnx.Rngs(seed)))


def filled(make, seed: int = 0):
    """Random parameters, norms of one and zeros for the rest, without compiling what `make` builds."""
    params, rest = nn.partition(jax.eval_shape(make))
    random = np.random.default_rng(seed)
    values = lambda path, x: np.ones(x.shape) if path.endswith("scale") else 0.3 * random.normal(size=x.shape)
    zeros = jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), rest)
    return nn.combine({path: jnp.asarray(values(path, x), x.dtype) for path, x in params.items()}, zeros)


def tokens(batch: int, seq: int, *, vocab: int = LLAMA.vocab, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (batch, seq)), jnp.int32)
