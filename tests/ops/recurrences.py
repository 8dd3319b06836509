"""Recurrent operations with small inputs and their definitions in float64: token by token, in plain loops."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import ops

B, T = 2, 150  # two chunks of 64 and a part of a third
SLOW = 0.05  # rate of decay: a state that is not reset shows hundreds of tokens later
STARTS = np.zeros((B, T), bool)
STARTS[0, [0, 5, 70, 71, 128]] = STARTS[1, [64, 100]] = True  # within a chunk, at its border, two in a chunk
VALID = np.ones((B, T), bool)
VALID[0, 90:128] = VALID[1, 140:] = False  # before a document, and at the end


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A recurrent operation under test.

    Attributes:
        op: Name of its table of kernels.
        inputs: Makes arrays, `inputs(seed=0, tokens=T, slow=SLOW)`.
        definition: Computes outputs and last state in float64 from `inputs`, `is_start`, `valid` and `state`.
        state: Shape of a state.
        atol: Largest error, as a share of the standard deviation of the values.
        decay_atol: The same for very fast and very slow decays.
    """

    op: str
    inputs: Callable[..., dict[str, np.ndarray]]
    definition: Callable
    state: tuple[int, ...]
    atol: float
    decay_atol: float

    def __call__(self, x, **options):
        return (ops.ssd if self.op == "ssd" else ops.gated_delta_rule)(**x, **options)

    def initial_state(self) -> np.ndarray:
        return np.random.default_rng(9).normal(size=self.state).astype(np.float32)

    def run(self, x, is_start=None, valid=None, state=None, implementation="chunked"):
        return _run(self, implementation, x, is_start, valid, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(recurrence, implementation, x, is_start, valid, state):
    return recurrence(x, is_start=is_start, valid=valid, initial_state=state, implementation=implementation)


def close(got, want, atol):
    np.testing.assert_allclose(got, want, rtol=0, atol=atol * np.std(want))


def cut(x: dict[str, np.ndarray], rows: slice, tokens: slice) -> dict[str, np.ndarray]:
    """Takes rows and tokens of all arrays that have them."""
    return {name: part if part.ndim == 1 else part[rows, tokens] for name, part in x.items()}


def in_float64(x):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x)


def delta_inputs(
    seed: int = 0, tokens: int = T, slow: float = SLOW, *, heads: tuple[int, int] = (2, 4), by_channel: bool = False
) -> dict[str, np.ndarray]:
    """Inputs with `heads` of keys and of values; `by_channel` gives each channel of a key a decay of its own."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    (K, N), HK, HV = heads, 8, 6
    x = {"q": normal(B, tokens, K, HK), "k": normal(B, tokens, K, HK), "v": normal(B, tokens, N, HV)}
    decay = 2 * normal(B, tokens, N, HK) if by_channel else normal(B, tokens, N)
    return x | {
        "log_decay": -slow * np.log1p(np.exp(decay)),
        "beta": 1 / (1 + np.exp(-normal(B, tokens, N))),
    }


def delta_definition(q, k, v, log_decay, beta, is_start=None, valid=None, state=None):
    """Row by row, head by head and token by token."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    q, k, out = unit(q) * q.shape[-1] ** -0.5, unit(k), np.zeros(v.shape)
    last = np.zeros((*v.shape[::2], q.shape[-1], v.shape[-1]))
    # [B, T, N] or [B, T, N, HK] -> [B, T, N, 1 or HK, 1]: one decay for a state, or for each of its rows.
    decay = np.exp(log_decay.reshape(*log_decay.shape[:3], -1, 1))
    for b, n in np.ndindex(last.shape[:2]):
        key = n // (v.shape[2] // q.shape[2])
        S = last[b, n] if state is None else np.asarray(state, np.float64)[b, n].copy()
        for t in range(q.shape[1]):
            if valid is not None and not valid[b, t]:
                continue
            S = np.zeros_like(S) if is_start is not None and is_start[b, t] else decay[b, t, n] * S
            kt = k[b, t, key]
            S = S + np.outer(kt, beta[b, t, n] * (v[b, t, n] - kt @ S))
            out[b, t, n] = q[b, t, key] @ S
        last[b, n] = S
    return out, last


def ssd_inputs(seed: int = 0, tokens: int = T, slow: float = SLOW) -> dict[str, np.ndarray]:
    """Inputs with three heads to a group."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    G, N, WIDTH, SIZE = 2, 6, 5, 7
    return {
        "x": normal(B, tokens, N, WIDTH),
        "dt": np.log1p(np.exp(normal(B, tokens, N))),
        "a": -slow * np.exp(0.3 * normal(N)),
        "b": normal(B, tokens, G, SIZE),
        "c": normal(B, tokens, G, SIZE),
        "d": normal(N),
    }


def ssd_definition(x, dt, a, b, c, d, is_start=None, valid=None, state=None):
    """Row by row, head by head and token by token."""
    x, dt, a, b, c, d = (np.asarray(part, np.float64) for part in (x, dt, a, b, c, d))
    out, last = np.zeros(x.shape), np.zeros((*x.shape[::2], x.shape[-1], b.shape[-1]))
    for row, n in np.ndindex(last.shape[:2]):
        group = n // (x.shape[2] // b.shape[2])
        S = last[row, n] if state is None else np.asarray(state, np.float64)[row, n].copy()
        for t in range(x.shape[1]):
            if valid is not None and not valid[row, t]:
                continue
            step = dt[row, t, n]
            S = np.zeros_like(S) if is_start is not None and is_start[row, t] else np.exp(step * a[n]) * S
            S = S + step * np.outer(x[row, t, n], b[row, t, group])
            out[row, t, n] = S @ c[row, t, group] + d[n] * x[row, t, n]
        last[row, n] = S
    return out, last


GATED_DELTA = Recurrence("gated_delta_rule", delta_inputs, delta_definition, (B, 4, 8, 6), 2e-5, 5e-5)
KDA = Recurrence(
    "kimi_delta_attention",
    functools.partial(delta_inputs, heads=(3, 3), by_channel=True),
    delta_definition,
    (B, 3, 8, 6),
    2e-5,
    2e-5,
)
SSD = Recurrence("ssd", ssd_inputs, ssd_definition, (B, 6, 5, 7), 1e-5, 2e-5)
RECURRENCES = {rule.op: rule for rule in (GATED_DELTA, KDA, SSD)}
