"""The task of the learning runs: sort 3 to 7 digits, upwards or downwards, one token a digit."""

import numpy as np

SEPARATOR, END, PAD, VOCAB = 10, 11, 12, 16
FEWEST, MOST = 3, 7  # digits
NEW, LENGTH = MOST + 1, 2 * (MOST + 1)  # most tokens of an answer with its end, and of a prompt with its answer


def lists(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Digits that are not all equal, so that the two orders differ."""
    unsorted: list[list[int]] = []
    while len(unsorted) < count:
        digits = rng.integers(0, 10, rng.integers(FEWEST, MOST + 1)).tolist()
        unsorted += [digits] if len({*digits}) > 1 else []
    return unsorted


def prompt(digits: list[int]) -> list[int]:
    return [*digits, SEPARATOR]


def answer(digits: list[int], down: bool) -> list[int]:
    return [*sorted(digits, reverse=down), END]


def rows(questions: list[list[int]], answers: list[list[int]]) -> dict[str, np.ndarray]:
    """Returns a batch of prompts and answers, with targets on the answers."""
    tokens = np.full((len(questions), LENGTH), PAD, np.int32)
    targets = np.full((len(questions), LENGTH), -1, np.int32)
    for i, (question, text) in enumerate(zip(questions, answers, strict=True)):
        ids = [*question, *text]
        tokens[i, : len(ids)] = ids
        targets[i, len(question) - 1 : len(ids) - 1] = text
    return {"tokens": tokens, "targets": targets}


def supervised(seed: int, count: int, orders: tuple[bool, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers, each in one of `orders` (True: downwards) by chance."""
    rng = np.random.default_rng(seed)
    digits = lists(rng, count)
    return [prompt(x) for x in digits], [answer(x, bool(rng.choice(orders))) for x in digits]


def pairs(seed: int, count: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Prompts with the answers upwards, which is chosen, and downwards."""
    digits = lists(np.random.default_rng(seed), count)
    return [prompt(x) for x in digits], [answer(x, False) for x in digits], [answer(x, True) for x in digits]


def reward(question: list[int], completion: list[int]) -> float:
    """1 for the digits sorted upwards and the end, else 0."""
    return float(completion == answer(question[:-1], False))
