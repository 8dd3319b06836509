"""Placement and schedule of periods against the rules of any pipeline; nothing here runs on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.sharding._pipeline_chunks import Schedule, chunks

SIZES = [(periods, stages) for stages in (2, 3, 4) for periods in range(stages, 14)]


@pytest.mark.parametrize(("periods", "stages"), SIZES)
def test_every_period_lies_in_one_place(periods, stages):
    most = -(-periods // stages)
    for repeats in (n for n in range(1, most + 1) if most % n == 0):
        cut = chunks(periods, stages, repeats)
        assert cut.index.shape == cut.active.shape == (stages, repeats, most // repeats)
        by_chunk = [cut.index[s, v][cut.active[s, v]] for v in range(repeats) for s in range(stages)]
        assert np.concatenate(by_chunk).tolist() == list(range(periods))  # consecutive, from chunk to chunk
        assert cut.index.reshape(-1)[cut.slots].tolist() == list(range(periods))
        held = cut.active.sum(axis=(1, 2))
        assert held.max() == most and held.min() >= most - 1


def test_61_layers_on_4_stages():
    assert chunks(61, 4, 1).active.sum(axis=(1, 2)).tolist() == [16, 15, 15, 15]
    assert chunks(61, 4, 4).active.sum(axis=2).tolist() == [[4, 4, 4, 4], [4, 4, 4, 3], [4, 4, 4, 3], [4, 4, 4, 3]]
    assert chunks(64, 4, 1).in_order and not chunks(64, 4, 2).in_order and not chunks(61, 4, 1).in_order


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="3 repeats of layers cannot be split into 4 stages"):
        chunks(3, 4, 1)
    with pytest.raises(ValueError, match=r"up to 16 of 61 .* repeats=3 .* use one of \[1, 2, 4, 8, 16\]"):
        chunks(61, 4, 3)


SCHEDULES = [(2, 1, 1), (2, 3, 2), (3, 2, 3), (4, 3, 1), (4, 1, 2)]


@pytest.mark.parametrize(("stages", "groups", "repeats"), SCHEDULES)
def test_a_microbatch_meets_all_chunks_in_order_without_waiting(stages, groups, repeats):
    schedule = Schedule(stages, groups * stages, repeats)
    forward = met(schedule, schedule.forward)
    assert len(forward) == schedule.microbatches * repeats * stages
    for (microbatch, chunk), (t, entered) in forward.items():
        assert entered == t and (chunk == 0 or forward[microbatch, chunk - 1][0] == t - 1)
    # Every stage works in all ticks but `stages - 1`.
    assert max(t for t, _ in forward.values()) + 1 == schedule.ticks == len(forward) // stages + stages - 1


@pytest.mark.parametrize(("stages", "groups", "repeats"), SCHEDULES)
def test_backward_passes_follow_and_find_what_was_kept(stages, groups, repeats):
    schedule = Schedule(stages, groups * stages, repeats)
    forward, backward = met(schedule, schedule.forward), met(schedule, schedule.backward)
    assert backward.keys() == forward.keys()
    for (microbatch, chunk), (t, entered) in backward.items():
        last = chunk == stages * repeats - 1
        after = forward[microbatch, chunk][0] if last else backward[microbatch, chunk + 1][0] + 1
        assert t == after and entered == forward[microbatch, chunk][0] <= t < entered + schedule.kept
    ticks = [t for t, _ in backward.values()]
    assert (min(ticks), max(ticks) + 1) == (schedule.lead, schedule.ticks + schedule.lead)


def test_as_many_microbatches_as_you_like_once_around():
    schedule = Schedule(stages=4, microbatches=3, repeats=1)
    assert len(met(schedule, schedule.forward)) == 12 and schedule.ticks == 6


def met(schedule, turn):
    """Of each pair of microbatch and chunk, in which tick it is computed and in which its input came; each once."""
    ticks, stages = jnp.arange(schedule.ticks + 2 * schedule.lead)[:, None], np.arange(schedule.stages)[None]
    now = jax.device_get(turn(ticks, stages))
    chunk = now.repeat * schedule.stages + stages
    pairs = [(int(now.microbatch[at]), int(chunk[at])) for at in zip(*np.nonzero(now.active), strict=True)]
    assert len(set(pairs)) == len(pairs)
    return dict(zip(pairs, zip(np.nonzero(now.active)[0], now.entered[now.active], strict=True), strict=True))
