"""Cache sizes of Gemma 3 (five windowed layers per global one) compared with full caches everywhere. Runs no model.

python -m tests.benchmarks.cache [--length 8192]
"""

import argparse
import dataclasses

import jax
from flax import nnx

from maxlib.models import gemma3


def cache_bytes(cfg: gemma3.Config, length: int) -> int:
    """Of one row, in bfloat16."""
    cache = jax.eval_shape(lambda: gemma3.Gemma3(cfg, rngs=nnx.Rngs(0)).init_cache(1, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    args = parser.parse_args()
    for name in ("gemma3-1b", "gemma3-4b", "gemma3-27b"):
        cfg = dataclasses.replace(gemma3.PRESETS[name], vision=None)
        full = dataclasses.replace(cfg, layer_types=(gemma3.GLOBAL,) * cfg.num_layers)
        own, most = cache_bytes(cfg, args.length), cache_bytes(full, args.length)
        print(f"{name} at {args.length}: {own / 2**20:.0f} MiB, full {most / 2**20:.0f} MiB, share {own / most:.2f}")


if __name__ == "__main__":
    main()
