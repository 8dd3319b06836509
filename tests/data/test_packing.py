"""Packing loses no token and no prediction, and keeps documents apart."""

from collections import Counter
from itertools import pairwise

import grain
import numpy as np
import pytest

from maxlib import data
from tests.data.corpus import documents

STRATEGIES = ("first_fit", "best_fit", "concat_then_split")


def rows_of(docs, length, strategy, **kwargs):
    return list(data.pack(data.in_memory(docs), length=length, strategy=strategy, **kwargs))


def predictions(rows) -> Counter:
    """How often each (token, target) is learned."""
    return Counter(
        (int(token), int(target))
        for row in rows
        for token, target in zip(row["tokens"], row["targets"], strict=True)
        if target >= 0
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [2, 16, 128])
def test_every_prediction_exactly_once(strategy, length):
    docs = documents()
    rows = rows_of(docs, length, strategy)
    wanted = Counter((int(a), int(b)) for doc in docs for a, b in pairwise(doc))
    assert predictions(rows) == wanted
    tokens = Counter(int(t) for row in rows for t in row["tokens"][row["segment_ids"] > 0])
    assert tokens == Counter(int(t) for doc in docs for t in doc)


@pytest.mark.parametrize("other", [{"length": 32}, {"bins": 2}, {"strategy": "best_fit"}])
def test_a_place_in_rows_is_none_in_others(other):
    """Some documents would come again, and others never."""

    def loader(**options):
        docs, options = data.in_memory(documents()), {"length": 16, "bins": 4} | options
        return data.Loader(lambda part: data.pack(docs[part], **options), batch_size=2, num_shards=1)

    state = (first := loader()).get_state()
    assert next(first) and state
    again = loader(**other)
    again.set_state(first.get_state())
    with pytest.raises(ValueError, match="a place in rows packed with .*'length': 16, .* Keep what the run began with"):
        next(again)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows(strategy):
    for row in rows_of(documents(), 16, strategy):
        assert {name: (array.shape, array.dtype) for name, array in row.items()} == {
            name: ((16,), np.dtype(np.int32)) for name in ("tokens", "targets", "segment_ids", "positions")
        }
        segments, used = row["segment_ids"], row["segment_ids"] > 0
        np.testing.assert_array_equal(np.unique(segments[used]), np.arange(1, segments.max() + 1))
        assert np.all(np.diff(used.astype(int)) <= 0), "padding is at the end"
        assert np.all(np.diff(segments[used]) >= 0)
        assert np.all(row["targets"][~used] == -1)
        for segment in range(1, segments.max() + 1):
            piece = segments == segment
            np.testing.assert_array_equal(row["positions"][piece], np.arange(piece.sum()))
            assert len(set(row["tokens"][piece] // 1000)) == 1, "a segment is of one document"
    ends = [
        row["targets"][np.flatnonzero(row["segment_ids"] == row["segment_ids"].max())[-1]]
        for row in rows_of(documents(longest=16), 16, "first_fit")
    ]
    assert set(ends) == {-1}, "the last token of a document has no target"


def test_first_fit_cuts_only_what_is_longer_than_a_row():
    rows = rows_of(documents(longest=16), 16, "first_fit")
    assert sum(row["segment_ids"].max() for row in rows) == 40


def test_concat_then_split_pads_the_last_row_only():
    rows = rows_of(documents(), 16, "concat_then_split")
    assert all(np.all(row["segment_ids"] > 0) for row in rows[:-1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_bins_pad_less(strategy):
    docs = documents()
    rows = rows_of(docs, 16, strategy)
    num_tokens = sum(int((row["segment_ids"] > 0).sum()) for row in rows)
    assert num_tokens == sum(map(len, docs))
    assert sum(int((row["targets"] >= 0).sum()) for row in rows) == num_tokens - len(docs)
    assert len(rows_of(docs, 16, strategy, bins=1)) >= len(rows)


def test_documents_may_bring_targets():
    docs = data.in_memory([[1, 2, 3, 4]]).map(_with_masked_targets)
    (row,) = data.pack(docs, length=6)
    np.testing.assert_array_equal(row["targets"], [-1, -1, 4, -1, -1, -1])


def _with_masked_targets(document):
    return {**document, "targets": np.array([-1, -1, 4, -1])}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_longer_than_a_row_keeps_its_beginning_or_goes(strategy):
    """Wherever it stands among the others; what is as long as a row is not longer."""
    docs = [[10, 11], list(range(20, 27)), [30, 31, 32, 33], list(range(40, 45)), [50]]
    kept = {long: rows_of(docs, 4, strategy, overlong=long) for long in ("truncate", "drop")}
    used = {
        long: Counter(int(t) for r in rows for t in r["tokens"][r["segment_ids"] > 0]) for long, rows in kept.items()
    }
    short = [10, 11, 30, 31, 32, 33, 50]
    assert used["truncate"] == Counter([*short, 20, 21, 22, 23, 40, 41, 42, 43])
    assert used["drop"] == Counter(short)
    # The last token that is kept is learned from too: its target is the first that is not.
    assert predictions(kept["truncate"])[23, 24] == predictions(kept["truncate"])[43, 44] == 1
    assert rows_of([[1, 2, 3, 4]], 4, strategy, overlong="error")
    with pytest.raises(ValueError, match=r'has 5 tokens, a row 4, and overlong="error"'):
        rows_of(docs[3:4], 4, strategy, overlong="error")


def test_best_fit_pads_less_than_first_fit_and_as_grain_does():
    lengths = np.random.default_rng(1).integers(1, 60, 400)
    docs = [1000 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)]
    padding = {}
    for strategy in ("first_fit", "best_fit"):
        rows = rows_of(docs, 64, strategy, bins=16)
        padding[strategy] = np.mean([row["segment_ids"] == 0 for row in rows])
    assert padding["best_fit"] < 0.95 * padding["first_fit"]
    grains = grain.experimental.BestFitPackIterDataset(
        data.in_memory(docs).to_iter_dataset(), length_struct={"tokens": 64}, num_packing_bins=16
    )
    for row, theirs in zip(rows_of(docs, 64, "best_fit", bins=16), grains, strict=True):
        np.testing.assert_array_equal(row["tokens"], theirs["tokens"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_stay_with_their_targets(strategy):
    """Also where a document is cut, and beside documents without weights."""
    docs = documents()
    weighted = [{"tokens": doc, "loss_weights": doc / 1000} if i % 3 else {"tokens": doc} for i, doc in enumerate(docs)]
    rows = list(data.pack(grain.MapDataset.source(weighted), length=16, strategy=strategy, loss_weights=True))
    for row, plain in zip(rows, rows_of(docs, 16, strategy), strict=True):
        np.testing.assert_array_equal(row["tokens"], plain["tokens"])
        used, weights = row["segment_ids"] > 0, row["loss_weights"]
        has_weights = (row["tokens"] // 1000 - 1) % 3 != 0
        np.testing.assert_array_equal(weights, np.float32(np.where(has_weights, row["tokens"] / 1000, 1) * used))
        assert weights.dtype == np.float32


def test_weights_of_padded_rows_and_bad_ones():
    document = {"tokens": np.array([5, 6, 7]), "targets": np.array([6, 7, -1]), "loss_weights": [0, 0.5, 2]}
    row = data.pad(grain.MapDataset.source([document]), length=5)[0]
    assert row["loss_weights"].tolist() == [0, 0.5, 2, 0, 0]
    with pytest.raises(ValueError, match="pack it with loss_weights=True"):
        next(iter(data.pack(grain.MapDataset.source([document]), length=4)))
    for weights in ([1, 2], [1, 2, -1], [1, 2, np.nan], ["1", "2", "3"]):
        bad = grain.MapDataset.source([document | {"loss_weights": weights}])
        with pytest.raises(ValueError, match="'loss_weights' must be 3 finite numbers"):
            next(iter(data.pack(bad, length=4, loss_weights=True)))


def test_bad_arguments():
    docs = data.in_memory([[1, 2]])
    with pytest.raises(ValueError, match="length must be at least 2, .* got 1"):
        data.pack(docs, length=1)
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        data.pack(docs, length=4, bins=0)
    with pytest.raises(ValueError, match="each document's 'source' must be one of them, got None"):
        next(iter(data.pack(docs, length=4, sources=["web"])))
    with pytest.raises(ValueError, match="documents need 'tokens'"):
        next(iter(data.pack(data.in_memory(["text"]), length=4)))
    with pytest.raises(ValueError, match=r"'targets' must be as long as 'tokens', got 1 and 2"):
        next(iter(data.pack(docs.map(_short_targets), length=4)))


def _short_targets(document):
    return {**document, "targets": np.array([1])}
