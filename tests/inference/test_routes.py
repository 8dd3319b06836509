"""Experts and versions of weights that the engine records: those of the model's own forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, post_training
from maxlib.inference import LocalEngine, Sampler
from maxlib.models import qwen3_moe
from tests.nn.tiny import filled

LENGTH = 96
RNG = np.random.default_rng(0)
SYSTEM = RNG.integers(0, 60, 40).tolist()


@pytest.fixture(scope="module")
def model():
    cfg = qwen3_moe.Config(
        vocab=64, num_layers=2, dim=32, num_heads=4, num_kv_heads=2, head_dim=8, rope=ops.Rope(8, max_length=128),
        expert_dim=16, num_experts=4, top_k=2, mlp_dim=32, dense_layers=(0,),
    )  # fmt: skip
    return filled(lambda: qwen3_moe.Qwen3MoE(cfg, rngs=nnx.Rngs(0)))


def test_recorded_routes_are_the_models_own_and_are_replayed(model):
    """With chunks, drafts, prefixes, rows that are computed again, and the turns of a session."""
    engine = LocalEngine(
        model, slots=3, cache_tokens=256, chunk=16, num_drafts=2, record_routes=True, dtype=jnp.float32
    )
    prompts, sampler = [[*SYSTEM, *RNG.integers(0, 60, n).tolist()] for n in (3, 9, 1)], Sampler()
    key, turns = jax.random.key(1), []
    for turn in range(2):
        groups = engine.generate(
            prompts, max_new_tokens=[24, 12, 9], sampler=sampler, key=jax.random.fold_in(key, turn)
        )
        turns.append(list(zip(prompts, [completion for (completion,) in groups], strict=True)))
        prompts = [[*prompt, *completion.tokens, 5] for prompt, completion in turns[-1]]
    prompt_of = post_training.Prompt
    sessions = [
        post_training.join_turns([(prompt_of(prompt), completion) for prompt, completion in session])[0]
        for session in zip(*turns, strict=True)
    ]
    batch = post_training.trajectory_batch(sessions, np.ones(3), length=LENGTH, rows=4)
    assert batch["weight_versions"].tolist() == [0] * 4

    @jax.jit
    def forward(model, batch):
        _, routes = nn.router.record(model)(batch["tokens"], dtype=jnp.float32)
        replayed = nn.router.replay(model, batch["routed_experts"])
        batch = {name: batch[name] for name in ("tokens", "targets", "segment_ids")}
        return routes, post_training.log_probs(replayed, batch, dtype=jnp.float32).log_prob

    routes, log_probs = forward(model, {name: x for name, x in batch.items() if name != "sampler"})
    for row, session, recorded in zip(batch["routed_experts"], sessions, routes, strict=False):
        length = len(session.tokens) - 1
        np.testing.assert_array_equal(np.sort(row[:length]), np.sort(recorded[:length]))
        assert (row[length:] == -1).all()
    learned = batch["targets"] >= 0
    np.testing.assert_allclose(batch["sampler_log_probs"][learned], log_probs[learned], atol=1e-5)
