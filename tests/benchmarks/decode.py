"""Greedy decoding of a Llama of 135M parameters in float32: maxlib against transformers + torch, and llama.cpp.

    python -m tests.benchmarks.decode [--batch 1 8] [--rounds 5] [--tokens 64] [--llama-cpp | --formats int8 int4]

The shape of SmolLM2-135M with random weights, the same in all. Times are of a whole call, prompt (16 tokens) included
and compilation not. All have to write the same texts, llama.cpp three in four of them. `--llama-cpp` adds llama.cpp
(`pip install gguf xllamacpp`) on the GGUF file that `weights.save_gguf` writes. The share of the memory's bandwidth
counts one reading of the weights a token. With --formats, maxlib with weights in these formats against maxlib in
float32 instead, and the bytes of both: as stored, and in the generator.
"""

import argparse
import functools
import operator
import os
import statistics
import string
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from maxlib import quantization, weights
from maxlib.inference import Generator
from tests.benchmarks.machine import describe, speeds
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
    parser.add_argument("--llama-cpp", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(describe())
    bandwidth = speeds()["memory GB/s"]
    theirs = transformers.LlamaForCausalLM(CONFIG).eval()
    if args.formats:
        compare_formats(read(theirs), args)
        return
    ours = Generator(read(theirs), dtype=jnp.float32)
    gigabytes = sum(p.numel() * p.element_size() for p in theirs.parameters()) / 1e9
    llama_cpp = start_llama_cpp(theirs, max(args.batch), args.tokens) if args.llama_cpp else None
    for batch in args.batch:
        prompts = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (batch, 16))
        ids = torch.from_numpy(prompts)
        options = {"max_new_tokens": args.tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        runs = {
            "maxlib": lambda prompts=prompts: ours.generate(prompts.tolist(), max_new_tokens=args.tokens),
            "transformers": lambda ids=ids, options=options: theirs.generate(ids, **options)[:, 16:].tolist(),
        }
        texts = {name: run() for name, run in runs.items()}
        if llama_cpp:
            runs["llama.cpp"] = functools.partial(llama_cpp, prompts.tolist())
            texts["llama.cpp"] = llama_cpp(prompts.tolist(), ids=True)
        for name, text in texts.items():
            equal = sum(map(operator.eq, text, texts["maxlib"]))
            # Random weights leave near ties, which llama.cpp's sums over a batch may break otherwise.
            if equal < batch * (0.75 if name == "llama.cpp" else 1):
                raise SystemExit(f"{name} wrote {equal} of {batch} texts as maxlib did")
        times = measure(runs, args.rounds)
        for name, seconds in times.items():
            speed = batch * args.tokens / statistics.median(seconds)
            share = speed / batch * gigabytes / bandwidth
            print(
                f"batch {batch}: {name} {speed:.1f} tokens/s, {share:.2f} of the memory's bandwidth; "
                f"maxlib {ratio(times, name, 'maxlib'):.2f} times as fast"
            )


def start_llama_cpp(model: transformers.LlamaForCausalLM, rows: int, new_tokens: int) -> Callable[..., list[list[int]]]:
    """Returns a function that continues prompts in llama.cpp, each in a slot of its own; `ids` returns the tokens."""
    import xllamacpp
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # llama.cpp wants a tokenizer; prompts and texts are ids.
        words = [*pre_tokenizers.ByteLevel.alphabet(), *(a + b for a in string.ascii_lowercase for b in "ab")]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("a", "b")]))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        tokenizer.save(f"{folder}/tokenizer.json")
        file = Path(folder) / "model.gguf"
        weights.save_gguf(folder, file, dtype="float32")
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
        params.n_parallel, params.n_ctx = rows, rows * 256
        params.cache_prompt, params.verbosity = False, -1
        server = xllamacpp.Server(params)

    def continuation(prompt: list[int], ids: bool) -> list[int]:
        request = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        # Log-probabilities come with the tokens' ids, and cost time.
        options = {"cache_prompt": False, "logprobs": 1} if ids else {"cache_prompt": False}
        (choice,) = server.handle_completions(request | options)["choices"]
        return [token["id"] for token in choice["logprobs"]["content"]] if ids else []

    def run(prompts: list[list[int]], ids: bool = False) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(functools.partial(continuation, ids=ids), prompts))

    return run


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
