"""MaxText's benchmark networks as they were when its tables of MFU were published, and those tables.

    python -m tests.benchmarks.plans --published

From MaxText/configs/v5e and v5p on 15 December 2023 (commit 76bd53b): figures of README.md, batch, remat and mesh of
the scripts, networks of base.yml; today's differ. bfloat16 without quantization, AdamW with float32 moments.
"""

import dataclasses
import math
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops, plan, sharding
from maxlib.models import llama
from maxlib.plan import parse_target
from maxlib.sharding import constrain

HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Net:
    """`Net(16)()` builds the network of 16 billion parameters; a plan takes one where it takes a function.

    scale: a power of two, about the billions of parameters. Widths, heads and layers grow with it.
    """

    scale: int

    @property
    def size(self) -> dict[str, int]:
        cubes, rest = divmod(int(math.log2(self.scale)), 3)
        wide, wider = 2 ** (cubes + (rest > 0)), 2 ** (cubes + (rest > 1))
        return {"num_layers": 16 * 2**cubes, "dim": 2560 * wider, "mlp_dim": 8192 * wide, "num_heads": 8 * wide}

    def __call__(self) -> "Model":
        return Model(**self.size, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    """Attention and an MLP of two matrices, side by side after one norm."""

    def __init__(self, dim: int, *, mlp_dim: int, num_heads: int, rope: ops.Rope, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(dim)
        self.attn = nn.Attention(dim, num_heads=num_heads, head_dim=HEAD_DIM, rope=rope, rngs=rngs)
        self.mlp = nn.MLP(dim, mlp_dim, act=jax.nn.relu, bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        y = self.norm(x)
        h, cache = self.attn(y, ctx, cache)
        x = x + checkpoint_name(h, "attn") + checkpoint_name(self.mlp(y), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Model(nn.Decoder):
    """A decoder with tied embeddings."""

    def __init__(self, *, num_layers: int, dim: int, mlp_dim: int, num_heads: int, rngs: nnx.Rngs):
        rope = ops.Rope(HEAD_DIM)
        self.embed = nn.Embed(32_768, dim, rngs=rngs)
        make = lambda _, rngs: Block(dim, mlp_dim=mlp_dim, num_heads=num_heads, rope=rope, rngs=rngs)
        self.layers = nn.Stack(make, num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(dim)


@dataclasses.dataclass(frozen=True)
class Present:
    """The networks that the same scripts build since February 2024: Llama's, as many key heads as query heads."""

    scale: int

    def __call__(self) -> llama.Llama:
        dim, heads, mlp_dim, layers = {
            16: (4096, 64, 28_672, 32),
            32: (8192, 64, 28_672, 32),
            64: (8192, 64, 28_672, 64),
            128: (8192, 128, 57_344, 64),
            256: (16_384, 128, 57_344, 64),
        }[self.scale]
        sizes = {"num_layers": layers, "dim": dim, "mlp_dim": mlp_dim, "num_heads": heads, "num_kv_heads": heads}
        return llama.Llama(llama.Config(vocab=32_000, head_dim=128, rope=ops.Rope(128), **sizes), rngs=nnx.Rngs(0))


@dataclasses.dataclass(frozen=True)
class Row:
    """A published row: the configuration and its MFU, which counts FLOPs as maxlib does (causal attention half)."""

    net: Net | Present
    target: str
    per_device_batch_size: int
    remat: str
    tensor: int
    mfu: float

    def plan(self, **options: Any) -> plan.Plan:
        several = parse_target(self.target).slices > 1
        layout = sharding.Layout(
            {"fsdp": -1, "tensor": self.tensor, "dcn": {"data": -1} if several else None},
            sharding.preset("fsdp_tp_sp" if self.tensor > 1 else "fsdp"),
        )
        sizes = {"per_device_batch_size": self.per_device_batch_size, "sequence": 2048}
        return plan.plan(plan.Job(self.net, self.target, layout=layout, remat=self.remat, **sizes, **options))


MINIMAL = "dots"  # what MaxText calls minimal
ROWS = {
    "16B, v5e-256": Row(Net(16), "v5e-256", 6, "full", 1, 0.6110),
    "32B, v5e-256": Row(Net(32), "v5e-256", 4, "full", 1, 0.6686),
    "64B, v5e-256": Row(Net(64), "v5e-256", 2, "full", 1, 0.5990),
    "128B, v5e-256": Row(Net(128), "v5e-256", 1, "full", 16, 0.5606),
    "16B, 2 x v5e-256": Row(Net(16), "v5e-256x2", 6, "full", 1, 0.5937),
    "128B, 2 x v5e-256": Row(Net(128), "v5e-256x2", 1, "full", 16, 0.5582),
    "32B, v5p-128": Row(Net(32), "v5p-128", 8, MINIMAL, 4, 0.7147),
    "64B, v5p-128": Row(Net(64), "v5p-128", 4, MINIMAL, 4, 0.7031),
    "128B, v5p-256": Row(Net(128), "v5p-256", 2, MINIMAL, 8, 0.6868),
    "128B, v5p-512": Row(Net(128), "v5p-512", 2, MINIMAL, 8, 0.6883),
    "256B, v5p-1024": Row(Net(256), "v5p-1024", 2, MINIMAL, 8, 0.6709),
    "512B, v5p-1024": Row(Net(512), "v5p-1024", 2, "full", 16, 0.6399),
    "1024B, v5p-2048": Row(Net(1024), "v5p-2048", 2, "full", 16, 0.5535),
    "1024B, v5p-4096": Row(Net(1024), "v5p-4096", 2, "full", 16, 0.6480),
}

# The present networks as their scripts run them: what MaxText's own compile needs (GiB; commit e591f30), whose MFU
# nobody has published, and the flags with which ours needs no more.
PRESENT: dict[str, tuple[Row, float, tuple[str, ...]]] = {
    "16B, v5e-256": (Row(Present(16), "v5e-256", 6, "full", 1, 0.0), 8.64, ("tpu-memory",)),
    "32B, v5e-256": (Row(Present(32), "v5e-256", 4, "full", 1, 0.0), 10.45, ("tpu-memory",)),
    "64B, v5e-256": (Row(Present(64), "v5e-256", 2, "full", 1, 0.0), 12.40, ()),
    "128B, v5e-256": (Row(Present(128), "v5e-256", 1, "qkv_offload", 16, 0.0), 14.16, ()),
    "32B, v5p-128": (Row(Present(32), "v5p-128", 6, MINIMAL, 4, 0.0), 86.99, ("tpu-memory",)),
    "64B, v5p-128": (Row(Present(64), "v5p-128", 3, MINIMAL, 4, 0.0), 91.22, ()),
    "128B, v5p-256": (Row(Present(128), "v5p-256", 1, MINIMAL, 8, 0.0), 62.14, ()),
    "256B, v5p-1024": (Row(Present(256), "v5p-1024", 1, MINIMAL, 8, 0.0), 58.59, ()),
}
