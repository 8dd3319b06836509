"""Test cases of `check`: shapes and features as in training and decoding."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import ops
from maxlib.ops._attention.masks import Causal, Full, Mask, MaskHint, SlidingWindow, TokenPositions, key_intervals
from maxlib.ops._attention.table import ATTENTION
from maxlib.ops._check.recurrences import SMALL_ENOUGH, GatedDelta, KimiDelta, Recurrence, StateSpace
from maxlib.ops._dispatch import Explanation, Op
from maxlib.ops._grouped_matmul.api import GROUPED_MATMUL
from maxlib.ops._recurrent.gated_delta import GATED_DELTA
from maxlib.ops._recurrent.kimi_delta import KIMI_DELTA
from maxlib.ops._recurrent.ssd import SSD

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}
"""Largest error of an array relative to its norm, by dtype. Rounding to bfloat16 alone gives 0.002."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call of attention: `batch` rows of `tokens` queries after `cache` cached keys, `room` slots left empty.

    The values of `latents` are the first channels of the keys.
    """

    tokens: int = 4096
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    full: bool = False
    window: int | None = None
    documents: int = 1
    cache: int = 0
    room: int = 0
    softcap: float | None = None
    sinks: bool = False
    latents: bool = False
    gradients: bool = True

    op = "attention"

    @property
    def keys(self) -> int:
        """Returns the number of keys, those of empty slots included."""
        return self.cache + self.tokens + self.room

    @property
    def truth(self) -> str:
        """Names the implementation to compare with: where scores do not fit into memory, one that was compared."""
        return "chunked" if self.keys > SMALL_ENOUGH else "reference"

    @property
    def mask(self) -> Mask:
        mask = Full() if self.full else Causal()
        return mask if self.window is None else mask & SlidingWindow(self.window)

    def intervals(self) -> tuple[jax.Array, jax.Array, MaskHint | None]:
        """Returns the key interval of every query and the mask's static description."""
        T, S, filled = self.tokens, self.keys, self.cache + self.tokens
        index = np.arange(T) + self.cache  # [T]: queries come after the cache
        length = -(-filled // self.documents)
        start = index // length * length
        stop = np.minimum(start + length, filled)
        rows = (np.broadcast_to(x, (self.batch, T)).astype(np.int32) for x in (index, start, stop))
        tokens = TokenPositions(*map(jnp.asarray, rows))
        # Kernels for named masks get the hint that `nn.Attention` would pass.
        hint = self.mask.static
        if hint is not None:
            aligned = T == S
            ids = (tokens.start, jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32) // length * length, (self.batch, S)))
            segmented = hint.segmented or self.documents > 1
            hint = MaskHint(dataclasses.replace(hint, aligned=aligned, segmented=segmented), ids if segmented else None)
        return *key_intervals(self.mask, tokens), hint

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns q, k, v, the output's cotangent, and sinks if there are any."""
        B, T, S = self.batch, self.tokens, self.keys
        shapes = {"q": (B, T, self.heads, self.key_dim), "k": (B, S, self.kv_heads, self.key_dim)}
        shapes |= {} if self.latents else {"v": (B, S, self.kv_heads, self.value_dim)}
        shapes["d_out"] = B, T, self.heads, self.value_dim
        keys = jax.random.split(jax.random.key(0), 5)
        arrays = {
            name: jax.random.normal(key, shape, dtype) for key, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        return arrays | ({"sinks": jax.random.normal(keys[4], (self.heads,), jnp.float32)} if self.sinks else {})

    def call(self, run, arrays: dict[str, jax.Array]) -> jax.Array:
        """Runs `run`, a function like `ops.attention`, on the arrays and the case's mask."""
        start, end, hint = self.intervals()
        values = {"v": self.value_dim} if self.latents else {}
        return run(**arrays, **values, k_start=start, k_end=end, mask_hint=hint, softcap=self.softcap)

    def explain(self, arrays: dict[str, jax.Array], **options: Any) -> Explanation:
        """Explains which implementation would run the arrays, for the same arguments as a layer's: interval ends and
        the mask hint.
        """
        hint = self.intervals()[2]
        options |= {"mask_hint": hint and hint.static, "softcap": self.softcap, "sinks": arrays.get("sinks")}
        values: Any = self.value_dim if self.latents else arrays["v"]
        ends = jnp.zeros(arrays["q"].shape[:2], jnp.int32)
        return ops.explain_attention(arrays["q"], arrays["k"], values, k_end=ends, **options)


@dataclasses.dataclass(frozen=True)
class GroupedMatmul:
    """One call of a grouped matmul with unequal numbers of rows; one expert has none."""

    rows: int = 32768
    experts: int = 16
    width_in: int = 4096
    width_out: int = 2048

    op = "grouped_matmul"
    gradients = True

    @property
    def truth(self) -> str:
        """Names the implementation to compare with: where the reference's loop over experts is long, another one."""
        return "reference" if self.experts <= 16 else "tiled"

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns rows, one matrix per expert, and the output's cotangent."""
        keys = jax.random.split(jax.random.key(0), 3)
        rows = jax.random.normal(keys[0], (self.rows, self.width_in), dtype)
        weights = jax.random.normal(keys[1], (self.experts, self.width_out, self.width_in), dtype) / math.sqrt(
            self.width_in
        )
        return {
            "rows": rows,
            "weights": weights.astype(dtype),
            "d_out": jax.random.normal(keys[2], (self.rows, self.width_out), dtype),
        }

    def call(self, run, arrays: dict[str, jax.Array]) -> jax.Array:
        """Runs `run`, a function like `ops.grouped_matmul`, on the arrays."""
        share = np.random.default_rng(0).dirichlet(np.full(self.experts, 4.0))
        share[1] = 0  # an expert without rows: its gradient must be zero
        counts = np.floor(share / share.sum() * self.rows).astype(np.int32)
        return run(arrays["rows"], arrays["weights"], jnp.asarray(counts))

    def explain(self, arrays: dict[str, jax.Array], **options: Any) -> Explanation:
        """Explains which implementation would run the arrays."""
        return ops.explain_grouped_matmul(arrays["rows"], arrays["weights"], **options)


Case = Attention | GroupedMatmul | GatedDelta | KimiDelta | StateSpace

CASES: dict[str, Case] = {
    "causal-2k": Attention(2048),
    "causal-8k": Attention(8192),
    "causal-32k": Attention(32768),
    "full-8k": Attention(8192, full=True),
    "heads of 64": Attention(8192, heads=32, kv_heads=32, key_dim=64, value_dim=64),
    "heads of 256": Attention(4096, heads=8, kv_heads=8, key_dim=256, value_dim=256),
    "grouped queries": Attention(8192, heads=32, kv_heads=8),
    "latent (192, 128)": Attention(4096, key_dim=192),
    "window": Attention(8192, window=1024),
    "eight documents": Attention(8192, documents=8),
    "odd length": Attention(3001, batch=2),
    "soft-cap": Attention(4096, softcap=50.0),
    "sinks": Attention(4096, sinks=True),
    "sinks, window": Attention(4096, heads=64, kv_heads=8, key_dim=64, value_dim=64, window=128, sinks=True),
    "prefill": Attention(2048, heads=32, kv_heads=8, room=2048, gradients=False),
    "prefill in parts": Attention(2048, heads=32, kv_heads=8, cache=6144, room=8192, gradients=False),
    "decode": Attention(1, batch=8, heads=32, kv_heads=8, cache=32767, gradients=False),
    "decode, half full": Attention(1, batch=8, heads=32, kv_heads=8, cache=16383, room=16384, gradients=False),
    "decode, window": Attention(1, batch=8, heads=32, kv_heads=8, cache=32767, window=4096, gradients=False),
    "four new tokens": Attention(4, batch=8, heads=32, kv_heads=8, cache=32764, gradients=False),
    "decode latents": Attention(1, 8, 128, 1, 576, 512, cache=8191, latents=True, gradients=False),
    "experts": GroupedMatmul(),
    "many experts": GroupedMatmul(65536, 128, 2048, 768),
    "delta-2k": GatedDelta(2048),
    "delta-32k": GatedDelta(32768),
    "delta, documents": GatedDelta(8192, documents=8),
    "delta, odd sizes": GatedDelta(3001, batch=2, key_heads=4, heads=4, key_dim=96, value_dim=64),
    "kimi-8k": KimiDelta(8192, key_heads=32, heads=32),
    "kimi, odd sizes": KimiDelta(3001, batch=2, key_heads=6, heads=6, key_dim=64, value_dim=128, documents=3),
    "ssd-8k": StateSpace(8192, heads=128, value_dim=64),
    "ssd, odd sizes": StateSpace(3001, batch=2, key_heads=3, heads=6, key_dim=64, value_dim=128, documents=3),
}


def tolerance(case: Case, name: str, dtype: str) -> float:
    """Returns the largest error of one result of a case, relative to its norm: of the output, `out`, or a gradient."""
    # Kernels of recurrences round the operands of every matmul to bfloat16, states too. The backward pass multiplies
    # what the forward pass computed from such operands by gradients that have come through as many matmuls again: twice
    # as many roundings in a row, so twice the bound. `chunked` with operands rounded like that is off by up to 0.6% in
    # outputs and 0.7% in gradients here. Where states are large, most of the gradient of a key of unit norm cancels,
    # and 1.4% of what is left was the error of right kernels.
    twice = isinstance(case, Recurrence) and dtype == "bfloat16" and name != "out"
    return (2 if twice else 1) * TOLERANCE[dtype]


OPS: dict[str, Op] = {op.name: op for op in (ATTENTION, GROUPED_MATMUL, GATED_DELTA, KIMI_DELTA, SSD)}


def bound(op: str, implementation: str) -> Callable:
    """Returns the public function of an operation, bound to an implementation."""
    return functools.partial(getattr(ops, op), implementation=implementation)
