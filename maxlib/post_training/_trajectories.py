"""Trajectories, texts of which a model sampled some parts, as rows of a batch for a `PolicyLoss`."""

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlib import data, nn
from maxlib.inference import Completion, Sampler
from maxlib.post_training._pools import Prompt

Row = dict[str, Any]


class Part(NamedTuple):
    """Consecutive tokens of a trajectory.

    Attributes:
        tokens: Token ids.
        by_model: True if the model sampled them; only these are learned.
        log_probs: Log-probability of each under the sampler; None if it is unknown.
    """

    tokens: Sequence[int]
    by_model: bool = False
    log_probs: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A text in the order in which a model saw and wrote it: prompts, and what it sampled after each.

    Attributes:
        parts: Parts of the text; the first is a prompt.
        images: For vision models, the `nn.vision.Patches` of its placeholders, or None.
        sampler: The sampler of the model's parts, if it is known.
        routes: Experts of its first tokens as an engine recorded them, `_ L X`; they become `routed_experts`.
        version: Version of the oldest weights that drew a token, if it is known.
    """

    parts: Sequence[Part]
    images: Any = None
    sampler: Sampler | None = None
    routes: np.ndarray | None = None
    version: int | None = None

    @property
    def tokens(self) -> list[int]:
        """Returns the whole text."""
        return [token for part in self.parts for token in part.tokens]


def join_turns(turns: Iterable[tuple[Prompt, Completion]]) -> list[Trajectory]:
    """Joins the turns of a session to as few trajectories as their exact tokens allow.

    A prompt that begins with all tokens of the turn before it, sampled ones included, extends its trajectory. Any other
    prompt, such as one from which a template removed an earlier turn's reasoning, begins a new one: its model saw
    another text. Nothing is tokenized again.

    Args:
        turns: The whole prompt of each turn, with all images so far, and its completion.
    """
    joined: list[Trajectory] = []
    for prompt, completion in turns:
        tokens, before = list(prompt.tokens), joined[-1].tokens if joined else []
        parts, routes, version = [Part(tokens)], completion.routes, completion.version
        if joined and tokens[: len(before)] == before:
            added, former = tokens[len(before) :], joined.pop()
            parts = [*former.parts, *([Part(added)] if added else [])]
            if routes is not None and former.routes is not None:  # those that earlier turns were drawn with
                routes = np.concatenate([former.routes, routes[len(former.routes) :]])
            version = min((v for v in (former.version, version) if v is not None), default=None)
        sampled = Part(completion.tokens, True, completion.log_probs)
        joined.append(Trajectory([*parts, sampled], prompt.images, completion.sampler, routes, version))
    return joined


def trajectory_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Any] | np.ndarray,
    *,
    length: int,
    rows: int | None = None,
    blank: nn.vision.Patches | None = None,
) -> Row:
    """Makes a batch for a `PolicyLoss`: one trajectory in each row, with targets on the tokens that a model sampled.

    Args:
        trajectories: The trajectories.
        advantages: For each trajectory a number, or a number for each of its sampled parts.
        length: Number of tokens in a row.
        rows: Number of rows, of which those without a trajectory teach nothing, so that batches of any number of
            trajectories have one shape; by default a row for each trajectory.
        blank: For images, an empty row with the capacity for images that every row has (`ImageProcessor.blank`).

    Raises:
        ValueError: when a trajectory is longer than `length` or has more images than `blank`, numbers disagree,
            samplers differ, ids are no integers from 0 to 2147483647, or an advantage is not finite.
    """
    if len(trajectories) != len(advantages):
        counts = f"{len(trajectories)} trajectories and {len(advantages)} advantages"
        raise ValueError(f"there must be an advantage for each trajectory, or one for each of its turns, got {counts}")
    if rows is not None and not len(trajectories) <= rows:
        raise ValueError(f"a batch of {rows} rows must not have more trajectories, got {len(trajectories)}")
    sampler, scored = _common_sampler(trajectories)
    made = [
        _row(i, trajectory, advantage, scored=scored, length=length, blank=blank)
        for i, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True))
    ]
    if missing := (rows or 0) - len(made):
        nothing = Trajectory([Part([])])
        made += [_row(len(made), nothing, 0.0, scored=scored, length=length, blank=blank)] * missing
    batch = jax.tree.map(lambda *x: np.stack(x), *made)
    return batch | _of_engine(trajectories, len(made), length) | ({} if sampler is None else {"sampler": sampler})


def completion_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int] | Completion],
    advantages: Any,
    *,
    length: int,
    sampler: Sampler | None = None,
    sampler_log_probs: Sequence[Sequence[float]] | None = None,
    stop_token_ids: Collection[int] = (),
    images: Sequence[Any] | None = None,
    blank: nn.vision.Patches | None = None,
) -> Row:
    """Makes a batch for a `PolicyLoss`: one prompt and one completion in each row.

    A completion includes the token that ended it, as returned by `Generator` and engines, so that the model learns to
    stop.

    Args:
        prompts: Token ids, a prompt for each completion.
        completions: Token ids, or what an `inference.Engine` returns, with its sampler and its log-probabilities.
        advantages: One per completion, in any shape, such as `N G`.
        length: Number of tokens in a row.
        sampler: The sampler of the token ids, stored as `sampler` in the batch for the loss to check.
        sampler_log_probs: Log-probabilities that the sampler reported for each token of the completions.
        stop_token_ids: Ids that end a completion, to check token ids of other samplers: a warning lists completions
            that are shorter than the longest one and do not end with one of them.
        images: For vision models whose images are patches: the images of the prompt of each completion, as
            `LocalEngine.generate` takes them; None for a prompt without. Each row then has its own `images`.
        blank: With `images`, an empty row with the capacity for images that every row has (`ImageProcessor.blank`).

    Raises:
        ValueError: as `trajectory_batch` does.
    """
    advantages = np.asarray(advantages, np.float32).reshape(-1)
    if not len(prompts) == len(completions) == len(advantages):
        counts = f"{len(prompts)} prompts, {len(completions)} completions, {len(advantages)} advantages"
        raise ValueError(f"there must be a prompt and an advantage for each completion, got {counts}")
    drawn = [completion for completion in completions if isinstance(completion, Completion)]
    samplers = ({completion.sampler for completion in drawn} | {sampler}) - {None}
    if len(samplers) > 1 or len(drawn) not in (0, len(completions)):
        raise ValueError(f"all completions of a batch must come from one engine and one sampler, got {samplers}")
    if drawn:
        sampler_log_probs = [completion.log_probs for completion in drawn]
    texts = [x.tokens if isinstance(x, Completion) else x for x in completions]
    sizes, scores = list(map(len, texts)), sampler_log_probs or [None] * len(texts)
    if sampler_log_probs is not None and (numbers := list(map(np.size, sampler_log_probs))) != sizes:
        raise ValueError(f"sampler_log_probs must be one for each token of each completion, {sizes}, got {numbers}")
    _check_ends(texts, stop_token_ids)
    if images is not None and (blank is None or len(images) != len(prompts)):
        raise ValueError(
            f"images must be those of the prompt of each of the {len(prompts)} completions, together with blank=, such "
            f"as ImageProcessor.blank(patches), got {len(images)} of them and blank={type(blank).__name__}"
        )
    seen, sampler = images or [None] * len(prompts), next(iter(samplers), None)
    reported = [(x.routes, x.version) if isinstance(x, Completion) else (None, None) for x in completions]
    trajectories = [
        Trajectory([Part(prompt), Part(text, True, log_probs)], patches, sampler, *of_engine)
        for prompt, text, log_probs, patches, of_engine in zip(prompts, texts, scores, seen, reported, strict=True)
    ]
    return trajectory_batch(trajectories, advantages, length=length, blank=blank)


def _common_sampler(trajectories: Sequence[Trajectory]) -> tuple[Sampler | None, bool]:
    """Returns the sampler of all, and whether the sampled tokens have log-probabilities."""
    samplers = {trajectory.sampler for trajectory in trajectories}
    sampled = [part for trajectory in trajectories for part in trajectory.parts if part.by_model]
    scored = {part.log_probs is not None for part in sampled}
    if len(samplers) > 1 or len(scored) > 1:
        raise ValueError(
            f"all samples of a batch must come from one engine and one sampler, got {samplers}, with log-probabilities "
            f"for {sum(part.log_probs is not None for part in sampled)} of {len(sampled)} sampled parts"
        )
    return next(iter(samplers), None), scored == {True}


def _of_engine(trajectories: Sequence[Trajectory], rows: int, length: int) -> Row:
    """Returns the routes and the versions of weights that engines reported for all trajectories."""
    routes, versions = [t.routes for t in trajectories], [t.version for t in trajectories]
    batch: Row = {}
    if routes and all(route is not None for route in routes):
        arrays = [route for route in routes if route is not None]
        blanks = [arrays[0][:0]] * (rows - len(arrays))
        batch["routed_experts"] = nn.router.route_rows([*arrays, *blanks], length=length)
    known = [version for version in versions if version is not None]
    if known and len(known) == len(versions):
        batch["weight_versions"] = np.array(known + [max(known)] * (rows - len(known)), np.int32)
    return batch


def _row(
    i: int, trajectory: Trajectory, advantage: Any, *, scored: bool, length: int, blank: nn.vision.Patches | None
) -> Row:
    """Returns trajectory `i` as a row, in which each number stands where its token is the target."""
    parts = trajectory.parts
    if parts[0].by_model or (not len(parts[0].tokens) and len(parts) > 1):
        raise ValueError(f"prompt {i} must have a token, which predicts the first of its completion: begin it with one")
    tokens = np.concatenate([data.token_ids(part.tokens, f"part {n} of row {i}") for n, part in enumerate(parts)])
    sizes = [len(part.tokens) for part in parts]
    by_model = np.repeat([part.by_model for part in parts], sizes)

    def of_targets(values: np.ndarray) -> np.ndarray:
        row, shifted = np.zeros(length, np.float32), values[1:]
        row[: len(shifted)] = shifted
        return row

    # [T] -> [T]: the target of position t is token t + 1
    targets = np.full(len(tokens), -1, np.int32)
    targets[:-1] = np.where(by_model, tokens, -1)[1:]
    document = {"tokens": tokens, "targets": targets} | _images(trajectory.images, blank)
    row = data.pad_document(document, length=length, images=blank)
    row["advantages"] = of_targets(np.repeat(_by_part(i, trajectory, advantage), sizes))
    if scored:
        scores = [_log_probs(i, part) for part in parts]
        row["sampler_log_probs"] = of_targets(np.concatenate(scores))
    return row


def _by_part(i: int, trajectory: Trajectory, advantage: Any) -> np.ndarray:
    """Returns the advantage of each part, 0 for those that the model did not sample."""
    sampled = np.array([part.by_model for part in trajectory.parts])
    values = np.asarray(advantage, np.float32)
    if values.ndim and values.shape != (sampled.sum(),):
        raise ValueError(
            f"trajectory {i} must have one advantage, or one for each of its {sampled.sum()} sampled parts, got the "
            f"shape {values.shape}"
        )
    if not np.isfinite(values).all():
        bad = values[~np.isfinite(values)].item(0)
        raise ValueError(f"advantages must be finite, got {bad} for completion {i}: give 0 to learn nothing")
    out = np.zeros(len(sampled), np.float32)
    out[sampled] = values
    return out


def _log_probs(i: int, part: Part) -> np.ndarray:
    """Returns the log-probability of each token of a part, 0 for those that the model did not sample."""
    scores = np.zeros(len(part.tokens)) if part.log_probs is None else np.asarray(part.log_probs, np.float32)
    if scores.shape != (len(part.tokens),):
        raise ValueError(
            f"a sampled part must have a log-probability for each of its {len(part.tokens)} tokens, got "
            f"{scores.size} in trajectory {i}"
        )
    return scores


def _images(images: Any, blank: nn.vision.Patches | None) -> Row:
    """Returns the images of a row as a part of its document."""
    if images is None:
        return {}
    if blank is None:
        raise ValueError("rows with images need blank=, such as ImageProcessor.blank(patches)")
    if not isinstance(images, nn.vision.Patches):
        raise ValueError(
            "the images of a prompt must be nn.vision.Patches, as an ImageProcessor makes them, got "
            f"{type(images).__name__}: pixels of one size have no rows, so a batch of them cannot be split"
        )
    return {"images": jax.tree.map(lambda x: np.asarray(x[0] if x.ndim == 3 else x), images)}


def _check_ends(completions: Sequence[Sequence[int]], stop_token_ids: Collection[int]) -> None:
    """Warns about completions that are shorter than the longest one but do not end with a stop id."""
    longest = max(map(len, completions), default=0)
    without = sum(len(ids) < longest and not (len(ids) and ids[-1] in stop_token_ids) for ids in completions)
    if stop_token_ids and without:
        warnings.warn(
            f"{without} of {len(completions)} completions are shorter than the longest one and do not end with one of "
            f"{sorted(stop_token_ids)}: the policy does not learn to stop. Keep the token that ended a completion",
            stacklevel=3,
        )
