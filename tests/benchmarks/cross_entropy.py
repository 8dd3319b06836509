"""Forward plus backward of the loss: maxlib against a plain JAX loss and torch.

python -m tests.benchmarks.cross_entropy [--tokens 2048 --dim 512 --vocab 32000 --chunks 256 1024]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import torch

from maxlib.ops import fused_linear_cross_entropy
from tests.benchmarks.timing import compiled, measure, show


def plain_loss(hidden, weight, targets):
    logits = jnp.einsum("md,vd->mv", hidden, weight, preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=1) - picked)


def matmuls(hidden, weight, targets):
    """Runs the three matmuls only, chunk by chunk: a lower bound for the time of any loss."""

    def step(total, h):
        logits = h @ weight.T
        return total + logits.T @ h, logits @ weight

    chunks = hidden.reshape(-1, min(512, hidden.shape[0]), hidden.shape[1])
    return jax.lax.scan(step, jnp.zeros_like(weight), chunks)


def of_torch(inputs):
    hidden, weight = (torch.tensor(np.asarray(x, np.float32)).requires_grad_() for x in inputs[:2])
    targets = torch.tensor(np.asarray(inputs[2], np.int64))

    def run():
        hidden.grad = weight.grad = None
        logits = torch.nn.functional.linear(hidden, weight)
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 2048, "dim": 512, "vocab": 32_000, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (args.tokens, args.dim), args.dtype)
    weight = jax.random.normal(keys[1], (args.vocab, args.dim), args.dtype) * args.dim**-0.5
    inputs = hidden, weight, jax.random.randint(keys[2], (args.tokens,), 0, args.vocab)

    def chunked(chunk):
        return lambda h, w, y: fused_linear_cross_entropy(h, w, y, chunk=chunk).loss

    losses = {f"maxlib chunk={chunk}": chunked(chunk) for chunk in args.chunks} | {"plain JAX": plain_loss}
    steps = {name: jax.value_and_grad(loss, (0, 1)) for name, loss in losses.items()} | {"matmuls alone": matmuls}
    programs = {name: compiled(step, *inputs) for name, step in steps.items()}
    runs = {name: run for name, (run, _) in programs.items()} | {"torch": of_torch(inputs)}
    memory = {name: mib for name, (_, mib) in programs.items()}
    show("loss, forward + backward", measure(runs, args.rounds), "torch", memory)


if __name__ == "__main__":
    main()
