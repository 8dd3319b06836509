"""Trains a small Llama and a small mixture of experts at full precision and in fewer bits for equal steps on the same
batches of real text.

    python -m tests.benchmarks.quantization [--steps 300 --dim 128 --seed 0] [--formats full int8 fp8] [--json out.json]
    python -m tests.benchmarks.quantization --dtype bfloat16 --formats full fp8_block --draw docs/fp8_block.png

`--shake 1` changes all initial values by 1e-4 of each: what two such runs differ by is noise. `--switch 0.8` takes the
last fifth of the steps in full precision, as NVIDIA ends its training in NVFP4.

Prints the validation loss of each, its difference from full precision, what rounding changes in the loss and in the
gradient of the model that was trained in full precision (at equal weights nothing is chaotic), bytes of the parameters,
the share of the matmul FLOPs of a training step whose operands are quantized, the time of a step against full
precision, and the mean training loss of every tenth of the steps; `--draw` draws these. Runs that `--json` already
holds are not repeated, so one call for each model and format, and a last one for both, give the same table and picture.
`--steps 360 --dim 448 --layers 4 --vocab 4096 --batch 4 --length 256` is the main job. What quantization after
training does: `tests/benchmarks/ptq.py`.
"""

import argparse
import dataclasses
import json
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from maxlib import data, nn, observability, ops, quantization, tokenization, training
from maxlib.models import llama


class ExpertLayer(nnx.Module):
    """A Llama layer whose MLP is a mixture of experts."""

    def __init__(self, args, *, rngs: nnx.Rngs):
        dim, heads = args.dim, args.dim // 64
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = nn.Attention(dim, num_heads=heads, head_dim=64, rope=ops.Rope(64), rngs=rngs)
        router = nn.Router(dim, args.experts, top_k=2, rngs=rngs)
        self.mlp = nn.MoE(dim, dim, router=router, losses=(nn.router.SwitchBalance(0.01),), rngs=rngs)

    def __call__(self, x, ctx, cache):
        y, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = x + y
        y, aux = self.mlp(self.mlp_norm(x), ctx)
        return x + y, cache, aux


class Experts(nn.Decoder):
    def __init__(self, args, *, rngs: nnx.Rngs):
        self.embed = nn.Embed(args.vocab, args.dim, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: ExpertLayer(args, rngs=rngs), args.layers, rngs=rngs)
        self.norm = nn.RMSNorm(args.dim)


def builders(args):
    cfg = llama.Config(
        vocab=args.vocab,
        num_layers=args.layers,
        dim=args.dim,
        mlp_dim=args.dim * 8 // 3,
        num_heads=args.dim // 64,
        num_kv_heads=args.dim // 64,
        head_dim=64,
        rope=ops.Rope(64, max_length=1024),
        tied=True,
    )
    return {
        "llama": lambda: llama.Llama(cfg, rngs=nnx.Rngs(args.seed)),
        "moe": lambda: Experts(args, rngs=nnx.Rngs(args.seed)),
    }


def batches(args):
    """The training batches of every run, and those it is judged by."""
    train, held_out = data.split(data.python_docs(), validation=0.05)
    texts = (document["text"] for document in train)
    tokenizer = tokenization.train_bpe(texts, vocab_size=args.vocab, special_tokens=("<bos>", "<eos>"))
    make = lambda documents: data.tokenize(documents, tokenizer, bos_id=0, eos_id=1)
    rows = lambda tokens: lambda part: data.pack(tokens[part], length=args.length)
    loader = data.Loader(rows(make(train).shuffle(seed=0).repeat()), batch_size=args.batch)
    judge = data.Loader(rows(make(held_out)), batch_size=args.batch, num_shards=1)
    return [next(loader) for _ in range(args.steps)], list(judge)


def shaken(model, number):
    """Returns a model whose parameters differ by 1e-4 of each, at random."""
    trainable, rest = nn.partition(model)
    keys = jax.random.split(jax.random.key(1000 + number), len(trainable))
    noise = (jax.random.normal(key, x.shape) for key, x in zip(keys, trainable.values(), strict=True))
    return nn.combine({path: x * (1 + 1e-4 * y) for (path, x), y in zip(trainable.items(), noise, strict=True)}, rest)


def gradient(model, batches, dtype):
    """The sum of the gradients of batches, by parameter; layers are apart, since formats group them differently."""
    trainable, rest = nn.partition(nn.unstack(model))

    def total(trainable, batch):
        return training.NextToken()(nn.combine(trainable, rest), batch, dtype=dtype)[0]

    step = jax.jit(jax.grad(total))
    of_batches = [step(trainable, batch) for batch in batches]
    return {path: sum(gradients[path] for gradients in of_batches) for path in trainable}


def cosine(a, b):
    """The cosine of the angle between two gradients."""
    dot = lambda x, y: float(sum(jnp.vdot(x[path], y[path]) for path in x))
    return dot(a, b) / (dot(a, a) * dot(b, b)) ** 0.5


def in_full_precision(state):
    """The state of a run that goes on without rounding."""
    plain = quantization.full_precision(nn.combine(state.trainable, state.rest))
    return dataclasses.replace(state, rest=nn.partition(plain, nn.tree.is_trainable)[1])


