"""Models small enough to test with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import ops
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
    """Built under jit, so that initial values do not depend on how eager ops round."""
    cfg = dataclasses.replace(LLAMA, **changes)
    return jax.jit(lambda: llama.Llama(cfg, rngs=nnx.Rngs(seed)))()


def tokens(batch: int, seq: int, *, vocab: int = LLAMA.vocab, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (batch, seq)), jnp.int32)
