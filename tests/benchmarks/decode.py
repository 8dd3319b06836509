"""Greedy decoding of a Llama of 135M parameters in float32: maxlib against transformers + torch, in turn on the same
machine.

    python -m tests.benchmarks.decode [--batch 1 8] [--rounds 5] [--tokens 64] [--json out.json]

The shape of SmolLM2-135M with random weights, the same in both. Times are of a whole call, prompt (16 tokens) included
and compilation not; the ratio is the median over rounds of (torch time / maxlib time). Both have to write the same
text.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import maxlib
from maxlib.inference import Generator

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


def pair() -> tuple[transformers.LlamaForCausalLM, Generator]:
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(CONFIG).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return theirs, Generator(maxlib.from_pretrained(directory), dtype=jnp.float32)


def runs(theirs, ours: Generator, batch: int, tokens: int) -> dict:
    prompts = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (batch, 16))
    ids = torch.from_numpy(prompts)
    options = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return {
        "maxlib": lambda: ours.generate(prompts.tolist(), max_new_tokens=tokens),
        "transformers": lambda: theirs.generate(ids, **options)[:, 16:].tolist(),
    }


def measure(runs: dict, rounds: int) -> dict[str, list[float]]:
    texts = [run() for run in runs.values()]  # compiles
    if texts[0] != texts[1]:
        raise SystemExit("the two did not write the same text")
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    theirs, ours = pair()
    rows = {}
    for batch in args.batch:
        times = measure(runs(theirs, ours, batch, args.tokens), args.rounds)
        speeds = {name: batch * args.tokens / statistics.median(seconds) for name, seconds in times.items()}
        ratio = statistics.median(t / m for m, t in zip(*times.values(), strict=True))
        print(
            f"batch {batch}: " + ", ".join(f"{n} {v:.1f} tokens/s" for n, v in speeds.items()) + f"; ratio {ratio:.2f}"
        )
        rows[batch] = {"tokens_per_second": speeds, "ratio": ratio, "seconds": times}
    if args.json:
        args.json.write_text(
            json.dumps({"jax": jax.__version__, "machine": platform.machine(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
