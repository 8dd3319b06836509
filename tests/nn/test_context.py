"""Positions that do not count tokens: three rows of them, and their state in a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn, ops


def cache(**more):
    return nn.cache.Cache([], jnp.zeros(2, jnp.int32), 16, **more)


def test_positions_go_on_behind_an_image():
    """Row 0: two words, an image of 2 x 2 at position 2, a word at 4. Row 1: three words and padding."""
    image = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3], [4, 4, 4]]
    words = [[i, i, i] for i in range(3)] + [[0, 0, 0]] * 4
    valid = jnp.asarray([[True] * 7, [True] * 3 + [False] * 4])
    prefill = cache(position_offset=jnp.zeros(2, jnp.int32))
    ctx = nn.make_context(2, 7, positions=jnp.asarray([image, words]), valid=valid, cache=prefill)
    after = prefill.advanced([], ctx)
    np.testing.assert_array_equal(after.length, [7, 3])
    np.testing.assert_array_equal(after.position_offset, [-2, 0])  # the next is 5, though seven tokens came before
    step = nn.make_context(2, 1, cache=after)
    np.testing.assert_array_equal(step.positions[:, 0], [5, 3])
    np.testing.assert_array_equal(step.index[:, 0], [7, 3])  # masks go by the order of tokens
    np.testing.assert_array_equal(after.advanced([], step).position_offset, [-2, 0])


def test_rows_without_new_tokens_keep_their_offset():
    before = cache(position_offset=jnp.asarray([3, -1]))
    valid = jnp.asarray([[True, False], [False, False]])
    ctx = nn.make_context(2, 2, positions=jnp.asarray([[9, 0], [0, 0]]), valid=valid, cache=before)
    np.testing.assert_array_equal(before.advanced([], ctx).position_offset, [9, -1])


def test_without_an_offset_positions_count_tokens():
    ctx = nn.make_context(2, 3, cache=cache())
    assert ctx.next_position_offset is None and cache().advanced([], ctx).position_offset is None


def test_shapes_are_checked():
    nn.make_context(2, 3, positions=jnp.zeros((2, 3, 3), jnp.int32))
    for wrong in ((2, 4), (2, 4, 3), (3, 2, 3)):
        with pytest.raises(ValueError, match=r"positions must have the shape of the tokens, \(2, 3\)"):
            nn.make_context(2, 3, positions=jnp.zeros(wrong, jnp.int32))
    with pytest.raises(ValueError, match=r"tokens must have the shape"):
        nn.make_context(2, 3, tokens=jnp.zeros((2, 2), jnp.int32))


def test_first_tokens_of_documents():
    valid = jnp.asarray([[True, True, False], [True, False, False]])
    later = nn.cache.Cache([], jnp.asarray([4, 0]), 16)

    @jax.jit
    def starts():
        contexts = [
            nn.make_context(1, 6, segment_ids=jnp.asarray([[1, 1, 2, 2, 0, 0]])),
            nn.make_context(1, 4, valid=jnp.asarray([[False, True, True, True]])),
            nn.make_context(2, 3, valid=valid, cache=cache()),
            nn.make_context(2, 1, cache=later),
        ]
        return [ctx.is_start for ctx in contexts]

    packed, left, first, then = starts()
    np.testing.assert_array_equal(packed, [[1, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(left, [[0, 1, 0, 0]])
    np.testing.assert_array_equal(first, [[1, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(then, [[0], [1]])


@pytest.mark.parametrize("window", [None, 3])
def test_rows_without_images_are_known_as_those_of_a_text_model(window):
    """A union with blocks hides a causal mask from kernels that go by names, but not where no token is in a block."""
    causal = ops.Causal() if window is None else ops.Causal() & ops.SlidingWindow(window)
    mask = ops.Causal() | ops.BidirectionalBlocks()
    mask = mask if window is None else mask & ops.SlidingWindow(window)
    text = nn.make_context(2, 7)
    assert text.mask_hint(mask).static == text.mask_hint(causal).static
    for ours, theirs in zip(text.key_intervals(mask), text.key_intervals(causal), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    blocks = jnp.asarray([[0, 1, 1, 3, 4, 5, 6]] * 2), jnp.asarray([[1, 3, 3, 4, 5, 6, 7]] * 2)
    seen = nn.make_context(2, 7, bidirectional_blocks=blocks).mask_hint(mask)
    assert seen is None or seen.static.kind == "any"


SCALINGS = {
    "dynamic": ops.DynamicNTKScaling(4.0, 4),
    "longrope": ops.LongRopeScaling((1.0, 1.25, 1.5, 2.0), (2.0, 5.0, 20.0, 30.0), 4, 4.0),
}
ROPES = {name: ops.Rope(8, 100.0, scaling) for name, scaling in SCALINGS.items()}
ROPES["rows of positions"] = ops.MRope(ROPES["dynamic"], (2, 1, 1))
SHORT, LONG = 3, 9  # tokens of two documents; scalings begin at 5


@pytest.mark.parametrize("name", ROPES)
def test_a_document_is_rotated_by_its_own_length(name):
    """Alone, padded on both sides, packed, with positions of its own, and with a cache."""
    rope, rows = ROPES[name], "rows" in name

    @jax.jit
    def tables():
        def rotary(length, documents=1, **inputs):
            return jnp.stack(nn.make_context(documents, length, **inputs).rotary(rope))

        def chosen(places):
            """Positions; those of M-RoPE jump by two in their last row."""
            places = jnp.asarray(places, jnp.int32)[None]
            return jnp.stack([places, places, 2 * places], axis=-1) if rows else places

        places = [*range(SHORT), *range(LONG), *[0] * 4]
        packed = jnp.asarray([[1] * SHORT + [2] * LONG + [0] * 4])
        valid = jnp.asarray([[True] * SHORT + [False] * 9, [False] * 3 + [True] * LONG])
        empty = nn.cache.Cache([], jnp.zeros(2, jnp.int32))
        right = jnp.asarray([[True] * SHORT + [False] * 9, [True] * LONG + [False] * 3])
        return {
            "alone": (rotary(SHORT), rotary(LONG)),
            "padded": rotary(12, 2, valid=valid),
            "packed": rotary(16, segment_ids=packed),
            "cached": rotary(12, 2, valid=right, cache=empty),
            "own alone": (rotary(SHORT, positions=chosen(range(SHORT))), rotary(LONG, positions=chosen(range(LONG)))),
            "own packed": rotary(16, segment_ids=packed, positions=chosen(places)),
        }

    got = jax.device_get(tables())
    short, long = (x[:, 0] for x in got["alone"])
    assert np.abs(short - long[:, :SHORT]).max() > 0.1  # the length does decide
    packed = slice(SHORT), slice(SHORT, SHORT + LONG)
    for kind, first, second in (
        ("padded", got["padded"][:, 0, :SHORT], got["padded"][:, 1, 3:]),
        ("packed", *(got["packed"][:, 0, places] for places in packed)),
        ("cached", got["cached"][:, 0, :SHORT], got["cached"][:, 1, :LONG]),
    ):
        np.testing.assert_allclose(first, short, atol=1e-6, err_msg=kind)
        np.testing.assert_allclose(second, long, atol=1e-6, err_msg=kind)
    for want, places in zip(got["own alone"], packed, strict=True):
        np.testing.assert_allclose(got["own packed"][:, 0, places], want[:, 0], atol=1e-6)


def test_the_rotary_length_is_static_only_where_rows_are_whole_documents():
    row = jnp.arange(6)[None]
    assert nn.make_context(1, 6).rope_length == 6
    assert nn.make_context(1, 6, positions=row + 90).rope_length is None
    assert nn.make_context(1, 6, segment_ids=jnp.ones((1, 6), jnp.int32)).rope_length is None
    assert nn.make_context(1, 6, valid=row < 4).rope_length is None


def test_other_ropes_compute_no_lengths():
    text = lambda rope: str(
        jax.make_jaxpr(lambda x: nn.make_context(1, 6, segment_ids=x).rotary(rope))(jnp.ones((1, 6), jnp.int32))
    )
    assert "scatter" not in text(ops.Rope(8)) and "scatter" in text(ROPES["dynamic"])
