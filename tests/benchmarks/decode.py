"""Greedy decoding of a Llama of 135M parameters in float32: maxlib against transformers + torch.

    python -m tests.benchmarks.decode [--batch 1 8] [--rounds 5] [--tokens 64] [--formats int8 int4]

The shape of SmolLM2-135M with random weights, the same in both. Times are of a whole call, prompt (16 tokens) included
and compilation not. Both have to write the same text. With --formats, maxlib with weights in these formats against
maxlib in float32 instead, and the bytes of both: as stored, and in the generator.
"""

import argparse
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from maxlib import quantization
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
    parser.add_argument("--formats", nargs="+", choices=quantization.INFERENCE)
    args = parser.parse_args()
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(CONFIG).eval()
    if args.formats:
        compare_formats(read(theirs), args)
        return
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


def compare_formats(model, args) -> None:
    models = {"float32": model} | {
        name: jax.jit(lambda m, name=name: quantization.for_inference(m, name))(model) for name in args.formats
    }
    generators = {name: Generator(m, dtype=jnp.float32) for name, m in models.items()}
    for name, m in models.items():
        stored, running = (sum(a.nbytes for a in jax.tree.leaves(tree)) for tree in (m, generators[name].model))
        print(f"{name}: {stored / 1e6:.0f} MB stored, {running / 1e6:.0f} MB in the generator")
    for batch in args.batch:
        prompts = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (batch, 16)).tolist()
        runs = {
            name: functools.partial(generator.generate, prompts, max_new_tokens=args.tokens)
            for name, generator in generators.items()
        }
        for run in runs.values():
            run()  # compiles
        times = measure(runs, args.rounds)
        for name in args.formats:
            print(f"batch {batch}: {name} takes {ratio(times, name, 'float32'):.2f} of the time of float32")


if __name__ == "__main__":
    main()
