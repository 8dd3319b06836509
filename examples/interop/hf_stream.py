"""Trains on a packed stream of Hugging Face `datasets`, and resumes at the record where it stopped.

The stream here is in memory. With a network, use `datasets.load_dataset("name", split="train", streaming=True)`;
nothing else changes. Needs the extra `hf`.
"""

from typing import Any

import datasets
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import data, ops, tokenization, training
from maxlib.models import llama

TEXTS = [f"Brick {i} lies on brick {i - 1}. Whoever builds a house lays brick {i + 1} next." for i in range(200)]
LENGTH, BATCH, STEPS = 48, 8, 30


def stream() -> datasets.IterableDataset:
    """Four shards, shuffled by shard, as a dataset on the hub is."""
    return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=4)


def main() -> tuple[list[float], bool]:
    tokenizer = tokenization.train_bpe(TEXTS, vocab_size=300)

    def tokenize(record: Any) -> Any:
        return {"tokens": np.array([0, *tokenizer.encode(record["text"]).ids, 1], np.int32)}  # <bos> ... <eos>

    source = data.HFStream(stream(), field="text", epochs=None).map(tokenize)
    loader = data.Loader(lambda part: data.pack(source[part], length=LENGTH), batch_size=BATCH)

    cfg = llama.Config(
        vocab=300, num_layers=2, dim=48, mlp_dim=96, num_heads=4, num_kv_heads=2, head_dim=12,
        rope=ops.Rope(12, max_length=LENGTH),
    )  # fmt: skip
    optimizer = training.adamw(1e-2)
    state = training.make_state(llama.Llama(cfg, rngs=nnx.Rngs(0)), optimizer)
    step = training.jit_step(training.make_train_step(training.NextToken(), optimizer, dtype=jnp.float32))
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, next(loader))
        losses.append(float(metrics["nll"]))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")

    position = loader.get_state()  # plain values: they go into a checkpoint
    wanted = [next(loader)["tokens"] for _ in range(3)]
    again = data.Loader(lambda part: data.pack(source[part], length=LENGTH), batch_size=BATCH)
    again.set_state(position)
    same = all(np.array_equal(next(again)["tokens"], tokens) for tokens in wanted)
    print(f"a loader that takes up the position reads the same rows: {same}")
    return losses, same


if __name__ == "__main__":
    main()
