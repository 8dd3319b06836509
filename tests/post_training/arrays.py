"""Small random arrays, passed both to TRL's functions and to maxlib's."""

import jax
import jax.numpy as jnp
import numpy as np

PAIRS, T, V = 3, 7, 9
ROWS = 2 * PAIRS
PROMPTS = np.array([2, 1, 3, 2, 2, 1])  # tokens of each row's prompt
LENGTHS = np.array([8, 6, 7, 5, 8, 4])  # of prompt and completion
TEMPERATURE = 0.7


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Logits `R T V` whose last axis is a vocabulary, ids `R T+1`, and their log-probabilities under samplers and
    references.

    Rows are chosen answers first, then rejected ones, as TRL has them.
    """
    rng = np.random.default_rng(seed)
    at = np.arange(T + 1)[None, :]
    ids = rng.integers(0, V, (ROWS, T + 1)).astype(np.int32)
    completion = (at >= PROMPTS[:, None]) & (at < LENGTHS[:, None])
    normal = lambda *shape, scale=1.0: (scale * rng.normal(size=shape)).astype(np.float32)
    log_prob = lambda: np.minimum(normal(ROWS, T, scale=0.6) - 2.2, -0.05)
    out = {
        "ids": ids,
        "attention": (at < LENGTHS[:, None]).astype(np.int32),
        "completion": completion.astype(np.int32),
        "logits": normal(ROWS, T, V),
        "teacher": normal(ROWS, T, V),
        "mismatched": normal(ROWS, T, V),
        "reference_log_probs": log_prob(),
        "sampler_log_probs": log_prob(),
        "advantages": normal(ROWS),
        "desirable": np.array([1, 0, 1, 1, 0, 0], bool),
    }
    # Near the policy, so that some ratios are clipped and others are not.
    shifted = out["logits"] - np.log(np.exp(out["logits"]).sum(-1, keepdims=True))
    log_probs = np.take_along_axis(shifted, ids[:, 1:, None], -1)[..., 0]
    out["old_log_probs"] = log_probs + normal(ROWS, T, scale=0.3)
    out["tool"] = (rng.random((ROWS, T)) < 0.6).astype(np.int32)  # 1 for tokens of the model, 0 for those of a tool
    return out


def targets(data: dict[str, np.ndarray], *, tools: bool = False) -> np.ndarray:
    """Ids to predict, -1 outside of completions, and for tokens of tools if there are any."""
    learned = (data["completion"][:, 1:] == 1) & ((data["tool"] == 1) | (not tools))
    return np.where(learned, data["ids"][:, 1:], -1).astype(np.int32)


DATA = arrays()


def rows(*names: str) -> dict[str, jax.Array]:
    """A batch of all rows, with some more of the arrays."""
    batch = {"tokens": DATA["ids"][:, :-1], "targets": targets(DATA), "segment_ids": DATA["attention"][:, :-1]}
    return {name: jnp.asarray(x) for name, x in (batch | {name: DATA[name] for name in names}).items()}


def pairs(*names: str) -> dict[str, dict[str, jax.Array]]:
    """Those rows as chosen and rejected answers."""
    halves = {"chosen": slice(PAIRS), "rejected": slice(PAIRS, None)}
    return {half: {name: x[at] for name, x in rows(*names).items()} for half, at in halves.items()}
