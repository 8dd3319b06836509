"""A gradient of a model that also returns its residual stream and the outputs of its heads, against a plain one.

python -m tests.benchmarks.capture [--tokens 2048]
"""

import argparse

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn, ops
from maxlib.models import llama
from tests.benchmarks.timing import compiled, measure, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 2048, "layers": 6, "dim": 256, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    cfg = llama.Config(
        vocab=8192,
        dim=args.dim,
        num_layers=args.layers,
        num_heads=args.dim // 32,
        num_kv_heads=args.dim // 64,
        head_dim=32,
        mlp_dim=4 * args.dim,
        rope=ops.Rope(32, max_length=args.tokens),
    )
    params, rest = nn.partition(jax.jit(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))())
    tokens = jax.random.randint(jax.random.key(0), (1, args.tokens), 0, cfg.vocab)

    def mean_loss(model, hidden):
        logits = model.logits(hidden[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    def plain(params):
        model = nn.combine(params, rest)
        return mean_loss(model, model(tokens, dtype=jnp.float32).hidden)

    def captured(params):
        model = nn.combine(params, rest)
        output, values = nn.capture(model, ["resid_post", "heads"])(tokens, dtype=jnp.float32)
        return mean_loss(model, output.hidden), values

    programs = {
        "plain": compiled(jax.grad(plain), params),
        "captured": compiled(jax.grad(captured, has_aux=True), params),
    }
    times = measure({name: run for name, (run, _) in programs.items()}, args.rounds)
    show(f"gradient, {args.tokens} tokens", times, "plain", {name: mib for name, (_, mib) in programs.items()})


if __name__ == "__main__":
    main()
