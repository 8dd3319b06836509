"""Greedy decoding of a Llama of 135M parameters in float32: maxlib against transformers + torch.

    python -m tests.benchmarks.decode [--batch 1 8] [--rounds 5] [--tokens 64]

The shape of SmolLM2-135M with random weights, the same in both. Times are of a whole call, prompt (16 tokens) included
and compilation not. Both have to write the same text.
"""

import argparse
import statistics

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from maxlib.inference import Generator
from tests.benchmarks.timing import measure, ratio
from tests.benchmarks.train_step import read

CONFIG = transformers.LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    attn_implementation="sdpa",
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(CONFIG).eval()
    ours = Generator(read(theirs), dtype=jnp.float32)
    for batch in args.batch:
        prompts = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (batch, 16))
        ids = torch.from_numpy(prompts)
        options = {"max_new_tokens": args.tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        runs = {
            "maxlib": lambda prompts=prompts: ours.generate(prompts.tolist(), max_new_tokens=args.tokens),
            "transformers": lambda ids=ids, options=options: theirs.generate(ids, **options)[:, 16:].tolist(),
        }
        if runs["maxlib"]() != runs["transformers"]():
            raise SystemExit("the two did not write the same text")
        times = measure(runs, args.rounds)
        speeds = {name: batch * args.tokens / statistics.median(seconds) for name, seconds in times.items()}
        shown = ", ".join(f"{name} {speed:.1f} tokens/s" for name, speed in speeds.items())
        print(f"batch {batch}: {shown}; ratio {ratio(times, 'transformers', 'maxlib'):.2f}")


if __name__ == "__main__":
    main()
