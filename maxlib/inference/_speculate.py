"""Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192) of a few prompts with drafts of a model: its own MTP
module (DeepSeek V3, arXiv:2412.19437), or a separate drafter that reads the model's keys (Gemma 4).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, SupportsIndex

from jaxtyping import Array, Key

from maxlib.inference._arguments import Prompts, StopIds, integer
from maxlib.inference._continuous import LocalEngine
from maxlib.inference._generate import Audio, Generator, Images
from maxlib.inference._sampling import GREEDY, Sampler


@dataclasses.dataclass(frozen=True)
class Speculated:
    """Result of `speculate`.

    Attributes:
        texts: New tokens of each prompt.
        acceptance: Share of drafts that were accepted.
        steps: Number of forward passes after the prefill.
    """

    texts: list[list[int]]
    acceptance: float
    steps: int


def speculate(
    generator: Generator,
    prompts: Prompts,
    *,
    max_new_tokens: SupportsIndex,
    drafter: Any = None,
    num_drafts: SupportsIndex = 4,
    images: Sequence[Images | None] | None = None,
    audio: Sequence[Audio | None] | None = None,
    sampler: Sampler = GREEDY,
    stop_token_ids: StopIds = (),
    key: Key[Array, ""] | None = None,
    capacity: SupportsIndex | None = None,
) -> Speculated:
    """Generates the same tokens as `generator.generate`, with the same kinds of caches, in fewer forward passes.

    Each pass also verifies drafts: one from the model's first MTP module, or `num_drafts` from a drafter. It runs all
    prompts at once on a `LocalEngine`; make one with `drafter=` for many prompts.

    Args:
        generator: A generator whose model drafts (DeepSeek: load it with `num_mtp=1`), or the drafter's target.
        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of new tokens per prompt.
        drafter: A model that drafts for this one (`nn.mtp.Drafter`), such as a
            `models.gemma4_assistant.Gemma4Assistant`; None uses the model's own module.
        num_drafts: Number of the drafter's drafts in each pass.
        images: With a drafter, the images of each prompt, as for `LocalEngine.stream`.
        audio: With a drafter, the clips of each prompt in the same way.
        sampler: Draws tokens; greedy by default.
        stop_token_ids: Ids that end a prompt's completion and are its last token.
        key: Random key for sampling.
        capacity: Maximum number of tokens in a row of the cache, by default as many as needed.

    Returns:
        The texts, and statistics of the drafts.

    Raises:
        ValueError: when the model does not draft, the drafter is for another model, a cache cannot be rewound to
            remove a rejected draft, images or audio do not fit the prompts, or another argument is out of range.
    """
    engine = LocalEngine(
        generator.model,
        slots=max(1, len(prompts)),
        capacity=capacity,
        num_drafts=1 if drafter is None else integer("num_drafts", num_drafts),
        drafter="mtp" if drafter is None else drafter,
        dtype=generator.dtype,
        cache_dtype=generator.cache_dtype,
    )
    groups = engine.generate(
        prompts,
        max_new_tokens=max_new_tokens,
        images=images,
        audio=audio,
        sampler=sampler,
        stop_token_ids=stop_token_ids,
        key=key,
    )
    acceptance = engine.num_accepted / max(engine.num_drafted, 1)
    return Speculated([completion.tokens for (completion,) in groups], acceptance, engine.num_steps)
