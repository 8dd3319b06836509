"""Uses maxlib's layers in plain flax.nnx code: your own module, your own loop, nnx.Optimizer.

A maxlib layer is an nnx.Module. You can combine it with nnx.Linear, use nnx.state and nnx.split, and train it with
nnx.Optimizer. It also returns its cache, so a call unpacks two values.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlib import nn, ops

VOCAB, DIM, LENGTH, STEPS = 32, 48, 24, 60


class Block(nnx.Module):
    """Attention with rotary positions and a window from maxlib, a plain MLP from flax."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(dim)
        rope, mask = ops.Rope(dim // 4, max_length=LENGTH), ops.Causal() & ops.SlidingWindow(16)
        self.attn = nn.Attention(dim, num_heads=4, num_kv_heads=2, head_dim=dim // 4, rope=rope, mask=mask, rngs=rngs)
        self.up, self.down = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # B T D
        y, _ = self.attn(self.norm(x))  # no cache outside generation
        x = x + y
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List(Block(DIM, rngs=rngs) for _ in range(2))
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # B T
        x = self.embed(tokens)  # B T D
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # B T V


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss_fn(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main() -> tuple[float, float]:
    model = Model(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    start = jax.random.randint(jax.random.key(0), (16, 1), 0, VOCAB)
    tokens = (start + 3 * jnp.arange(LENGTH)[None]) % VOCAB  # every row counts by three
    losses = [float(train_step(model, optimizer, tokens)) for _ in range(STEPS)]
    print(nn.summary(model.blocks[0].attn))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
