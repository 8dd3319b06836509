"""Small recurrent layers for tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import nn
from tests.nn.tiny import filled

DIM, SEQ = 16, 80
X = np.random.default_rng(0).normal(size=(2, SEQ, DIM)).astype(np.float32)
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [3, 64, 9, 4], axis=1).astype(np.int32)
DELTA = {"num_heads": 4, "num_key_heads": 2, "key_dim": 8, "value_dim": 6}
KIMI = {"num_heads": 4, "head_dim": 8}
MAMBA = {"num_heads": 4, "head_dim": 6, "state_dim": 8}
# Mamba with one group for all heads, and with two groups and another order of gate and norm.
KINDS = {
    "delta": functools.partial(nn.GatedDeltaNet, **DELTA),
    "kimi": functools.partial(nn.KimiDeltaAttention, **KIMI),
    "mamba": functools.partial(nn.Mamba2, **MAMBA),
    "groups": functools.partial(nn.Mamba2, **MAMBA, num_groups=2, norm="norm_first", bias=True),
    "convolution": nn.ShortConvolution,
}


@functools.cache
def layer(kind: str) -> nn.SequenceMixer:
    """With rates about 0.05, so that a state which is not reset shows."""
    made = filled(lambda: KINDS[kind](DIM, rngs=nnx.Rngs(0)))
    if kind != "convolution":
        made.a_log[...] = jnp.log(0.05) + 0 * made.a_log[...]
        made.dt_bias[...] = 0 * made.dt_bias[...]
    return made


@jax.jit
def run(layer, x, segment_ids=None):
    return layer(x, nn.make_context(*x.shape[:2], segment_ids=segment_ids))[0]
