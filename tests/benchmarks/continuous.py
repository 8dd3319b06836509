"""Continuous batching against static batches and against transformers' own.

    python -m tests.benchmarks.continuous [--slots 8] [--rounds 3] [--check]

A Llama with random weights in float32. Prompts and completions have lengths from 10 to 200, drawn once with a uniform
logarithm, as most answers are short. A static batch has as many rows as there are slots and lasts until its longest row
ends. The figure is tokens that were asked for per second, of a whole call without compilation, the median over rounds.
"""

import argparse
import statistics

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from maxlib.inference import Generator, LocalEngine
from tests.benchmarks.timing import measure, ratio
from tests.benchmarks.train_step import read

CONFIG = transformers.LlamaConfig(
    vocab_size=4096,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    attn_implementation="sdpa",
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
LENGTHS = 10, 200
LEAST = {"static batches": 1.8, "transformers": 1.0}  # times their tokens per second


def runs(args: argparse.Namespace) -> tuple[dict, int]:
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(CONFIG).eval()
    model, rng = read(theirs), np.random.default_rng(0)
    sizes, limits = np.exp(rng.uniform(*np.log(LENGTHS), (2, args.prompts))).round().astype(int).tolist()
    prompts = [rng.integers(1, CONFIG.vocab_size, n).tolist() for n in sizes]
    static = Generator(model, dtype=jnp.float32)
    engine = LocalEngine(model, slots=args.slots, capacity=512, dtype=jnp.float32)
    calls = {
        "static batches": lambda: in_batches(static, prompts, limits, args.slots),
        "transformers": lambda: in_their_batches(theirs, prompts, limits),
        "continuous": lambda: [completion.tokens for (completion,) in engine.generate(prompts, max_new_tokens=limits)],
    }
    return calls, sum(limits)


def in_batches(generator: Generator, prompts: list, limits: list, rows: int) -> list[list[int]]:
    texts = []
    for i in range(0, len(prompts), rows):
        part, most = prompts[i : i + rows], limits[i : i + rows]
        texts += [
            t[:n] for t, n in zip(generator.generate(part, max_new_tokens=max(most), capacity=512), most, strict=True)
        ]
    return texts


def in_their_batches(model: transformers.LlamaForCausalLM, prompts: list, limits: list) -> list[list[int]]:
    """Generates as `generate_batch` does, with a limit for each prompt."""
    greedy, texts = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0), {}
    # Its own choice, steps of 8,192 tokens with padding, is a seventh as fast on a CPU.
    sizes = transformers.ContinuousBatchingConfig(max_batch_tokens=512, num_blocks=64)
    options = {"continuous_batching_config": sizes, "block": True, "timeout": 5, "warmup": False}
    with model.continuous_batching_context_manager(greedy, **options) as manager:
        names = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)]
        while len(texts) < len(names):
            if (result := manager.get_result(timeout=1)) and result.is_finished():
                texts[result.request_id] = result.generated_tokens
            elif not manager.is_running():
                raise RuntimeError("transformers' generation ended before all prompts were served")
    return [texts[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--prompts", 64), ("--slots", 8), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--check", action="store_true", help="fail below `LEAST`")
    args = parser.parse_args()
    calls, tokens = runs(args)
    texts = {name: call() for name, call in calls.items()}  # compiles
    times = measure(calls, args.rounds)
    for name, text in texts.items():
        same = sum(a == b for a, b in zip(texts["static batches"], text, strict=True))
        speed = tokens / statistics.median(times[name])
        print(f"{name}: {speed:.0f} tokens/s, {same} of {args.prompts} texts as in static batches")
    ratios = {name: ratio(times, name, "continuous") for name in LEAST}
    print(*(f"continuous / {name}: {value:.2f}" for name, value in ratios.items()), sep="\n")
    if args.check and any(ratios[name] < least for name, least in LEAST.items()):
        raise SystemExit(f"continuous batching must be faster: {LEAST} times")


if __name__ == "__main__":
    main()
