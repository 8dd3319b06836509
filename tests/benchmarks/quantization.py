"""Trains the main job's Llama and a mixture of experts at full precision, int8 and fp8 for equal steps on the same batches, and quantizes the
Llama of full precision for inference.

    python tests/benchmarks/quantization.py [--steps 360 --dim 448 --layers 4] [--formats full int8 fp8] [--json out.json]

Prints the validation loss of each, its difference from full precision, bytes of the weights, and the share of forward matmul FLOPs
that is quantized; for inference perplexity, logit error and bytes.
"""

import argparse
import functools
import json
import platform
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from maxlib import data, nn, ops, quantization, training
from maxlib.models import llama


class ExpertLayer(nnx.Module):
    """A Llama layer whose MLP is a mixture of experts."""

    def __init__(self, args, *, rngs: nnx.Rngs):
        dim, heads = args.dim, args.dim // 64
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = nn.Attention(dim, num_heads=heads, head_dim=64, rope=ops.Rope(64), rngs=rngs)
        router = nn.Router(dim, args.experts, top_k=2, rngs=rngs)
        self.mlp = nn.MoE(dim, dim, router=router, losses=(nn.SwitchBalance(0.01),), rngs=rngs)

    def __call__(self, x, ctx, cache):
        y, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = x + y
        y, aux = self.mlp(self.mlp_norm(x), ctx)
        return x + y, cache, aux


class Experts(nn.Decoder):
    def __init__(self, args, *, rngs: nnx.Rngs):
        self.embed = nn.Embed(args.vocab, args.dim, rngs=rngs)
        self.layers = nn.Stack(lambda i, rngs: ExpertLayer(args, rngs=rngs), args.layers, rngs=rngs)
        self.norm = nn.RMSNorm(args.dim)
        self.masks, self.ropes = (ops.Causal(),), (ops.Rope(64),)


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
        "llama": lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)),
        "moe": lambda: Experts(args, rngs=nnx.Rngs(0)),
    }


def batches(args):
    """The training batches of every run, and those it is judged by."""
    train, held_out = data.split(data.python_text(), validation=0.05)
    texts = (document["text"] for document in train)
    tokenizer = data.train_bpe(texts, vocab_size=args.vocab, special_tokens=("<bos>", "<eos>"))
    make = lambda documents: data.tokenize(documents, tokenizer, bos_id=0, eos_id=1)
    rows = lambda tokens: lambda part: data.pack(tokens[part], length=args.length)
    loader = data.Loader(rows(make(train).shuffle(seed=0).repeat()), batch_size=args.batch)
    judge = data.Loader(rows(make(held_out)), batch_size=args.batch, num_shards=1)
    return [next(loader) for _ in range(args.steps)], list(judge)


def run(build, preset, args, train, held_out):
    start = jax.jit(build)()
    if preset != "full":
        start = quantization.for_training(start, preset)
    loss = functools.partial(training.next_token_loss, dtype=jnp.dtype(args.dtype))
    schedule = training.warmup_cosine(3e-3, args.steps, warmup=max(args.steps // 10, 1))
    optimizer = training.adamw(schedule, mask=training.decay_mask(start))
    covered = quantization.matmuls(lambda m: loss(m, jax.tree.map(jnp.asarray, train[0]))[0], start)
    low = sum(flops for name, flops in covered.items() if "int8" in name or "float8" in name)
    state = training.make_state(start, optimizer)
    step = training.jit_step(training.make_train_step(loss, optimizer))
    for batch in train:
        state, _ = step(state, batch)
    judged = training.evaluate(jax.jit(training.make_eval_step(loss)), state, held_out)
    size = sum(a.nbytes for a in jax.tree.leaves(start))
    found = {"loss": judged["nll"], "bytes": size, "covered": low / sum(covered.values())}
    return found | {"matmuls": covered}, state.model


def after_training(model, held_out, args):
    """What every format for inference does to the perplexity."""
    tokens = jnp.asarray(np.concatenate([batch["tokens"] for batch in held_out])[: args.rows])
    found = {}
    for preset in quantization.INFERENCE:
        low = quantization.for_inference(model, preset)
        errors, report = quantization.compare(model, low, tokens), quantization.report(low)
        change = errors.quantized_perplexity / errors.perplexity - 1
        found[preset] = {"change": change, "logit error": errors.logit_error, "bytes": report.bytes_after}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 360, "batch": 4, "length": 256, "vocab": 4096, "layers": 4, "dim": 448, "experts": 8, "rows": 16}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--formats", nargs="+", default=["full", "int8", "fp8"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    train, held_out = batches(args)
    results = {"machine": f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}"}
    table = Table("model", "format", "validation loss", "difference", "bytes", "matmul FLOPs quantized")
    for name, build in builders(args).items():
        losses = {}
        for preset in args.formats:
            found, model = run(build, preset, args, train, held_out)
            losses[preset], results[f"{name} {preset}"] = found["loss"], found
            change = found["loss"] / losses[args.formats[0]] - 1
            table.add_row(
                name, preset, f"{found['loss']:.4f}", f"{change:+.2%}", f"{found['bytes']:,}", f"{found['covered']:.1%}"
            )
            if name == "llama" and preset == "full":
                results["inference"] = after_training(model, held_out, args)
    Console().print(table)
    table = Table("llama for inference", "perplexity", "logit error", "bytes")
    for preset, found in results.get("inference", {}).items():
        table.add_row(preset, f"{found['change']:+.2%}", f"{found['logit error']:.2%}", f"{found['bytes']:,}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2, default=float))


if __name__ == "__main__":
    main()
