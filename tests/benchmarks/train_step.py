"""One training step of the same Llama: maxlib against transformers + torch, interleaved on the same machine.

    python tests/benchmarks/train_step.py [--rounds 7] [--json out.json]

float32, batch 4 x 512 tokens, 4 layers x 512 wide, 8 heads, MLP 1408, vocabulary 32,000, AdamW with gradient clipping.
Each round runs both once, in turn; the ratio is the median over rounds of (torch time / maxlib time).
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxlib import nn, ops
from maxlib.models import llama

BATCH, SEQ, VOCAB, LAYERS, DIM, HEADS, MLP = 4, 512, 32_000, 4, 512, 8, 1408


def maxlib_step(tokens):
    cfg = llama.Config(
        vocab=VOCAB,
        num_layers=LAYERS,
        dim=DIM,
        mlp_dim=MLP,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM // HEADS,
        rope=ops.Rope(DIM // HEADS),
    )
    model = jax.jit(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))()
    return trainer(model, tokens)


def loss_of(model, tokens, key=None):
    """The mean cross-entropy of the next tokens; `key` as losses of a Trainer have it."""
    hidden = model(tokens[:, :-1], dtype=jnp.float32).hidden
    targets = tokens[:, 1:]
    weights = jnp.full(targets.shape, 1.0 / targets.size)
    return ops.fused_linear_cross_entropy(hidden, model.head_weight(), targets, weights=weights).loss


def trainer(model, tokens):
    """A call that trains a copy of the model for a step."""
    trainable, rest = nn.partition(jax.tree.map(jnp.copy, model))  # the step takes its arrays over
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    loss_fn = lambda trainable, tokens: loss_of(nn.combine(trainable, rest), tokens)

    def step(state, tokens):
        trainable, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(trainable, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, trainable)
        return (optax.apply_updates(trainable, updates), opt_state), loss

    state = [(trainable, jax.jit(optimizer.init)(trainable))]
    compiled = jax.jit(step, donate_argnums=0).lower(state[0], tokens).compile()

    def run():
        state[0], loss = compiled(state[0], tokens)
        return float(loss)

    return run


def torch_step(tokens):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        attn_implementation="sdpa",
    )
    return torch_trainer(transformers.LlamaForCausalLM(config), tokens)


def torch_trainer(model, tokens):
    """The same with a model of transformers."""
    import torch

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)
    ids = torch.tensor(np.asarray(tokens), dtype=torch.long)

    def run():
        optimizer.zero_grad()
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return run


def measure(runs, rounds):
    times = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - begin)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ + 1)), jnp.int32)
    times = measure({"maxlib": maxlib_step(tokens), "transformers + torch": torch_step(tokens)}, args.rounds)
    ratio = statistics.median(t / m for m, t in zip(*times.values(), strict=True))
    speeds = {name: BATCH * SEQ / statistics.median(t) for name, t in times.items()}
    for name, speed in speeds.items():
        print(f"{name:24} {speed:8.0f} tokens/s")
    print(f"ratio {ratio:.2f}  (jax {jax.__version__}, {platform.machine()})")
    if args.json:
        args.json.write_text(json.dumps({"tokens_per_second": speeds, "ratio": ratio, "seconds": times}, indent=1))


if __name__ == "__main__":
    main()
