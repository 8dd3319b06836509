"""Attention: maxlib's implementations against `jax.nn.dot_product_attention` and torch.

python -m tests.benchmarks.attention [--cases train long window decode bf16] [--rounds 5]
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch

from maxlib.ops import attention
from tests.benchmarks.timing import compiled, measure, show


@dataclasses.dataclass(frozen=True)
class Case:
    """One case. Causal, with `queries` at the end of `keys`; backward too, unless decoding."""

    about: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: str = "float32"
    backward: bool = True
    rounds: int | None = None

    def bounds(self):
        ends = np.arange(1, self.queries + 1, dtype=np.int32) + self.keys - self.queries
        starts = np.zeros_like(ends) if self.window is None else np.maximum(ends - self.window, 0)
        return tuple(jnp.asarray(np.broadcast_to(e, (self.batch, self.queries))) for e in (starts, ends))

    def arrays(self):
        rng = np.random.default_rng(0)
        B, T, S, N, K, H = self.batch, self.queries, self.keys, self.heads, self.kv_heads, self.head_dim
        return [rng.standard_normal(s, np.float32) for s in ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))]


CASES = {
    "train": Case("forward + backward, one layer of the Llama bench", 4, 512, 512, 8, 8, 64),
    "gqa": Case("forward + backward, grouped heads", 1, 1024, 1024, 16, 4, 128),
    "long": Case("forward + backward at 8k", 1, 8192, 8192, 2, 2, 64, rounds=1),
    "window": Case("forward + backward at 8k, window 1k", 1, 8192, 8192, 2, 2, 64, window=1024, rounds=1),
    "decode": Case("one token against a cache of 8k", 1, 1, 8192, 32, 8, 128, backward=False),
    "bf16": Case("forward + backward in bfloat16", 4, 512, 512, 8, 8, 64, dtype="bfloat16"),
}


def of_jax(case: Case):
    """Runs and temporary MiB of our implementations and of jax.nn's."""
    start, end = case.bounds()
    q, k, v, d_out = (jnp.asarray(x, case.dtype) for x in case.arrays())

    def ours(name):
        return lambda q, k, v: attention(q, k, v, k_start=start, k_end=end, implementation=name)

    def theirs(q, k, v):
        window = None if case.window is None else (case.window - 1, 0)
        if case.queries > 1:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=end[:, -1])

    def with_backward(call):
        def both(q, k, v, d_out):
            out, vjp = jax.vjp(call, q, k, v)
            return out, vjp(d_out)

        return both

    calls = {"chunked": ours("chunked"), "reference": ours("reference"), "jax.nn": theirs}
    if case.backward:
        return {name: compiled(with_backward(call), q, k, v, d_out) for name, call in calls.items()}
    return {name: compiled(call, q, k, v) for name, call in calls.items()}


def of_torch(case: Case):
    q, k, v, d_out = (
        torch.tensor(x).transpose(1, 2).contiguous().to(getattr(torch, case.dtype)).requires_grad_(case.backward)
        for x in case.arrays()
    )
    mask = None
    if case.window is not None:
        distance = torch.arange(case.keys)[:, None] - torch.arange(case.keys)[None]
        mask = (distance >= 0) & (distance < case.window)
    causal, grouped = mask is None and case.queries > 1, case.heads != case.kv_heads

    def run():
        with torch.set_grad_enabled(case.backward):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, attn_mask=mask, enable_gqa=grouped
            )
        if case.backward:
            torch.autograd.grad(out, (q, k, v), d_out)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which cases (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the short cases")
    args = parser.parse_args()
    for name in args.cases:
        case = CASES[name]
        programs = of_jax(case)
        runs = {name: run for name, (run, _) in programs.items()} | {"torch SDPA": of_torch(case)}
        memory = {name: mib for name, (_, mib) in programs.items()}
        show(f"{name}: {case.about}", measure(runs, case.rounds or args.rounds), "chunked", memory)


if __name__ == "__main__":
    main()
