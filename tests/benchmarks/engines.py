"""`LocalEngine` and `maxlib serve` against vLLM on this CPU, with the same weights in float32.

    MAXLIB_VLLM=vllm/bin/python python -m tests.benchmarks.engines [--slots 64] [--rounds 3] [--check]

`MAXLIB_VLLM` is the Python of an environment with vLLM (tests/inference/test_vllm.py); without it, only maxlib's own
are compared. The prompts have the lengths of `tests.benchmarks.continuous`, and new ids in each round, so that no
prefix is known. In "turns" 16 conversations of 4 turns share a system prompt of 256 tokens. The figure is new tokens
per second of a whole round without compilation, the median over rounds in which the engines take turns. Every engine
also returns the log-probabilities of its tokens.
"""

import argparse
import asyncio
import atexit
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import tokenizers
import torch
import transformers

import maxlib
from maxlib.inference import GREEDY, LocalEngine, Sampler
from tests.benchmarks.continuous import CONFIG, LENGTHS
from tests.benchmarks.timing import measure, ratio

# Of prompts and limits, at a temperature: the new ids of each.
Engine = Callable[[Sequence[list[int]], Sequence[int], float], list[list[int]]]
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on two cores a core process that polls halves vLLM's speed
    "HF_HUB_OFFLINE": "1",
}
LEAST = {"vLLM": 1.0}  # times its tokens per second


def local(directory: Path, slots: int) -> Engine:
    """Returns a call of a `LocalEngine`."""
    engine = LocalEngine(maxlib.from_pretrained(directory), slots=slots, dtype=jnp.float32)

    def run(prompts: Sequence[list[int]], limits: Sequence[int], temperature: float) -> list[list[int]]:
        sampler = Sampler(temperature) if temperature else GREEDY
        groups = engine.generate(prompts, max_new_tokens=limits, sampler=sampler)
        return [completion.tokens for (completion,) in groups]

    return run


def vllm(directory: Path) -> Engine:
    """Returns a call of vLLM in a process with its own environment."""
    python, worker = os.environ["MAXLIB_VLLM"], Path(__file__).with_name("_vllm_worker.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [python, "-P", worker, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=VLLM | environment,
        text=True,
        start_new_session=True,  # a group of its own, to end vLLM's processes with it
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    atexit.register(os.killpg, process.pid, signal.SIGKILL)
    next(line for line in stdout if line.startswith("ready"))

    def run(prompts: Sequence[list[int]], limits: Sequence[int], temperature: float) -> list[list[int]]:
        stdin.write(json.dumps({"prompts": prompts, "limits": limits, "temperature": temperature}) + "\n")
        stdin.flush()
        return json.loads(next(line for line in stdout if line.startswith("ids "))[4:])

    return run


def serve(directory: Path, slots: int) -> Engine:
    """Returns a call of `maxlib serve` in another process."""
    command = [sys.executable, "-m", "maxlib", "serve", str(directory), "--name", "m", "--port", "0"]
    command += ["--slots", str(slots), "--dtype", "float32", "--max-length", "1024"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    atexit.register(process.kill)
    stderr = process.stderr
    url = next(match[1] for line in stderr if (match := re.search(r"running on (http://\S+)", line)))
    threading.Thread(target=stderr.read, daemon=True).start()

    async def generate(prompts: Sequence[list[int]], limits: Sequence[int], temperature: float) -> list[list[int]]:
        limit = httpx.Limits(max_connections=len(prompts))
        # Without TLS, whose certificates would be read in each round.
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limit, verify=False) as client:

            async def complete(prompt: list[int], limit: int) -> list[int]:
                body = {"model": "m", "prompt": prompt, "max_tokens": limit, "temperature": temperature}
                body |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body)
                return answer.json()["choices"][0]["token_ids"]

            return await asyncio.gather(*map(complete, prompts, limits))

    return lambda prompts, limits, temperature: asyncio.run(generate(prompts, limits, temperature))


def rounds(engine: Engine, temperature: float, count: int) -> Callable[[], list[list[int]]]:
    """Returns a function that generates for prompts of new ids in each call."""
    low, high = np.log(LENGTHS)
    sizes, limits = np.exp(np.random.default_rng(0).uniform(low, high, (2, count))).round().astype(int).tolist()
    number = iter(range(1000))

    def run() -> list[list[int]]:
        rng = np.random.default_rng(next(number))
        return engine([rng.integers(1, CONFIG.vocab_size, n).tolist() for n in sizes], limits, temperature)

    return run


def conversations(engine: Engine, count: int = 16, turns: int = 4) -> Callable[[], list[list[int]]]:
    """Returns a function that runs conversations of new ids after a common beginning."""
    number = iter(range(1000))

    def run() -> list[list[int]]:
        rng = np.random.default_rng(next(number))
        system = rng.integers(1, CONFIG.vocab_size, 256).tolist()
        texts = [list(system) for _ in range(count)]
        for _ in range(turns):
            for text in texts:
                text += rng.integers(1, CONFIG.vocab_size, 24).tolist()
            for text, new in zip(texts, engine(texts, [32] * count, 0.0), strict=True):
                text += new
        return texts

    return run


def keeping(texts: dict[str, Any], name: str, call: Callable[[], Any]) -> Callable[[], None]:
    """Returns a call that also keeps its result."""

    def run() -> None:
        texts[name] = call()

    return run


def save_model(directory: Path) -> None:
    """Writes a model and a tokenizer in which every id is a word."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(directory)
    words = {f"w{n}": n for n in range(CONFIG.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--prompts", 64), ("--slots", 64), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--check", action="store_true", help="fail below `LEAST`")
    parser.add_argument("--keep-memory", action="store_true", help="call `maxlib.keep_freed_memory` in this process")
    args = parser.parse_args()
    if args.keep_memory:
        maxlib.keep_freed_memory()
    slow = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_model(directory)
        engines = {"LocalEngine": local(directory, args.slots), "serve": serve(directory, args.slots)}
        if "MAXLIB_VLLM" in os.environ:
            engines["vLLM"] = vllm(directory)
        work = {
            "greedy": {name: rounds(engine, 0.0, args.prompts) for name, engine in engines.items()},
            "sampled": {name: rounds(engine, 1.0, args.prompts) for name, engine in engines.items()},
            "turns": {name: conversations(engine) for name, engine in engines.items()},
        }
        for title, calls in work.items():
            texts = {}
            times = measure({name: keeping(texts, name, call) for name, call in calls.items()}, args.rounds)
            tokens = 16 * 4 * 32 if title == "turns" else sum(map(len, texts["LocalEngine"]))
            for name, seconds in times.items():
                same = sum(a == b for a, b in zip(texts["LocalEngine"], texts[name], strict=True))
                speed, faster = tokens / statistics.median(seconds), ratio(times, name, "LocalEngine")
                print(
                    f"{title}, {name}: {speed:.0f} tokens/s, LocalEngine is {faster:.2f} times as fast; "
                    f"{same} of {len(texts[name])} texts are equal",
                    flush=True,
                )
                slow += [f"{title} {name}"] if faster < LEAST.get(name, 0) else []
    if args.check and slow:
        raise SystemExit(f"LocalEngine must be {LEAST} times as fast: {slow}")


if __name__ == "__main__":
    main()
