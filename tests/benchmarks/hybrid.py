"""A small Qwen3.5-like hybrid in float32: its training step against transformers + torch and against attention alone,
decoding after short and long texts, and the memory of a state.

    python -m tests.benchmarks.hybrid [--rounds 5] [--tokens 2048] [--contexts 512 4096 32768]

Four layers 512 wide, three of gated DeltaNet and one of gated attention, random weights, the same in both libraries.
`attention` has four attention layers, and an MLP as wide as makes the step's FLOPs those of the hybrid. Both decode as
`inference.Generator` does, with each layer stored alone. Ratios are medians over rounds in which each contender runs
once. transformers runs as it does without CUDA kernels, in torch.
"""

import argparse
import dataclasses
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from maxlib import nn
from maxlib.models import qwen3_5
from maxlib.observability import training_flops
from tests.benchmarks.timing import measure, ratio
from tests.benchmarks.train_step import loss_of, read, torch_trainer, trainer

CONFIG = transformers.Qwen3_5TextConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1792,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    linear_num_key_heads=8,
    linear_num_value_heads=8,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=131_072,
    attn_implementation="sdpa",
)
LEAST = {"transformers": 2.0, "attention": 0.8, "decode": 1.0}  # times the other's speed


def of_attention(hybrid: qwen3_5.Qwen35, tokens) -> qwen3_5.Qwen35:
    """Builds a model of attention layers only, whose training step has the hybrid's FLOPs within 0.1 %."""
    build = lambda width: qwen3_5.Qwen35(
        dataclasses.replace(hybrid.cfg, layer_types=(qwen3_5.FULL,) * 4, mlp_dim=width), rngs=nnx.Rngs(0)
    )
    flops = lambda model: training_flops(loss_of, model, tokens)
    wanted, least, more = (
        flops(hybrid),
        flops(nnx.eval_shape(lambda: build(512))),
        flops(nnx.eval_shape(lambda: build(1024))),
    )
    width = round(512 + 512 * (wanted - least) / (more - least))  # FLOPs are linear in the width
    model = build(width)
    print(f"FLOPs of a step: hybrid {wanted:.4g}, attention {flops(model):.4g} with an MLP of {width}")
    return model


def decoder(model, context: int, steps: int = 32):
    """A call that decodes `steps` tokens after `context` others, with layers stored as in `inference.Generator`."""
    model = nn.unstack(model)
    params, rest = nn.partition(model)
    filled = prefilled(model, context, context + steps)

    @jax.jit
    def decode(params, cache):
        model = nn.combine(params, rest)

        def step(flow, _):
            token, cache = flow
            out = model(token, cache=cache, dtype=jnp.float32)
            return (jnp.argmax(model.logits(out.hidden), -1).astype(jnp.int32), out.cache), token

        return jax.lax.scan(step, (jnp.ones((1, 1), jnp.int32), cache), length=steps)[1]

    return lambda: decode(params, filled).block_until_ready()


def prefilled(model, context: int, capacity: int, piece: int = 512):
    """Returns a cache with `context` tokens in it."""
    params, rest = nn.partition(model)

    @jax.jit
    def run(params, tokens, cache):
        return nn.combine(params, rest)(tokens, cache=cache, dtype=jnp.float32).cache

    cache = model.init_cache(1, capacity, dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, context))
    for i in range(0, context, piece):
        cache = run(params, jnp.asarray(tokens[:, i : i + piece], jnp.int32), cache)
    return cache


def state_bytes(model, capacity: int) -> tuple[int, int]:
    """Bytes of a cache that holds states (and convolution tails), and of one that holds keys and values."""
    cache = jax.eval_shape(lambda: model.init_cache(1, capacity, dtype=jnp.bfloat16))
    grows = jax.eval_shape(lambda: model.init_cache(1, 2 * capacity, dtype=jnp.bfloat16))
    size = lambda a: a.size * a.dtype.itemsize
    pairs = [(size(a), size(b)) for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(grows), strict=True)]
    return sum(a for a, b in pairs if a == b), sum(a for a, b in pairs if a != b)


def weight_bytes(model) -> int:
    """Bytes of the weights that a token reads: all but the table of embeddings."""
    return sum(a.nbytes for a in jax.tree.leaves(model)) - model.embed.w[...].nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 32_768])
    parser.add_argument("--check", action="store_true", help="fail below `LEAST`")
    args = parser.parse_args()
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5ForCausalLM(CONFIG)
    hybrid = read(theirs)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, args.tokens + 1)), jnp.int32)
    attention = of_attention(hybrid, tokens)
    models = {"hybrid": hybrid, "attention": attention}
    decoders = {(name, n): decoder(model, n) for n in args.contexts for name, model in models.items()}
    steps = {name: trainer(model, tokens) for name, model in models.items()}
    times = measure(steps | {"transformers": torch_trainer(theirs, tokens)}, args.rounds)
    ratios = {name: ratio(times, name, "hybrid") for name in ("transformers", "attention")}
    for name, seconds in times.items():
        print(f"step, {args.tokens} tokens, {name}: {statistics.median(seconds):.3f} s")
    for name, model in models.items():
        print(f"weights read for a token, {name}: {weight_bytes(model) / 2**20:.1f} MiB")
    speeds = measure(decoders, args.rounds)
    for n in args.contexts:
        ratios[f"decode after {n}"] = ratio(speeds, ("attention", n), ("hybrid", n))
        each = ", ".join(f"{name} {statistics.median(speeds[name, n]) / 32 * 1e3:.2f} ms a token" for name in models)
        print(f"decoding after {n} tokens: {each}")
    for n in (*args.contexts, 131_072):
        states, keys = state_bytes(hybrid, n)
        print(
            f"cache for {n} tokens, bfloat16: states {states / 2**20:.2f} MiB, keys and values {keys / 2**20:.2f} MiB"
        )
    for name, value in ratios.items():
        print(f"{name}: {value:.2f} times its time")
    least = LEAST | {f"decode after {args.contexts[0]}": LEAST["decode"]}
    if args.check and any(value < least.get(name, 0) for name, value in ratios.items()):
        raise SystemExit(f"the hybrid must have at least these speeds: {least}")


if __name__ == "__main__":
    main()
