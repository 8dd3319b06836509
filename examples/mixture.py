"""Train a small Llama on a mixture whose weights change: short texts first, long ones later. Fork me.

The text is Python's help and docstrings. The script prints how many tokens of each source were read. Run the same
command again to resume, in the middle of the mixture.
"""

import argparse
import functools
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from maxlib import checkpoint, data, observability, ops, tokenization, training
from maxlib.models import llama

LENGTH, ROWS = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/mixture"), help="(%(default)s)")
    parser.add_argument("--steps", metavar="N", type=int, default=60, help="number of optimizer steps (%(default)s)")
    args = parser.parse_args()
    sources = documents()
    tokenizer = tokenization.train_bpe((text for texts in sources.values() for text in texts), vocab_size=512)
    tokens = {name: data.tokenize(data.in_memory(texts), tokenizer, eos_id=1) for name, texts in sources.items()}
    mixture = data.Mixture(
        tokens,
        weights=functools.partial(weights, steps=args.steps),
        seed=0,
        tokens_per_step=ROWS * LENGTH,
    )
    rows = lambda part: data.pack(mixture[part], length=LENGTH, strategy="concat_then_split")
    loader = data.Loader(rows, batch_size=ROWS)
    build = lambda: llama.Llama(config(tokenizer.get_vocab_size()), rngs=nnx.Rngs(0))
    trainer = training.Trainer(
        build,
        optimizer=training.adamw(3e-3),
        loader=loader,
        dtype=jnp.float32,
        directory=args.out,
        checkpointer=checkpoint.Checkpointer(args.out / "checkpoints", every=max(args.steps // 4, 1)),
    )
    trainer.fit(args.steps)
    for row in observability.read_jsonl(args.out / "metrics.jsonl")[:: max(args.steps // 6, 1)]:
        read = "  ".join(f"{name} {row.get(f'data/tokens/{name}', 0):7,.0f}" for name in tokens)
        print(f"step {row['step']:4}  loss {row['loss']:.3f}  tokens read: {read}")


def documents() -> dict[str, list[str]]:
    """Splits the documents into two sources: short texts and long ones."""
    texts = [document["text"] for document in data.python_docs()][:300]
    return {"short": [t for t in texts if len(t) < 2000], "long": [t for t in texts if len(t) >= 2000]}


def weights(step: int, *, steps: int) -> dict[str, float]:
    """Returns the weights at a step: only short texts in the first third, then increasingly long ones, up to half."""
    return {"short": 1.0, "long": min(max(3 * step / steps - 1, 0.0), 1.0)}


def config(vocab: int) -> llama.Config:
    rope = ops.Rope(32, max_length=LENGTH)
    return llama.Config(
        vocab=vocab,
        num_layers=2,
        dim=64,
        mlp_dim=128,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        rope=rope,
        tied=True,
    )


if __name__ == "__main__":
    main()
