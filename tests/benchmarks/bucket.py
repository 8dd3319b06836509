"""How long a training run waits for data whose shards lie in an emulated bucket (the server of `moto`, and `s3fs`).

    python -m tests.benchmarks.bucket [--steps 60 --latency 0.05 --format webdataset]

The server is a process of its own; `--latency` seconds are added to each request, as of a real store. Numbers are for
one run, the first batch aside.
"""

import argparse
import io
import os
import socket
import subprocess
import sys
import tarfile
import time

import jax
import numpy as np
from flax import nnx

from maxlib import data, models, ops, tokenization, training

LENGTH, ROWS, SHARDS = 512, 8, 8


def bucket(port: int):
    """Starts the server, and returns it and a client."""
    import s3fs

    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="none",
        AWS_SECRET_ACCESS_KEY="none",
        AWS_DEFAULT_REGION="us-east-1",
    )
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    store = s3fs.S3FileSystem()
    for _ in range(100):
        try:
            store.mkdir("bucket")
            return server, store
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def write(store, tokens: np.ndarray, kind: str) -> None:
    for number, shard in enumerate(np.array_split(tokens, SHARDS)):
        if kind == "numpy":
            store.pipe_file(f"bucket/{number}.npy", shard.tobytes())
            continue
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for i, document in enumerate(np.array_split(shard, len(shard) // 700)):
                array = io.BytesIO()
                np.save(array, document)
                member = tarfile.TarInfo(f"{i:06}.npy")
                member.size = array.tell()
                array.seek(0)
                tar.addfile(member, array)
        store.pipe_file(f"bucket/{number}.tar", file.getvalue())


def source(kind: str):
    if kind == "numpy":
        return data.numpy_tokens("s3://bucket/*.npy", dtype="uint16", length=LENGTH).shuffle(seed=0).repeat()
    return data.WebDataset("s3://bucket/*.tar", epochs=None, seed=0)


def delay(store, seconds: float) -> None:
    """Adds latency to each request for a range of a file."""
    request = type(store)._cat_file

    async def delayed(self, *args, **options):
        import asyncio

        await asyncio.sleep(seconds)
        return await request(self, *args, **options)

    type(store)._cat_file = delayed


def waits(kind: str, steps: int) -> tuple[float, float]:
    """Returns the share of the time that training waits for data, and the seconds of a step."""
    documents = source(kind)
    loader = data.Loader(lambda part: data.pack(documents[part], length=LENGTH), batch_size=ROWS)
    config = models.llama.Config(
        vocab=4096, num_layers=2, dim=128, mlp_dim=384, num_heads=4, num_kv_heads=4, head_dim=32, rope=ops.Rope(32)
    )
    model = models.llama.Llama(config, rngs=nnx.Rngs(0))
    optimizer = training.adamw(1e-3)
    step = training.jit_step(training.make_train_step(training.NextToken(), optimizer))
    state, _ = step(training.make_state(model, optimizer), next(loader))
    before, begin = loader.wait_seconds, time.perf_counter()
    for _ in range(steps):
        state, metrics = step(state, next(loader))
        jax.block_until_ready(metrics)
    seconds = time.perf_counter() - begin
    loader.close()
    return (loader.wait_seconds - before) / seconds, seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Time that training waits for a bucket.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--format", choices=("numpy", "webdataset"))
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        server, store = bucket(port)
    except ImportError as error:
        raise SystemExit(f"not run: {error}") from error
    try:
        texts = [document["text"] for document in data.python_docs()]
        tokenizer = tokenization.train_bpe(texts[:200], vocab_size=4096)
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = np.concatenate([np.array(e.ids, np.uint16) for e in encoded])
        delay(store, args.latency)
        for kind in (args.format,) if args.format else ("numpy", "webdataset"):
            write(store, tokens, kind)
            share, seconds = waits(kind, args.steps)
            print(
                f"{kind}: a step of {seconds:.2f} s waits {share:.2%} of the time for data ({args.latency} s a request)"
            )
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
