"""All combinations of attention's features, a pairwise cover of them, and the inputs of each case."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np

from maxlib.ops import (
    BidirectionalBlocks,
    BlockCausal,
    Causal,
    Chunked,
    Full,
    Prefix,
    SlidingWindow,
    TokenPositions,
    key_intervals,
)

FACTORS = {
    "heads": [(4, 4), (4, 2), (3, 1)],  # N, K
    "widths": [(8, 8), (6, 4), (4, 6)],  # Hk, Hv
    "lengths": [(37, 37), (1, 33), (18, 35)],  # T, S
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "bias": [None, (True, False), (False, True)],  # whether it has a batch axis, a head axis
}

MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & SlidingWindow(7),
    "both sides": SlidingWindow(5),
    "chunk": Causal() & Chunked(6),
    "prefix": Causal() | Prefix(9),
    "blocks": BlockCausal(6),
    "spans": (Causal() & SlidingWindow(7)) | BidirectionalBlocks(),
}
DOCUMENTS = ["one", "packed", "padded"]


@dataclasses.dataclass(frozen=True)
class Case:
    heads: tuple
    widths: tuple
    lengths: tuple
    softcap: float | None
    sinks: bool
    bias: tuple | None

    def __str__(self):
        return "-".join(str(value).replace(" ", "") for value in dataclasses.astuple(self))


def product(factors=FACTORS) -> list[Case]:
    return [Case(*values) for values in itertools.product(*factors.values())]


def pairwise(factors=FACTORS) -> list[Case]:
    """Few cases among which every pair of values of any two factors occurs."""
    pairs = lambda case: {
        (a, x, b, y) for (a, x), (b, y) in itertools.combinations(enumerate(dataclasses.astuple(case)), 2)
    }
    everything = {case: pairs(case) for case in product(factors)}
    missing, chosen = set().union(*everything.values()), []
    while missing:
        best = max(everything, key=lambda case: len(everything[case] & missing))
        chosen.append(best)
        missing -= everything[best]
    return chosen


def tokens(documents: str, num_queries: int, num_keys: int) -> TokenPositions:
    """Two rows whose queries end where the keys end: one document each, several, or several with padding behind and
    between.
    """
    S, rows = num_keys, []
    cuts = {"one": ([S], [S]), "packed": ([S // 3, S], [2, S // 2, S]), "padded": ([S // 4, S // 2, S], [S - 3, S])}
    for row, ends in enumerate(cuts[documents]):
        index = np.arange(num_queries) + num_keys - num_queries
        which = np.searchsorted(ends, np.maximum(index, 0), side="right")
        start, stop = np.array([0, *ends])[which], np.array(ends)[which]
        empty = (index < 0) | ((documents == "padded") & (which == 1))
        start, stop = np.where(empty, np.maximum(index, 0), start), np.where(empty, np.maximum(index, 0), stop)
        span = (index >= start + 2) & (index < start + 5 + row) & ~empty
        span_start = np.where(span, start + 2, index)
        span_stop = np.where(span, np.minimum(start + 5 + row, stop), index + 1)
        rows.append((np.maximum(index, 0), start, stop, span_start, span_stop))
    columns = (np.stack(column).astype(np.int32) for column in zip(*rows, strict=True))
    return TokenPositions(*map(jnp.asarray, columns))


@functools.cache
def bounds(mask: str, documents: str, lengths: tuple[int, int]):
    return key_intervals(MASKS[mask], tokens(documents, *lengths))


def all_bounds(lengths: tuple[int, int]) -> dict:
    return {(mask, documents): bounds(mask, documents, lengths) for mask in MASKS for documents in DOCUMENTS}


def arrays(case: Case, dtype=jnp.float64, batch: int = 2) -> dict:
    """q, k, v, the cotangents of both results, and sinks and bias where the case has them."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(dtype))
    (N, K), (Hk, Hv), (T, S) = case.heads, case.widths, case.lengths
    made = {"q": normal(batch, T, N, Hk), "k": normal(batch, S, K, Hk), "v": normal(batch, S, K, Hv)}
    sinks = normal(N) if case.sinks else None
    bias = None
    if case.bias is not None:
        bias = normal(batch if case.bias[0] else 1, N if case.bias[1] else 1, T, S)
    return {**made, "sinks": sinks, "bias": bias, "d_out": normal(batch, T, N, Hv), "d_lse": normal(batch, T, N)}
