"""A model unknown to maxlib with every kind of weight that a table must describe; it computes nothing."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from maxlib import nn, sharding
from maxlib.nn._linear import draw_key
from maxlib.weights import Absent, Convert, Copy, Family, HFConfig, Ignore, Renamed, Table, Weight

D, N, K, H, F, E, V = 16, 4, 2, 8, 24, 8, 40
sharding.declare_axes(*(f"axis{d}" for d in range(4)))


class Leaf(nnx.Module):
    def __init__(self, *shape: int, axes: tuple[str, ...] | None = None, rngs: nnx.Rngs, kind=nnx.Param):
        # Whole numbers and a power of two: the same bits in every layout, and quick to compile.
        seed = jax.random.key_data(draw_key(rngs)).sum() % 1009
        values = ((jnp.arange(math.prod(shape), dtype=jnp.uint32) * 389 + seed) % 1009).astype(jnp.float32) / 512 - 1
        self.w = kind(values.reshape(shape), axes=axes or tuple(f"axis{d}" for d in range(len(shape))))


class Layer(nnx.Module):
    """A dense layer, or one with experts, with or without a bias."""

    def __init__(self, kind: str, *, rngs: nnx.Rngs):
        self.q = Leaf(N, H, D, axes=("heads", "head_dim", "embed"), rngs=rngs)
        self.k = Leaf(K, H, D, axes=("kv_heads", "head_dim", "embed"), rngs=rngs)
        self.v = Leaf(K, H, D, axes=("kv_heads", "head_dim", "embed"), rngs=rngs)
        self.scale = Leaf(rngs=rngs)
        if kind == "dense":
            self.gate = Leaf(F, D, axes=("mlp", "embed"), rngs=rngs)
            self.up = Leaf(F, D, axes=("mlp", "embed"), rngs=rngs)
        else:
            self.experts = nnx.Dict(
                gate=Leaf(E, F, D, axes=("expert", "mlp", "embed"), rngs=rngs),
                up=Leaf(E, F, D, axes=("expert", "mlp", "embed"), rngs=rngs),
                down=Leaf(E, D, F, axes=("expert", "embed", "mlp"), rngs=rngs),
            )
            self.calls = nnx.Variable(jnp.full((), 7, jnp.int32), axes=())
        if kind == "experts, bias":
            self.bias = Leaf(E, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Config:
    num_layers: int = 6
    tied: bool = True


class Fields:
    """How config.json spells it, written by hand."""

    config, model_types = Config, ("zoo",)

    def read(self, hf: HFConfig) -> Config:
        hf.require("model_type", "zoo")
        return Config(num_layers=hf.take("layers", kind=int), tied=hf.take("tied", True))

    def write(self, cfg: Config) -> dict[str, Any]:
        return {"model_type": "zoo", "layers": cfg.num_layers, "tied": cfg.tied}


class Zoo(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = Leaf(V, D, axes=("vocab", "embed"), rngs=rngs)
        # Every second one of the layers with experts has a bias.
        kinds = ["dense"] + ["experts, bias" if i % 2 else "experts" for i in range(1, cfg.num_layers)]
        self.text = nn.Stack(lambda kind, rngs: Layer(kind, rngs=rngs), kinds, rngs=rngs)
        self.tower = nnx.Dict(layers=nn.Stack(lambda _, rngs: Leaf(D, D, rngs=rngs), 3, rngs=rngs))
        self.heads = nnx.List([Leaf(D, rngs=rngs) for _ in range(2)])
        if not cfg.tied:
            self.head = Leaf(V, D, axes=("vocab", "embed"), rngs=rngs)


def quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One float8 row scale per output row."""
    scale = np.abs(w).max(-1, keepdims=True).astype(np.float32) / 448
    return (w.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn), scale


def dequantize(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (w.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)


def table(cfg: Config) -> Table:
    hf_prefix, prefix = "model.layers.{i}.", "text.{i}."
    fused, interleaved = "(R H) D -> R H D", "E D (F two) -> E F D"
    return [
        Weight("model.embed.weight", "embed.w"),
        Weight(hf_prefix + "qkv.weight", prefix + "q.w", fused, at={"R": 0}),
        Weight(hf_prefix + "qkv.weight", prefix + "k.w", fused, at={"R": N}),
        Weight(hf_prefix + "qkv.weight", prefix + "v.w", fused, at={"R": N + K}),
        Weight(hf_prefix + "scale", prefix + "scale.w"),
        Weight(hf_prefix + "gate_up.weight", prefix + "gate.w", "(two F) D -> F D", at={"two": 0}),
        Weight(hf_prefix + "gate_up.weight", prefix + "up.w", "(two F) D -> F D", at={"two": 1}),
        Weight(hf_prefix + "experts.gate_up", prefix + "experts.gate.w", interleaved, at={"two": 0}),
        Weight(hf_prefix + "experts.gate_up", prefix + "experts.up.w", interleaved, at={"two": 1}),
        Weight(hf_prefix + "experts.{e}.down.weight", prefix + "experts.down.w", "D F -> e D F"),
        Convert(
            (hf_prefix + "experts.down_f8", hf_prefix + "experts.down_scale"),
            prefix + "experts.down.w",
            load=dequantize,
            batch=1,
        ),
        Convert(
            (hf_prefix + "log_bias",), prefix + "bias.w", load=np.log, save=lambda b: (np.exp(b),), dtype="float32"
        ),
        Absent(prefix + "calls"),
        Weight("vision.blocks.{i}.proj.weight", "tower.layers.{i}.w"),
        Weight("heads.{i}.weight", "heads.{i}.w", "D -> D"),
        Weight("head.weight", "head.w"),
        Copy("head.weight", of="model.embed.weight"),
        Ignore(hf_prefix + "rotary.inv_freq"),
        Ignore("mtp.*"),
        Renamed("tower.", "vision."),
    ]


FAMILY = Family("zoo", Zoo, Fields(), table, presets={"zoo-tiny": Config()})


def zoo(cfg: Config = Config(), seed: int = 0) -> Zoo:
    return jax.jit(lambda: Zoo(cfg, rngs=nnx.Rngs(seed)))()  # op by op it compiles 80 programs
