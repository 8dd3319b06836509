"""Pretokenization against `tokenizers` alone, and how long a step waits for data at a given speed.

    python -m tests.benchmarks.data [--megabytes 8 --rounds 3 --tokens-per-second 200000]

Rounds alternate between the two, and the ratio is the median over rounds. The wait is that of a loader over what was
written, whose batches are asked for at the pace of `--tokens-per-second`.
"""

import argparse
import statistics
import tempfile
import time

import numpy as np

from maxlib import data, tokenization

LENGTH, ROWS, BATCH = 1024, 16, 256


def seconds(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def alone(texts: list[str], tokenizer) -> int:
    batches = (texts[i : i + BATCH] for i in range(0, len(texts), BATCH))
    return sum(len(e.ids) for b in batches for e in tokenizer.encode_batch_fast(b, add_special_tokens=False))


def waits(directory: str, pace: float, steps: int = 60) -> float:
    """The share of the time that a consumer of `pace` tokens per second waits for data, the first batch aside."""
    documents = data.read_tokens(directory).shuffle(seed=0).repeat()
    loader = data.Loader(lambda part: data.pack(documents[part], length=LENGTH), batch_size=ROWS)
    next(loader)
    before, begin = loader.wait_seconds, time.perf_counter()
    for _ in range(steps):
        time.sleep(ROWS * LENGTH / pace)
        next(loader)
    return (loader.wait_seconds - before) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-per-second", type=float, default=200_000)
    args = parser.parse_args()
    texts = [document["text"] for document in data.python_docs()]
    tokenizer = tokenization.train_bpe(texts, vocab_size=4096)
    size = sum(map(len, texts))
    texts = (texts * max(1, round(args.megabytes * 1e6 / size)))[
        : max(1, round(len(texts) * args.megabytes * 1e6 / size))
    ]
    documents, ratios = data.in_memory(texts), []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            bare = seconds(lambda: alone(texts, tokenizer))
            ours = seconds(lambda at=folder: data.write_tokens(documents, at, tokenizer))
            ratios.append(bare / ours)
            count = data.read_manifest(folder)["total"]["tokens"]
            print(
                f"{count:,} tokens: alone {count / bare:,.0f}/s, to disk {count / ours:,.0f}/s, ratio {bare / ours:.2f}"
            )
            wait = waits(folder, args.tokens_per_second)
            print(f"at {args.tokens_per_second:,.0f} tokens/s a step waits {wait:.2%} of the time for data")
    print(f"median ratio {np.round(statistics.median(ratios), 2)}")


if __name__ == "__main__":
    main()
