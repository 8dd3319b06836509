"""Models small enough to train in tests."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn, ops, quantization, training
from tests.nn.tiny import filled, filled_llama
from tests.training.tiny import VOCAB, Bigram

loss = functools.partial(training.NextToken(), dtype=jnp.float32, remat="full")


class Layer(nnx.Module):
    def __init__(self, attends: bool, *, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(32)
        options = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "rope": ops.Rope(16)}
        self.attn = nn.Attention(32, **options, rngs=rngs) if attends else None
        router = nn.Router(32, 4, top_k=2, rngs=rngs)
        self.mlp = nn.MoE(32, 16, router=router, losses=(nn.router.SwitchBalance(0.01),), rngs=rngs)

    def __call__(self, x, ctx, cache):
        x = x if self.attn is None else x + self.attn(self.norm(x))[0]
        y, aux = self.mlp(self.norm(x))
        return x + y, cache, aux


class Experts(Bigram):
    """A mixture of experts, with or without attention."""

    def __init__(self, attends: bool = False, *, rngs: nnx.Rngs):
        self.embed = nn.Embed(VOCAB, 32, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Layer(attends, rngs=rngs), 2, rngs=rngs)
        self.head = nn.Embed(VOCAB, 32, rngs=rngs)


@functools.cache
def model(name: str):
    """ "llama", "moe" (which has only experts), or "both": attention and experts in one layer."""
    if name == "llama":
        sizes = {"num_layers": 2, "dim": 32, "mlp_dim": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
        return filled_llama(**sizes, vocab=VOCAB, rope=ops.Rope(16, max_length=64))
    return filled(lambda: Experts(name == "both", rngs=nnx.Rngs(0)))


def shapes(name: str):
    return jax.eval_shape(lambda model: model, model(name))


@functools.cache
def stored(name: str, rules):
    """`model(name)` for inference, quantized in one program: op by op takes many times as long."""
    return jax.jit(lambda m: quantization.for_inference(m, list(rules) if isinstance(rules, tuple) else rules))(
        model(name)
    )


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(multiply, d, x, w):
    y, pull = jax.vjp(multiply, x, w)
    return y, *pull(d)
