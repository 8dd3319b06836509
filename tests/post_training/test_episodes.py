"""Episodes over several turns: their tokens, their ends, and the rows that they become."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import inference
from maxlib import post_training as pt
from tests.nn.tiny import filled_llama
from tests.post_training.environments import Counting

LENGTH, NEW = 48, 4
SAMPLER = inference.Sampler(temperature=0.7)


@pytest.fixture(scope="module")
def engine():
    return inference.LocalEngine(filled_llama(num_layers=2, vocab=32), slots=4, dtype=jnp.float32, capacity=64)


def run(engine, tasks, *, processes=False, timeout=60.0, **options):
    with pt.EnvironmentPool(Counting, workers=len(tasks), timeout=timeout, in_threads=not processes) as pool:
        options = {"length": LENGTH, "max_new_tokens": NEW, "max_turns": 5, "sampler": SAMPLER} | options
        return pt.run_episodes(engine, pool, tasks, key=jax.random.key(0), **options)


def test_scores_of_five_turns_are_those_of_one_forward_pass(engine):
    episodes = run(engine, ["endless", "none"])
    assert [episode.end for episode in episodes] == ["turns", "finished"]
    assert [episode.turns for episode in episodes] == [5, 3] and [episode.reward for episode in episodes] == [5, 3]
    (long,), (short,) = (episode.trajectories for episode in episodes)
    assert [part.by_model for part in long.parts] == [False, True] * 5
    assert [part.tokens for part in long.parts[2::2]] == [[21], [22], [23], [24]]
    per_turn = [1.0, 2.0, 3.0, 4.0, 5.0]
    batch = pt.trajectory_batch([long, short], [per_turn, -1.0], length=LENGTH, rows=3)
    model = engine.generator.model
    scored = jax.jit(functools.partial(pt.log_probs, temperature=0.7, dtype=jnp.float32))(model, batch)
    np.testing.assert_allclose(scored.log_prob, batch["sampler_log_probs"], atol=1e-4)
    learned = batch["targets"] >= 0
    assert learned.sum(1).tolist() == [5 * NEW, 3 * NEW, 0] and (batch["sampler_log_probs"][learned] < 0).all()
    np.testing.assert_array_equal(batch["advantages"][0][learned[0]], np.repeat(per_turn, NEW))
    np.testing.assert_array_equal(batch["advantages"][1:], np.where(learned[1:], -1.0, 0.0) * [[1.0], [0.0]])
    np.testing.assert_array_equal(batch["targets"][0][learned[0]], np.concatenate([p.tokens for p in long.parts[1::2]]))
    assert batch["sampler"] == SAMPLER


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_end_is_stated_and_none_is_a_reward_of_zero(engine, processes):
    tasks = ["fine", "hang", "raise", "unscored", "endless", "forget"] + ["die"] * processes
    episodes = dict(
        zip(
            tasks,
            run(engine, tasks, processes=processes, timeout=4.0 if processes else 1.5, length=21, max_turns=6),
            strict=True,
        )
    )
    ends = {task: episode.end for task, episode in episodes.items()}
    want = {"fine": "finished", "hang": "timeout", "raise": "crash", "unscored": "finished", "endless": "length"}
    assert ends == want | {"forget": "finished"} | ({"die": "crash"} if processes else {})
    scored = {task for task, episode in episodes.items() if not math.isnan(episode.reward)}
    assert scored == {"fine", "endless", "forget"} and all(episodes[task].reward for task in scored)
    assert episodes["raise"].error == "RuntimeError: broken" and episodes["hang"].error.startswith("no answer within")
    assert [len(episode.trajectories) for episode in episodes.values()][:6] == [1, 1, 1, 1, 1, 2]
    metrics = pt.episode_metrics(list(episodes.values()))
    assert metrics["end/timeout"] == 1 / len(tasks) and metrics["end/turns"] == 0
    assert sum(value for name, value in metrics.items() if name.startswith("end/")) == pytest.approx(1)


def test_episodes_are_in_the_order_of_their_tasks(engine):
    """Not in that of the environments' answers."""
    episodes = run(engine, ["late", "endless", "fine", "unscored"])
    assert [episode.end for episode in episodes] == ["finished", "turns", "finished", "finished"]
    assert [episode.reward for episode in episodes[:3]] == [3, 5, 3] and math.isnan(episodes[3].reward)


def test_a_cut_turn_ends_an_episode_and_its_environment_does_not_see_it(engine):
    (episode,) = run(engine, ["fine"], stop_token_ids=[31])
    assert episode.end == "length" and episode.turns == 1 and episode.reward == 0


def test_turns_are_joined_by_their_exact_tokens():
    def turn(prompt, *tokens):
        return pt.Prompt(prompt), inference.Completion([*tokens], [-1.0] * len(tokens), "stop", SAMPLER)

    first, second, third = turn([1, 2], 3, 4), turn([1, 2, 3, 4, 5], 6), turn([1, 2, 3, 4, 5, 7], 8)
    joined = pt.join_turns([first, second, third])
    assert [t.tokens for t in joined] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8]]
    assert [[part.by_model for part in t.parts] for t in joined] == [[False, True, False, True], [False, True]]
    (straight,) = pt.join_turns([first, turn([1, 2, 3, 4], 5)])  # no token between two turns
    batch = pt.trajectory_batch([straight], [[1.0, 2.0]], length=6)
    np.testing.assert_array_equal(batch["targets"], [[-1, 3, 4, 5, -1, -1]])
    np.testing.assert_array_equal(batch["advantages"], [[0, 1, 1, 2, 0, 0]])
    with pytest.raises(ValueError, match=r"one for each of its 2 sampled parts, got the shape \(3,\)"):
        pt.trajectory_batch([straight], [[1.0, 2.0, 3.0]], length=6)
    with pytest.raises(ValueError, match="a batch of 1 rows must not have more trajectories, got 2"):
        pt.trajectory_batch(joined, [1.0, 1.0], length=9, rows=1)
    with pytest.raises(ValueError, match="one engine and one sampler"):
        pt.trajectory_batch([straight, pt.Trajectory([pt.Part([1]), pt.Part([2], True)])], [1.0, 1.0], length=9)


def test_tokens_of_tools_have_no_gradient_of_their_own():
    """With the same hidden states, other tokens of a tool change neither loss nor gradient."""
    text = lambda tool: pt.Trajectory([pt.Part([1]), pt.Part([2, 3], True), pt.Part(tool), pt.Part([4], True)])
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 16)), jnp.float32)

    class Head:
        softcap, head_weight = None, lambda self: jnp.eye(16)

    @jax.jit
    def slope(hidden, batch):
        return jax.grad(lambda h: pt.GRPO().from_hidden(Head(), h, batch)[0])(hidden)

    def gradient(tool):
        batch = jax.tree.map(jnp.asarray, pt.trajectory_batch([text(tool)], [[1.0, -2.0]], length=8))
        return slope(hidden, batch)

    first, second = gradient([7, 8]), gradient([9, 10])
    np.testing.assert_array_equal(first, second)
    learned = np.abs(np.asarray(first)).sum(-1)[0] > 0
    assert learned.tolist() == [True, True, False, False, True, False, False, False]


def test_workers_out_of_range():
    for wrong in ({"workers": 0}, {"timeout": 0.0}):
        with pytest.raises(ValueError, match="must be positive"):
            pt.EnvironmentPool(Counting, in_threads=True, **wrong)
    assert isinstance(Counting("fine"), pt.Environment)
