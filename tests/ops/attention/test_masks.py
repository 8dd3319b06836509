"""Mask specs against the boolean masks they represent."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from maxlib.ops import BidirectionalBlocks, BlockCausal, Causal, Chunked, Full, Prefix, SlidingWindow, key_intervals
from tests.ops.attention import cases

LENGTHS = [(37, 37), (1, 33), (18, 35)]
# Specs that are meant to be united with another; each has a meaning of its own.
ALONE = {"prefix alone": Prefix(9), "spans alone": BidirectionalBlocks()}


def boolean(mask: str, t, i: int, j: int) -> bool:
    """Returns True if query `i` sees key `j`, by each mask's definition. `t` is one row of Tokens, as lists."""
    index, start, stop = t.index[i], t.start[i], t.stop[i]
    if not start <= j < stop:
        return False
    causal = j <= index
    windowed = causal and index - j < 7
    rules = {
        "full": True,
        "causal": causal,
        "window": windowed,
        "both sides": index - j < 5,
        "chunk": causal and (index - start) // 6 == (j - start) // 6,
        "prefix": causal or (index - start < 9 and j - start < 9),
        "blocks": (j - start) // 6 <= (index - start) // 6,
        "spans": windowed or t.span_start[i] <= j < t.span_stop[i],
        "prefix alone": j == index or (index - start < 9 and j - start < 9),
        "spans alone": t.span_start[i] <= j < t.span_stop[i],
    }
    return rules[mask]


@pytest.mark.parametrize("mask", [*cases.MASKS, *ALONE])
def test_intervals_equal_the_boolean_mask(mask):
    for documents, lengths in itertools.product(cases.DOCUMENTS, LENGTHS):
        tokens = cases.tokens(documents, *lengths)
        start, end = (np.asarray(x) for x in key_intervals((cases.MASKS | ALONE)[mask], tokens))
        for b in range(2):
            row = SimpleNamespace(**{name: np.asarray(x)[b].tolist() for name, x in vars(tokens).items()})
            want = [[boolean(mask, row, i, j) for j in range(lengths[1])] for i in range(lengths[0])]
            keys = np.arange(lengths[1])
            np.testing.assert_array_equal((start[b, :, None] <= keys) & (keys < end[b, :, None]), want)


def test_padding_sees_nothing():
    tokens = cases.tokens("padded", 37, 37)
    start, end = key_intervals(Causal() & SlidingWindow(4), tokens)
    empty = np.asarray(tokens.stop <= tokens.start)
    assert empty.any()
    np.testing.assert_array_equal(np.asarray(start == end), empty)
    np.testing.assert_array_equal(np.asarray(start)[empty], np.asarray(tokens.index)[empty])


def test_without_spans_every_token_sees_itself():
    tokens = dataclasses.replace(cases.tokens("packed", 18, 35), span_start=None, span_stop=None)
    start, end = key_intervals(BidirectionalBlocks(), tokens)
    np.testing.assert_array_equal(start, tokens.index)
    np.testing.assert_array_equal(end, tokens.index + 1)


@pytest.mark.parametrize("spec", [SlidingWindow, Chunked])
def test_a_size_of_one_is_the_token_itself(spec):
    start, end = key_intervals(Causal() & spec(1), tokens := cases.tokens("one", 18, 35))
    np.testing.assert_array_equal((start, end), (tokens.index, tokens.index + 1))


def test_blocks_of_one_token_are_causal():
    tokens = cases.tokens("packed", 37, 37)
    np.testing.assert_array_equal(key_intervals(BlockCausal(1), tokens), key_intervals(Causal(), tokens))
    assert (BlockCausal(4).block_size, (BlockCausal(4) & SlidingWindow(9)).block_size, Causal().block_size) == (4, 4, 1)


def test_rings_are_as_long_as_the_mask_sees():
    """None where every key has to stay: no limit, or two that do not nest."""
    assert (SlidingWindow(7).ring, (Causal() & Chunked(6)).ring, (Chunked(6) & Causal()).ring) == (7, 6, 6)
    assert ((Causal() & SlidingWindow(7)) | BidirectionalBlocks()).ring == 7
    for mask in (Causal(), Full(), SlidingWindow(7) & Chunked(6), SlidingWindow(7) | Prefix(9), Prefix(9)):
        assert mask.ring is None


def test_specs_are_values():
    assert Causal() & SlidingWindow(4) == Causal() & SlidingWindow(4)
    assert hash(Causal() | Prefix(3)) == hash(Causal() | Prefix(3))
    assert Full() != BidirectionalBlocks()


def test_windows_and_chunks_are_whole_numbers_of_tokens():
    for mask, number in itertools.product((SlidingWindow, Chunked, BlockCausal), (True, 0, -1)):
        with pytest.raises(ValueError, match="must be a whole number of tokens, at least 1, got"):
            mask(number)
