"""Calls of kernels at the sizes of training and decoding, and their comparison with float32 on an accelerator."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import nn, ops
from maxlib.ops import Causal, Full, Mask, MaskHint, SlidingWindow
from maxlib.ops._attention.table import ATTENTION
from maxlib.ops._grouped_matmul.api import GROUPED_MATMUL
from maxlib.ops._recurrent.gated_delta import GATED_DELTA

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}
"""Largest error of an array relative to its norm, by dtype. Rounding to bfloat16 alone gives 0.002."""

SMALL_ENOUGH = 4096  # tokens for which the definition can keep a state of each


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
        """Returns the key interval of every query and the mask's static description, as `nn.Attention` passes them."""
        if self.cache or self.room:
            cache = nn.cache.kv_cache(
                self.batch, self.keys, num_kv_heads=1, k_dim=1, v_dim=1, ring=None, dtype=jnp.float32
            )
            full = nn.cache.Cache([cache], jnp.full(self.batch, self.cache, jnp.int32))
            ctx = nn.make_context(self.batch, self.tokens, cache=full)
            return *ctx.key_intervals(self.mask), ctx.mask_hint(self.mask, cache)
        ids = 1 + jnp.arange(self.tokens) // -(-self.tokens // self.documents)
        ids = jnp.broadcast_to(ids, (self.batch, self.tokens)) if self.documents > 1 else None
        ctx = nn.make_context(self.batch, self.tokens, segment_ids=ids)
        return *ctx.key_intervals(self.mask), ctx.mask_hint(self.mask)

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


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """One call of a recurrence in two parts; the second starts from the state of the first.

    Args:
        tokens: Tokens of a row.
        batch: Rows.
        key_heads: Heads of keys and queries, in Kimi delta attention as many as of values, or groups of state-space
            duality.
        heads: Heads of values.
        key_dim: Width of keys, or size of the state of state-space duality.
        value_dim: Width of values.
        documents: Documents in a row.
    """

    tokens: int = 8192
    batch: int = 1
    key_heads: int = 8
    heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    documents: int = 1

    op: ClassVar[str]
    gradients: ClassVar[bool] = True

    @property
    def truth(self) -> str:
        """Names the implementation to compare with: where the definition's states do not fit, one that was compared."""
        return "chunked" if self.tokens > SMALL_ENOUGH else "sequential"

    def call(self, run: Callable, arrays: dict[str, jax.Array]) -> jax.Array:
        """Runs `run`, a function like that of the operation in `ops`, on both parts."""
        third = self.tokens // 3  # not the border of a chunk
        # As layers do: rows of one document have no starts. Arrays of one axis belong to heads, not to tokens.
        x = arrays if self.documents == 1 else arrays | {"is_start": self._starts()}

        def tokens(at: slice) -> dict[str, jax.Array]:
            return {name: a if a.ndim == 1 else a[:, at] for name, a in x.items()}

        # Like prefill in two calls: the output and gradients of the second depend on the state in between.
        first, state = run(**tokens(slice(third)))
        last, _ = run(**tokens(slice(third, None)), initial_state=state)
        return jnp.concatenate([first, last], axis=1)

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns the operation's arrays and the output's cotangent; rates are float32, as in layers."""
        raise NotImplementedError

    def _starts(self) -> jax.Array:
        """Returns True for the first token of each document but the first, `B T`."""
        index, length = jnp.arange(self.tokens), -(-self.tokens // self.documents)
        return jnp.broadcast_to((index % length == 0) & (index > 0), (self.batch, self.tokens))

    def _normal(self, *shapes: tuple[int, ...]) -> list[jax.Array]:
        """Draws an array of normal numbers in float32 for each shape behind rows and tokens."""
        keys = jax.random.split(jax.random.key(0), len(shapes))
        leading = self.batch, self.tokens
        return [jax.random.normal(key, (*leading, *shape)) for key, shape in zip(keys, shapes, strict=True)]

    def _slow(self) -> jax.Array:
        """Returns how fast each head forgets: over ten to thousands of tokens."""
        return jnp.logspace(-4, -1, self.heads)


class GatedDelta(Recurrence):
    """One call of the gated delta rule in two parts."""

    op = "gated_delta_rule"
    by_channel: ClassVar[bool] = False  # True if every channel of a key forgets at its own rate

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns queries, keys, values, rates, and the output's cotangent; rates are float32, as in layers."""
        keys, values, heads = (self.key_heads, self.key_dim), (self.heads, self.value_dim), (self.heads,)
        q, k, v, decay, beta, d_out = self._normal(
            keys, keys, values, keys if self.by_channel else heads, heads, values
        )
        slow = self._slow().reshape(1, 1, -1, *[1] * (decay.ndim - 3))
        rates = {"log_decay": -slow * jax.nn.softplus(decay), "beta": jax.nn.sigmoid(beta)}
        return _narrow(dtype, q=q, k=k, v=v, d_out=d_out) | rates


