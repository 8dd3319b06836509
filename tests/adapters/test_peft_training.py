"""LoRA on models shaped as SmolLM2-135M: the losses of 20 AdamW steps are PEFT's (`peft_training.py`)."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import maxlib
from maxlib import adapters, training
from tests.adapters import peft_training as theirs


@pytest.mark.parametrize("name", ["small", pytest.param("smollm2_135m", marks=pytest.mark.full)])
def test_losses_of_twenty_steps_are_those_of_peft(name, tmp_path):
    model = maxlib.from_pretrained(theirs.base(tmp_path / "base", name), dtype=jnp.float32)
    adapted = adapters.load(model, theirs.adapter(tmp_path / "adapter", name))
    optimizer = optax.adamw(theirs.RATE, weight_decay=theirs.DECAY)
    state = training.make_state(adapted, optimizer, filter=adapters.trainable)
    loss = functools.partial(training.NextToken(), dtype=jnp.float32)
    step, losses = jax.jit(training.make_train_step(loss, optimizer)), []
    for ids in theirs.batches():
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "segment_ids": np.ones_like(ids[:, 1:])}
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    want = json.loads(theirs.PATH.read_text())[name]
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-3)
    assert np.mean(want[:3]) - np.mean(want[-3:]) > 0.1  # something was learned
