"""Continuous batching against static batches and against transformers' own, in turn on the same machine.

    python -m tests.benchmarks.continuous [--slots 8] [--rounds 3] [--check] [--json out.json]

A Llama with random weights in float32. Prompts and completions have lengths from 10 to 200, drawn once with a uniform
logarithm, as most answers are short. A static batch has as many rows as there are slots and lasts until its longest row
ends. The figure is tokens that were asked for per second, of a whole call without compilation, the median over rounds.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
import transformers

import maxlib
from maxlib.inference import Generator, LocalEngine

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
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        model = maxlib.from_pretrained(directory)
    rng = np.random.default_rng(0)
    draw = lambda: np.exp(rng.uniform(*np.log(LENGTHS), args.prompts)).round().astype(int).tolist()
    sizes, limits = draw(), draw()
    prompts = [rng.integers(1, CONFIG.vocab_size, n).tolist() for n in sizes]
    static, engine = (
        Generator(model, dtype=jnp.float32),
        LocalEngine(model, slots=args.slots, capacity=512, dtype=jnp.float32),
    )
    calls = {
        "static batches": lambda: in_batches(static, prompts, limits, args.slots),
        "transformers": lambda: in_their_batches(theirs, prompts, limits),
        "continuous": lambda: [one.tokens for (one,) in engine.generate(prompts, max_new_tokens=limits)],
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
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    calls, tokens = runs(args)
    texts = {name: call() for name, call in calls.items()}  # compiles
    same = {
        name: sum(a == b for a, b in zip(texts["static batches"], text, strict=True)) for name, text in texts.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    speeds = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    for name, speed in speeds.items():
        print(f"{name}: {speed:.0f} tokens/s, {same[name]} of {args.prompts} texts as in static batches")
    ratios = {name: [a / b for a, b in zip(seconds[name], seconds["continuous"], strict=True)] for name in LEAST}
    for name, found in ratios.items():
        print(f"continuous / {name}: {statistics.median(found):.2f} ({', '.join(f'{r:.2f}' for r in found)})")
    if args.json:
        args.json.write_text(json.dumps({"speeds": speeds, "seconds": seconds, "machine": platform.processor()}))
    if args.check and any(statistics.median(ratios[name]) < least for name, least in LEAST.items()):
        raise SystemExit(f"continuous batching must be faster: {LEAST} times")


if __name__ == "__main__":
    main()