def run(build, preset, args, train, held_out):
    start = jax.jit(build)()
    if args.shake:
        start = shaken(start, args.shake)
    if preset != "full":
        start = quantization.for_training(start, preset)
    loss, dtype = training.NextToken(), jnp.dtype(args.dtype)
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=max(args.steps // 10, 1))
    optimizer = training.adamw(schedule, mask=training.decay_mask(start))
    step, size = training.make_train_step(loss, optimizer, dtype=dtype), sum(a.nbytes for a in jax.tree.leaves(start))
    state = training.make_state(start, optimizer)
    covered = covered_by(build, preset, step, state, train[0])
    step = training.jit_step(step)
    state, metrics = step(state, train[0])
    losses, begin = [metrics["nll"]], time.process_time()
    for number, batch in enumerate(train[1:], 1):
        if number == round(args.switch * args.steps):
            state = in_full_precision(state)
        state, metrics = step(state, batch)
        losses.append(metrics["nll"])
    seconds = (jax.block_until_ready(losses), time.process_time() - begin)[1] / len(train[1:])
    judge = jax.jit(training.make_eval_step(loss, dtype=dtype))
    judged = training.evaluate(judge, state, held_out)
    for other in [f for f in args.formats if f != "full"] if preset == "full" else []:
        plain = nn.combine(state.trainable, state.rest)
        rounding = quantization.for_training(plain, other)
        low = training.evaluate(judge, training.make_state(rounding, training.adamw(1e-3)), held_out)
        exact, rounded = (gradient(model, train[:4], dtype) for model in (plain, rounding))
        change = f"lose {low['nll'] / judged['nll'] - 1:+.3%}, cosine of the gradients {cosine(exact, rounded):.4f}"
        print(f"  rounded to {other}, these weights {change}", flush=True)
    curve = [float(np.mean(part)) for part in np.array_split(np.array(losses, np.float64), min(10, len(losses)))]
    return {"loss": judged["nll"], "bytes": size, "covered": covered, "seconds": seconds, "curve": curve}


def covered_by(build, preset, step, state, batch):
    """The share of a step's matmul FLOPs whose operands are rounded."""
    # On a CPU blocks are multiplied in the dtype of the activations: count the same matmuls without blocks.
    fp8 = quantization.TRAINING["fp8"]
    last = quantization.Rule(None, layers=quantization.LastLayers(0.15))
    counted = {"fp8_block": fp8, "nvfp4": [last, quantization.Rule(fp8)]}
    if preset in counted:
        model = jax.eval_shape(lambda: quantization.for_training(build(), counted[preset]))
        state = dataclasses.replace(state, rest=nn.partition(model, nn.tree.is_trainable)[1])
    matmuls = observability.flops_by_dtype(step, state, jax.tree.map(jnp.asarray, batch))
    low = sum(flops for name, flops in matmuls.items() if "int8" in name or "float8" in name)
    return low / sum(matmuls.values())


def kept(args, settings):
    """Returns the results of earlier calls with the same settings, from the file `--json`."""
    machine = f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}"
    if not (args.json and args.json.exists()):
        return {"machine": machine, "settings": settings}
    results = json.loads(args.json.read_text())
    if results["settings"] != settings:
        raise SystemExit(f"{args.json} has results of other settings, {results['settings']}: name another file")
    return results


def draw(results, path):
    """Draws the training losses, and how far each format is from full precision."""
    import matplotlib.pyplot as plt

    results = {name: result for name, result in results.items() if name not in ("machine", "settings")}
    names = list(dict.fromkeys(name.split()[0] for name in results))
    figure, rows = plt.subplots(2, len(names), figsize=(5 * len(names), 5), sharex=True, squeeze=False)
    for (top, bottom), name in zip(zip(*rows, strict=True), names, strict=True):
        curves = {
            key.split()[1]: np.array(result["curve"]) for key, result in results.items() if key.split()[0] == name
        }
        full = curves.get("full", next(iter(curves.values())))
        ends = np.arange(1, len(full) + 1) / len(full)
        for format, curve in curves.items():
            top.plot(ends, curve, label=format)
            bottom.plot(ends, 100 * (curve / full - 1), label=format)
        top.set(title=name, ylabel="training loss")
        bottom.set(xlabel="share of the steps", ylabel="difference, %")
        bottom.axhspan(-0.5, 0.5, color="0.9")
        top.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 300, "batch": 8, "length": 128, "vocab": 1024, "layers": 2, "dim": 128, "experts": 4, "seed": 0}
    sizes["shake"] = 0
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--switch", type=float, default=1.0, help="share of the steps that are rounded")
    parser.add_argument("--models", nargs="+", default=["llama", "moe"])
    parser.add_argument("--formats", nargs="+", default=["full", "int8", "int8_gradients", "fp8", "fp8_block"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, help="a picture of the curves")
    args = parser.parse_args()
    results = kept(args, {name: getattr(args, name) for name in (*sizes, "learning_rate", "switch", "dtype")})
    train, held_out = batches(args)
    columns = ("validation loss", "difference", "bytes", "training FLOPs quantized", "CPU time of a step")
    table = Table("model", "format", *columns)
    for name in args.models:
        for preset in args.formats:
            if f"{name} {preset}" not in results:
                results[f"{name} {preset}"] = run(builders(args)[name], preset, args, train, held_out)
            result = results[f"{name} {preset}"]
            full = results.get(f"{name} full", results[f"{name} {args.formats[0]}"])
            change, time_ = result["loss"] / full["loss"] - 1, result["seconds"] / full["seconds"]
            numbers = f"{result['loss']:.4f}", f"{change:+.2%}", f"{result['bytes']:,}"
            table.add_row(name, preset, *numbers, f"{result['covered']:.1%}", f"{time_:.2f}")
            print(name, preset, *numbers, f"{result['covered']:.1%} {time_:.2f}", flush=True)
            print(" ", *(f"{loss:.4f}" for loss in result["curve"]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=2, default=float))
    if args.draw:
        draw(results, args.draw)
    Console().print(table)


if __name__ == "__main__":
    main()
