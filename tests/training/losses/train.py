"""Trains a small Llama as the main job does, and prints step, loss and gradient norm with all their digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import data, ops, training
from maxlib.models import llama

STEPS, VOCAB = 24, 64
CONFIG = llama.Config(
    vocab=VOCAB,
    num_layers=3,
    dim=32,
    mlp_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=ops.Rope(8, max_length=64),
)


def documents() -> list[np.ndarray]:
    """Makes token sequences in which the next token mostly follows from the last."""
    rng = np.random.default_rng(0)
    steps = lambda length: np.where(rng.random(length) < 0.8, 3, rng.integers(0, VOCAB, length))
    return [np.cumsum(steps(length), dtype=np.int64) % VOCAB for length in rng.integers(10, 60, 100)]


def main() -> None:
    rows = lambda part: data.pack(data.in_memory(documents()).shuffle(seed=0).repeat()[part], length=32)
    loader = data.Loader(rows, batch_size=8, num_shards=1)
    optimizer = training.adamw(training.warmup_cosine(1e-2, STEPS, warmup=4), clip=1.0)
    loss = functools.partial(training.NextToken(), dtype=jnp.float32)
    build = jax.jit(lambda: llama.Llama(CONFIG, rngs=nnx.Rngs(0)))
    state = training.make_state(build(), optimizer)
    step = jax.jit(training.make_train_step(loss, optimizer), donate_argnums=0)
    for i in range(1, STEPS + 1):
        state, metrics = step(state, next(loader))
        # A float32 as a Python float prints every digit.
        print(i, float(metrics["loss"]), float(metrics["grad_norm"]))
    loader.close()


if __name__ == "__main__":
    main()
