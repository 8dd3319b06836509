"""A model with experts that is small enough to train in tests."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn, ops, training
from tests.training.tiny import VOCAB, llama

loss = functools.partial(training.next_token_loss, dtype=jnp.float32, remat="full")


class Layer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(32)
        router = nn.Router(32, 4, top_k=2, rngs=rngs)
        self.mlp = nn.MoE(32, 16, router=router, losses=(nn.SwitchBalance(0.01),), rngs=rngs)

    def __call__(self, x, ctx, cache):
        y, aux = self.mlp(self.norm(x))
        return x + y, cache, aux


class Experts(nnx.Module):
    """A mixture of experts without attention."""

    softcap = None

    def __init__(self, num_layers: int = 2, *, rngs: nnx.Rngs):
        self.embed = nn.Embed(VOCAB, 32, rngs=rngs)
        self.layers = nn.Stack(lambda i, rngs: Layer(rngs=rngs), num_layers, rngs=rngs)
        self.head = nn.Embed(VOCAB, 32, rngs=rngs)

    def __call__(self, tokens, *, positions=None, segment_ids=None, valid=None, cache=None, dtype=None, remat=None):
        x, _, aux = self.layers(self.embed(tokens, dtype=dtype), remat=remat)
        return nn.Output(x, None, aux)

    def head_weight(self):
        return self.head.w[...]

    def logits(self, hidden):
        return self.head.logits(hidden)


@functools.cache
def model(name: str):
    if name == "llama":
        return llama(dim=32, mlp_dim=64, head_dim=16, num_kv_heads=1, rope=ops.Rope(16, max_length=64))
    return jax.jit(lambda: Experts(rngs=nnx.Rngs(0)))()
