"""Masks by logical rank, schedules by their corners."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import nn, training
from tests.training import tiny


def test_matrices_decay_and_nothing_else():
    model = jax.eval_shape(lambda: tiny.llama(attention_bias=True, mlp_bias=True))
    mask = training.decay_mask(model)(nn.partition(model)[0])
    decayed = {nn.logical_path(path) for path, decays in mask.items() if decays}
    kept = {nn.logical_path(path) for path, decays in mask.items() if not decays}
    names = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    assert decayed == {"embed.w", "head.w"} | {f"layers.{name}.w" for name in names}
    scales = {"norm.scale", "layers.attn_norm.scale", "layers.mlp_norm.scale"}
    assert kept == scales | {f"layers.{name}.b" for name in names}


def test_decay_follows_the_mask_and_clipping_comes_first():
    model = tiny.model()
    params, _ = nn.partition(model)
    optimizer = training.adamw(0.1, mask=training.decay_mask(model), weight_decay=0.5, clip=None)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = jax.jit(lambda p: optimizer.update(zeros, optimizer.init(p), p)[0])(params)
    for path, update in updates.items():
        decays = path.endswith(".w")
        np.testing.assert_allclose(update, -0.05 * params[path] if decays else zeros[path], rtol=1e-6)

    clipped = training.adamw(0.1, mask=None, weight_decay=0.0, clip=1.0)
    state = clipped.update({"w": jnp.full(4, 50.0)}, clipped.init({"w": jnp.zeros(4)}), {"w": jnp.zeros(4)})[1]
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mu")["w"], 0.1 * 0.5 * np.ones(4), rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 0.1, 50.0, np.inf, np.nan])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_clipping_is_that_of_optax(size, dtype):
    grads = {"a": jnp.full(3, size, dtype), "b": jnp.full((2, 2), -size, dtype)}
    clip, want = training.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)
    got, _ = clip.update(grads, clip.init(grads))
    want, _ = want.update(grads, want.init(grads))
    for name in grads:
        assert got[name].dtype == dtype
        np.testing.assert_allclose(got[name].astype(float), want[name].astype(float), rtol=1e-2)


@pytest.mark.parametrize(
    ("make", "middle", "end"),
    [
        (training.warmup_cosine, 0.55, 0.1),
        (training.warmup_linear, 0.5, 0.0),
        (lambda *args, **kwargs: training.warmup_stable_decay(*args, decay=20, **kwargs), 1.0, 0.0),
    ],
    ids=["cosine", "linear", "stable"],
)
@pytest.mark.parametrize("warmup", [10, 0])
def test_schedules(make, middle, end, warmup):
    schedule = make(2.0, 110, warmup=warmup)
    assert [float(schedule(i)) for i in range(warmup)] == pytest.approx([2 * (i + 1) / 11 for i in range(warmup)])
    assert float(schedule(warmup)) == pytest.approx(2.0)
    assert float(schedule((110 + warmup) // 2)) == pytest.approx(2 * middle)
    assert float(schedule(110)) == float(schedule(200)) == pytest.approx(2 * end)


def test_the_plateau_ends_where_the_decay_begins():
    schedule = training.warmup_stable_decay(1.0, 100, warmup=10, decay=20)
    assert float(schedule(80)) == 1.0 and float(schedule(81)) == pytest.approx(0.95)


def test_a_schedule_that_does_not_fit_its_steps():
    with pytest.raises(ValueError, match="steps=10, warmup=8, decay=5"):
        training.warmup_stable_decay(1.0, 10, warmup=8, decay=5)