class KimiDelta(GatedDelta):
    """One call of Kimi delta attention in two parts."""

    by_channel = True


class StateSpace(Recurrence):
    """One call of state-space duality in two parts.

    The gradient of `a` has one number for each head, a sum over tokens that partly cancels. Only several heads together
    say something: of two, over 600 tokens, right kernels in bfloat16 were off by 1.9%; of six or more, by 0.4%.
    """

    op = "ssd"

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """Returns inputs, steps, rates, projections, and the output's cotangent; steps and rates are float32, as in
        layers.
        """
        keys, values = (self.key_heads, self.key_dim), (self.heads, self.value_dim)
        x, dt, b, c, d_out = self._normal(values, (self.heads,), keys, keys, values)
        return _narrow(dtype, x=x, b=b, c=c, d_out=d_out) | {"dt": jax.nn.softplus(dt), "a": -self._slow()}


def _narrow(dtype: Any, **arrays: jax.Array) -> dict[str, jax.Array]:
    return {name: x.astype(dtype) for name, x in arrays.items()}


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


REPEATS = 10  # runs that must agree bit for bit
# Those that add up some gradients in an order that varies: their runs differ in bits, and each of them must be right.
VARY = {("attention", "cudnn"), ("attention", "tokamax")}
TABLES = {"attention": ATTENTION, "grouped_matmul": GROUPED_MATMUL, "gated_delta_rule": GATED_DELTA, "ssd": GATED_DELTA}


def implementations(case: Case) -> list[str]:
    """Returns the names of a case's implementations, but for the definition."""
    names = [kernel.name for kernel in TABLES[case.op].kernels]
    return [name for name in names if name not in ("reference", "sequential")]


def bound(op: str, implementation: str) -> Callable:
    """Returns the public function of an operation, bound to an implementation."""
    return functools.partial(getattr(ops, op), implementation=implementation)


def results_of(case: Case, run: Callable) -> Callable:
    """Returns a function from the arrays to the output and the gradients."""

    def results(arrays):
        inputs = {name: x for name, x in arrays.items() if name != "d_out"}
        if not case.gradients:
            return {"out": case.call(run, inputs)}
        out, vjp = jax.vjp(lambda x: case.call(run, x), inputs)
        return {"out": out} | {f"d_{name}": x for name, x in vjp(arrays["d_out"])[0].items()}

    return results


def truth_of(case: Case, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the results in float32."""
    # It runs once: XLA on a GPU would take seconds to find the fastest way to compute each of its matmuls.
    quick = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}
    with jax.default_matmul_precision("float32"):
        wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
        return jax.device_get(jax.jit(results_of(case, bound(case.op, case.truth)), compiler_options=quick)(wide))


def check(case: Case, run: Callable, arrays: dict[str, jax.Array], truth: dict[str, Any], *, same: bool = True) -> None:
    """Compares the results with the truth, and those of further runs: with the first, bit for bit, if they are to be
    the `same`, else with the truth. A kernel with a missing wait sometimes reads data too early.
    """
    compiled, dtype = jax.jit(results_of(case, run)), str(arrays["d_out"].dtype)
    first = jax.device_get(compiled(arrays))
    check_right(case, first, truth, dtype)
    for _ in range(REPEATS):
        again = jax.device_get(compiled(arrays))
        if same:
            assert all(np.array_equal(again[name], first[name]) for name in first), "runs differ in some bit"
        else:
            check_right(case, again, truth, dtype)


def check_right(case: Case, got: dict[str, Any], truth: dict[str, Any], dtype: str) -> None:
    """A wrong tile changes the norm of the difference, rounding does not."""
    for name, want in truth.items():
        want, difference = np.asarray(want, np.float64), np.asarray(got[name], np.float64) - want
        error = np.linalg.norm(difference) / max(np.linalg.norm(want), 1e-6)
        assert error <= tolerance(case, name, dtype), f"{name} is off by {error:.2g} of its norm"
