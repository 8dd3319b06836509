"""Clips of sound: padding to buckets, rows, and the places of their vectors among tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn
from maxlib.nn.audio import AudioInput, Clips, check_clips


def frames(*lengths: int, width: int = 3) -> list[np.ndarray]:
    random = np.random.RandomState(0)
    return [random.standard_normal((n, width)).astype(np.float32) for n in lengths]


def test_clips_are_padded_to_buckets_in_order():
    """Rows of two, none and one clip; frames to 64, then to eighths of a power of two, clips to powers of two."""
    clips = frames(5, 70, 9)
    got = nn.audio.pad_clips(clips, counts=[2, 0, 1])
    assert got.frames.shape == (3, 2, 128, 3)
    np.testing.assert_array_equal(got.lengths, [[5, 70], [0, 0], [9, 0]])
    for clip, (row, place) in zip(clips, [(0, 0), (0, 1), (2, 0)], strict=True):
        np.testing.assert_array_equal(got.frames[row, place, : len(clip)], clip)
        assert not got.frames[row, place, len(clip) :].any()
    alone = nn.audio.pad_clips(clips)
    assert alone.frames.shape == (4, 128, 3) and alone.in_rows.frames.shape == (1, 4, 128, 3)
    assert nn.audio.pad_clips(frames(1100)).frames.shape[1] == 1280


def test_masked_frames_are_left_out():
    """As Hugging Face's processors pad: one array of all clips, and a mask."""
    padded = np.stack([np.pad(clip, ((0, 9 - len(clip)), (0, 0)), constant_values=7) for clip in frames(5, 9)])
    got = nn.audio.pad_clips(padded, np.arange(9)[None] < np.array([[5], [9]]))
    want = nn.audio.pad_clips(frames(5, 9))
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_array_equal(got.frames, want.frames)


def test_wrong_clips_are_refused():
    with pytest.raises(ValueError, match=r"of one width M, got the shapes \[\(5, 3\), \(5, 4\)\]"):
        nn.audio.pad_clips([*frames(5), *frames(5, width=4)])
    with pytest.raises(ValueError, match=r"one or more arrays .*, got the shapes \[\]"):
        nn.audio.pad_clips([])
    with pytest.raises(ValueError, match=r"each of the 2 clips to a row"):
        nn.audio.pad_clips(frames(5, 4), counts=[1, 2])
    with pytest.raises(ValueError, match=r"masks of \[4, 4\] for \[5, 4\] frames"):
        nn.audio.pad_clips(frames(5, 4), np.ones((2, 4)))


@pytest.mark.parametrize("rows", [1, 2])
def test_each_placeholder_gets_its_vector(rows):
    """Clips in a row of their own for two rows of tokens each, or for all of them; an empty one between them."""
    is_audio = np.random.RandomState(1).rand(4, 9) < 0.5
    counts = np.zeros((rows, 3), np.int32)
    for row, mask in enumerate(is_audio.reshape(rows, -1)):
        counts[row] = [mask.sum() // 3, 0, mask.sum() - mask.sum() // 3]
    vectors = np.random.RandomState(2).standard_normal((rows, 3, 20, 5)).astype(np.float32)

    @jax.jit
    def take(is_audio, vectors, counts):
        reader = AudioInput(lambda clips, **_: clips.frames, token=1, frame_dim=5, num_tokens=lambda lengths: lengths)
        x = jnp.zeros((*is_audio.shape, 5))
        clips = Clips(vectors, counts)
        return reader.embed(x, is_audio.astype(int), clips, nn.InputCall(None, None, None, None, x.dtype, None))[0]

    got = np.asarray(take(jnp.asarray(is_audio), jnp.asarray(vectors), jnp.asarray(counts)))
    want = [vectors[row, clip, n] for row in range(rows) for clip in range(3) for n in range(counts[row, clip])]
    np.testing.assert_array_equal(got[is_audio], want)
    counts[-1, 2] -= 1
    got = np.asarray(take(jnp.asarray(is_audio), jnp.asarray(vectors), jnp.asarray(counts)))
    last = np.arange(4) >= 4 - 4 // rows
    np.testing.assert_array_equal(np.isnan(got[..., 0]), is_audio & last[:, None])


def test_lengths_and_placeholders_are_compared():
    halves = lambda lengths: (lengths + 1) // 2
    audio = Clips(np.zeros((2, 2, 8, 3), np.float32), np.array([[8, 3], [0, 5]], np.int32))
    rows = np.zeros((2, 9), bool)
    rows[0, :6], rows[1, 4:7] = True, True
    check_clips(rows, audio, 3, halves)
    with pytest.raises(ValueError, match=r"hold \[5, 2\] audio placeholders .* make \[6, 3\] vectors"):
        check_clips(rows ^ np.eye(2, 9, k=3, dtype=bool), audio, 3, halves)
    with pytest.raises(ValueError, match=r"`C F 4` and `C`, .* 2 rows of tokens in front"):
        check_clips(rows, audio, 4, halves)
