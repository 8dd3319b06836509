"""One training step of the same Llama: maxlib against transformers + torch, eager and compiled.

    python -m tests.benchmarks.train_step [--rounds 7]

float32, batch 4 x 512 tokens, 4 layers x 512 wide, 8 heads, MLP 1408, vocabulary 32,000, AdamW with gradient clipping.
The limit is what the step's matrix products alone take at the speed of a large one.
"""

import argparse
import copy
import statistics
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import maxlib
from maxlib import ops, training
from tests.benchmarks import machine
from tests.benchmarks.timing import measure, ratio

BATCH, SEQ = 4, 512
CONFIG = transformers.LlamaConfig(
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    attn_implementation="sdpa",
)


def read(theirs: transformers.PreTrainedModel):
    """Returns the same model in maxlib."""
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return maxlib.from_pretrained(directory)


def loss_of(model, tokens, key=None):
    """The mean cross-entropy of the next tokens; `key` as losses of a Trainer have it."""
    hidden = model(tokens[:, :-1], dtype=jnp.float32).hidden
    targets = tokens[:, 1:]
    weights = jnp.full(targets.shape, 1.0 / targets.size)
    return ops.fused_linear_cross_entropy(hidden, model.head_weight(), targets, weights=weights).loss


def trainer(model, tokens):
    """A call that trains a copy of the model for a step, as a Trainer does; the decay is torch's, of all weights."""
    optimizer = training.adamw(1e-4, b2=0.999, weight_decay=1e-4, mask=None)
    state = [training.make_state(jax.tree.map(jnp.copy, model), optimizer)]  # the step takes its arrays over
    step = training.jit_step(training.make_train_step(training.NextToken(), optimizer, dtype=jnp.float32))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def run():
        state[0], metrics = step(state[0], batch)
        return float(metrics["loss"])

    return run


def torch_trainer(model, tokens):
    """The same with a model of transformers, which may be compiled."""
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


def flops():
    """Returns the floating-point operations of the step's matrix products, in both passes."""
    D, F, V, L = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.vocab_size, CONFIG.num_hidden_layers
    weights = L * (4 * D * D + 3 * D * F) + D * V
    attention = L * 2 * D * (SEQ + 1) / 2  # scores and sums of values, of the earlier half of the keys
    return 3 * 2 * BATCH * SEQ * (weights + attention)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    maxlib.keep_freed_memory()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, SEQ + 1)), jnp.int32)
    theirs = transformers.LlamaForCausalLM(CONFIG)
    runs = {
        "maxlib": trainer(read(theirs), tokens),
        "torch.compile": torch_trainer(torch.compile(copy.deepcopy(theirs)), tokens),
        "torch": torch_trainer(theirs, tokens),
    }
    times = measure(runs, args.rounds)
    for name, seconds in times.items():
        speed, against = BATCH * SEQ / statistics.median(seconds), ratio(times, name, "maxlib")
        print(f"{name:14} {speed:8.0f} tokens/s, {against:.2f} of maxlib's time")
    limit = flops() / (1e9 * machine.speeds()["XLA GFLOP/s"])
    print(f"{'limit':14} {BATCH * SEQ / limit:8.0f} tokens/s, {limit / statistics.median(times['maxlib']):.2f}")
    print(machine.describe())


if __name__ == "__main__":
    main()
