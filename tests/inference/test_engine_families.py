"""The engine's log-probabilities equal the trainer's, for every family that writes text and every kind of cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib import inference, post_training
from tests.models import parity

PROMPT_LENGTHS, LENGTH = (9, 1, 5), 24
TEMPERATURES = {"gemma": 20.0, "glm": 20.0}  # of the others 0.8; with that, these weights make one token certain


def reads_text_alone(case):
    """Whether a case has a decoder and no images or sound; tests/inference/test_engine_images.py has those."""
    kind = case["config"]["model_type"]
    return kind not in (*parity.MASKED, *parity.SEQ2SEQ, "whisper") and not (case.get("grids") or case.get("clips"))


CASES = [
    (path.stem, name)
    for path in sorted(parity.GOLDEN.glob("*.npz"))
    for name, case in parity.golden(path.stem).items()
    if reads_text_alone(case)
]


@pytest.mark.full  # by default test_routes.py has the draws, test_drafters.py rings beside full caches
@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_trainer_agrees_about_every_draw(family, name, tmp_path):
    case = parity.golden(family)[name]
    model = maxlib.from_pretrained(parity.directory(tmp_path, case), dtype=jnp.float32)
    engine = inference.LocalEngine(model, slots=2, capacity=LENGTH, dtype=jnp.float32)
    # Beyond that length cached keys keep the rotation of the length that their row had.
    longest = min([LENGTH, *(rope.scaling.original_length for rope in model.ropes if rope.needs_length)])
    prompts = [case["tokens"][0][: min(n, longest - 3)].tolist() for n in PROMPT_LENGTHS]
    if (getattr(model, "recompute_cache_at", None) or LENGTH + 1) <= LENGTH:
        with pytest.raises(ValueError, match="must not cross that length"):
            engine.generate(prompts, max_new_tokens=[LENGTH - len(prompt) for prompt in prompts])
    limits = [longest - len(prompt) for prompt in prompts]
    temperature = TEMPERATURES.get(family, 0.8)
    sampler = inference.Sampler(temperature=temperature)
    completions = [
        completion
        for (completion,) in engine.generate(prompts, max_new_tokens=limits, sampler=sampler, key=jax.random.key(1))
    ]
    batch = post_training.completion_batch(prompts, completions, np.ones(3), length=LENGTH)
    trainer = jax.jit(functools.partial(post_training.log_probs, temperature=temperature, dtype=jnp.float32))
    learned = batch["targets"] >= 0
    assert learned.sum() == sum(limits) and np.abs(batch["sampler_log_probs"][learned]).max() > 0.1
    np.testing.assert_allclose(
        batch["sampler_log_probs"], np.where(learned, trainer(model, batch).log_prob, 0), atol=1e-4
    )
