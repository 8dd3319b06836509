"""Sessions of a model with environments over several turns."""

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jaxtyping import Array, Key

from maxlib.inference import Completion, Engine, Sampler
from maxlib.post_training._pools import EnvironmentPool, Prompt
from maxlib.post_training._trajectories import Trajectory, join_turns

End = Literal["finished", "length", "turns", "timeout", "crash"]


@dataclasses.dataclass(frozen=True)
class Episode:
    """A session of a model with an environment.

    Attributes:
        trajectories: What the model saw and sampled: one, unless the environment changed the text of earlier turns.
        reward: The environment's reward, NaN if there is none, as after a time-out or a crash.
        end: "finished" by the environment, "length" or "turns" if a limit cut it, "timeout" or "crash" of the
            environment.
        turns: Number of completions.
        error: The exception of a crash, in words.
    """

    trajectories: list[Trajectory]
    reward: float
    end: End
    turns: int
    error: str = ""


def run_episodes(
    engine: Engine,
    environments: EnvironmentPool,
    tasks: Sequence[Any],
    *,
    length: int,
    max_new_tokens: int,
    max_turns: int = 8,
    sampler: Sampler = Sampler(),
    stop_token_ids: Collection[int] = (),
    key: Key[Array, ""] | None = None,
) -> list[Episode]:
    """Runs an episode of each task; the engine samples a turn of all of them at once.

    An episode ends when its environment says so, after `max_turns`, or by its length: when its next prompt leaves no
    room in `length`, or a turn was cut before one of `stop_token_ids`. The environment does not see a turn that was
    cut. It is asked for a reward after all of these, never after a time-out or a crash.

    Args:
        engine: The engine.
        environments: Runs the environments.
        tasks: Tasks of the environments; repeat each for a group.
        length: Maximum number of tokens of a prompt and its completion, such as a row's of the batch.
        max_new_tokens: Maximum number of new tokens in a turn.
        max_turns: Maximum number of turns.
        sampler: Draws tokens.
        stop_token_ids: Ids that end a turn.
        key: Random key; None for the engine's own.
    """
    answers = environments.reset(tasks)
    turns: dict[int, list[tuple[Prompt, Completion]]] = {number: [] for number in answers}
    ends: dict[int, tuple[End, str]] = {}
    for turn in range(max_turns + 1):
        prompts: dict[int, Prompt] = {}
        for number, answer in answers.items():
            if answer.failure is not None:
                ends[number] = answer.failure, answer.error
            elif answer.value is None:
                ends[number] = "finished", ""
            elif turn == max_turns or len(answer.value.tokens) >= length:
                ends[number] = "turns" if turn == max_turns else "length", ""
            else:
                prompts[number] = answer.value
        if not prompts:
            break
        completions = _sample(
            engine,
            list(prompts.values()),
            length=length,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            stop_token_ids=stop_token_ids,
            key=None if key is None else jax.random.fold_in(key, turn),
        )
        sampled = dict(zip(prompts, completions, strict=True))
        for number, completion in sampled.items():
            turns[number].append((prompts[number], completion))
            if stop_token_ids and completion.finish_reason == "length":
                ends[number] = "length", ""
        answers = environments.step({n: completion.tokens for n, completion in sampled.items() if n not in ends})
    rewards = environments.reward([number for number, (end, _) in ends.items() if end not in ("timeout", "crash")])
    return [_episode(turns[number], *ends[number], rewards.get(number)) for number in turns]


def _sample(engine: Engine, prompts: Sequence[Prompt], *, length: int, max_new_tokens: int, **options: Any) -> list:
    """Returns a completion of each prompt."""
    limits = [min(max_new_tokens, length - len(prompt.tokens)) for prompt in prompts]
    if any(prompt.images is not None for prompt in prompts):
        options["images"] = [prompt.images for prompt in prompts]
    groups = engine.generate([list(prompt.tokens) for prompt in prompts], max_new_tokens=limits, **options)
    return [completion for (completion,) in groups]


def _episode(turns: list[tuple[Prompt, Completion]], end: End, error: str, reward: Any) -> Episode:
    """Returns an episode; a reward that timed out or crashed is the episode's end."""
    value = math.nan
    if reward is not None:
        end, error = (reward.failure, reward.error) if reward.failure else (end, error)
        value = math.nan if reward.failure else reward.value
    return Episode(join_turns(turns), value, end, len(turns), error)


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Computes the mean numbers of `turns` and of `trajectories`, and the share of each end, such as `end/timeout`."""
    ends = collections.Counter(episode.end for episode in episodes)
    return {
        "turns": float(np.mean([episode.turns for episode in episodes])),
        "trajectories": float(np.mean([len(episode.trajectories) for episode in episodes])),
        **{f"end/{end}": ends[end] / len(episodes) for end in get_args(End)},
    }
