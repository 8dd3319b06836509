"""Losses of scores and embeddings, and PPO, against formulas in float64, torch and TRL."""

import collections
import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import nn, post_training, sharding, training
from maxlib.post_training import ppo
from tests.training import tiny

torch = pytest.importorskip("torch")
F = torch.nn.functional

B, T = 4, 7
rng = np.random.default_rng(0)
REWARDS = rng.normal(size=(B, 2)).astype(np.float32)  # of chosen and rejected answers
MARGIN = rng.uniform(size=B).astype(np.float32)
LENGTHS = np.array([[7, 5], [3, 6], [7, 7], [2, 4]])


@dataclasses.dataclass
class Scores:
    """A model whose hidden states are its scores."""

    head: object = None

    def logits(self, hidden):
        return hidden


def pairs(rewards):
    """Returns hidden states and masks of rows, with `rewards` at the last tokens and noise at the others."""
    hidden = jnp.asarray(rng.normal(size=(2 * B, T, 1)), jnp.float32)
    lengths = LENGTHS.reshape(-1)
    at = jnp.arange(2 * B), lengths - 1
    segment_ids = (np.arange(T)[None] < lengths[:, None]).astype(np.int32)
    return hidden.at[*at, 0].set(rewards.reshape(-1)), jnp.asarray(segment_ids)


def bradley_terry(loss, rewards, batch=None):
    hidden, segment_ids = pairs(rewards)
    batch = {"segment_ids": segment_ids, "interleaved": jnp.zeros(2 * B), "margin": MARGIN} | (batch or {})
    value, stats = loss.from_hidden(Scores(), hidden, batch)
    return value / stats.num_targets, stats


def test_the_loss_of_reward_models():
    loss = post_training.BradleyTerry(center=0.01)
    gradient = jax.jit(jax.value_and_grad(lambda r: bradley_terry(loss, r), has_aux=True))
    (value, stats), grad = gradient(jnp.asarray(REWARDS))
    r = torch.tensor(REWARDS, requires_grad=True)
    wanted = -F.logsigmoid(r[:, 0] - r[:, 1] - torch.tensor(MARGIN)).mean() + 0.01 * (r.sum(1) ** 2).mean()
    wanted.backward()
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-6)
    np.testing.assert_allclose(grad, r.grad, rtol=1e-5, atol=1e-7)
    assert stats.num_targets == B
    np.testing.assert_allclose(stats.sums["rewards/accuracies"], (REWARDS[:, 0] > REWARDS[:, 1]).sum())


def test_pairs_in_segments_are_pairs_of_rows():
    # Two pairs in a row: segments 1 to 4, then padding.
    ids = np.array([[1, 1, 2, 3, 3, 3, 4, 0], [1, 2, 2, 2, 3, 4, 4, 0]])
    rewards = REWARDS.reshape(2, 4)
    hidden, margin = rng.normal(size=(2, 8, 1)), np.full((2, 8), 9.0)
    for row in range(2):
        for k in range(4):
            last = np.flatnonzero(ids[row] == k + 1)[-1]
            hidden[row, last] = rewards[row, k]
            if k % 2 == 0:
                margin[row, last] = MARGIN.reshape(2, 2)[row, k // 2]
    batch = {"segment_ids": jnp.asarray(ids), "margin": jnp.asarray(margin)}
    loss = post_training.BradleyTerry(center=0.01)
    run = jax.jit(lambda hidden, rewards: (loss.from_hidden(Scores(), hidden, batch), bradley_terry(loss, rewards)))
    (value, stats), (wanted, of_rows) = run(jnp.asarray(hidden, jnp.float32), jnp.asarray(REWARDS))
    np.testing.assert_allclose(value / stats.num_targets, wanted, rtol=1e-5)
    for name, total in of_rows.sums.items():
        np.testing.assert_allclose(stats.sums[name], total, rtol=1e-5)
    with pytest.raises(ValueError, match="BradleyTerry finds no pairs in a batch of"):
        loss.from_hidden(Scores(), jnp.asarray(hidden), {})


@pytest.mark.full
def test_the_loss_is_that_of_trl():
    from trl.trainer.reward_trainer import RewardTrainer

    logits = torch.tensor(np.concatenate([REWARDS[:, 0], REWARDS[:, 1]])[:, None], requires_grad=True)

    def same(x):
        return x

    trainer = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(center_rewards_coefficient=0.01),
        accelerator=types.SimpleNamespace(gather=same, gather_for_metrics=same),
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )

    class Model:
        def __call__(self, **_):
            return types.SimpleNamespace(logits=logits)

    inputs = {"attention_mask": torch.ones(1), "margin": torch.tensor(MARGIN)}
    wanted = RewardTrainer.compute_loss(trainer, Model(), inputs)
    wanted.backward()
    loss = post_training.BradleyTerry(center=0.01)
    (value, stats), grad = jax.value_and_grad(lambda r: bradley_terry(loss, r), has_aux=True)(jnp.asarray(REWARDS))
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-6)
    np.testing.assert_allclose(grad.T.reshape(-1, 1), logits.grad, rtol=1e-5, atol=1e-7)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    np.testing.assert_allclose(stats.sums["rewards/accuracies"] / B, metrics["accuracy"], rtol=1e-6)
    np.testing.assert_allclose(stats.sums["rewards/margins"] / B, metrics["margin"], rtol=1e-5)


def test_labels_of_steps():
    logits, labels = jnp.asarray(rng.normal(size=(2, 6, 3)), jnp.float32), np.full((2, 6), -1)
    labels[0, [1, 4]], labels[1, 5] = [2, 0], 1
    loss = post_training.TokenClassification()
    run = jax.jit(lambda targets: loss.from_hidden(Scores(), logits, {"targets": targets}))
    value, stats = run(labels)
    wanted = F.cross_entropy(
        torch.tensor(np.asarray(logits)).reshape(-1, 3), torch.tensor(labels).reshape(-1), ignore_index=-1
    )
    np.testing.assert_allclose(value / stats.num_targets, wanted, rtol=1e-6)
    labels[0, 1] = 3  # the head has 3 labels
    assert np.isnan(run(labels)[0])


def test_a_reward_model_trains_in_microbatches_and_on_devices():
    model = nn.with_head(tiny.model(), nn.ScoreHead(16, 1, rngs=nnx.Rngs(0)))
    ids = rng.integers(0, tiny.VOCAB, (2, B, T)).astype(np.int32)
    chosen, rejected = (
        {"tokens": ids[k], "targets": ids[k], "segment_ids": np.array(np.arange(T)[None] < LENGTHS[:, k : k + 1], int)}
        for k in range(2)
    )
    batch = {"chosen": chosen, "rejected": rejected, "margin": MARGIN}
    optimizer = optax.sgd(1.0)

    def step(layout=None, **options):
        loss = post_training.BradleyTerry(center=0.01)
        run = training.make_train_step(loss, optimizer, dtype=jnp.float32, **options)
        with contextlib.nullcontext() if layout is None else sharding.use(layout):
            state = training.make_state(training.copy_model(model, layout), optimizer)
            state, metrics = jax.jit(run, compiler_options=tiny.QUICKLY)(state, training.shard_batch(batch, layout))
        return metrics["loss"], state.trainable["head.w"]

    loss, head = step()
    assert np.abs(head - model.head.w[...]).max() > 1e-3
    layout = sharding.Layout(sharding.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4]), sharding.FSDP_TP)
    spread = step(layout, microbatches=2)
    np.testing.assert_allclose(spread[0], loss, rtol=1e-5)
    np.testing.assert_allclose(spread[1], head, rtol=1e-4, atol=1e-6)


def test_advantages_are_sums_of_differences():
    rewards, values = rng.normal(size=(2, B, T))
    mask = rng.uniform(size=(B, T)) < 0.7
    mask[3] = False
    ids = np.array([[1] * T, [1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 3, 3, 3, 0], [1] * T])
    gamma, lam = 0.9, 0.8
    advantages, returns = ppo.gae(rewards, values, mask, gamma=gamma, lam=lam, segment_ids=ids)
    for row in range(B):
        for segment in range(1, 4):
            at = np.flatnonzero(mask[row] & (ids[row] == segment))
            following = [*values[row, at[1:]], 0.0]
            delta = rewards[row, at] + gamma * np.array(following)[: len(at)] - values[row, at]
            for i in range(len(at)):
                wanted = sum((gamma * lam) ** k * delta[i + k] for k in range(len(at) - i))
                np.testing.assert_allclose(advantages[row, at[i]], wanted, rtol=1e-12)
    np.testing.assert_allclose(returns, np.where(mask & (ids > 0), advantages + values, returns * ~(ids > 0)))
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()
    white = ppo.whiten(advantages, mask)[mask]
    np.testing.assert_allclose([white.mean(), white.std(ddof=1)], [0, 1], atol=1e-7)
    kept = ppo.whiten(advantages, mask, shift_mean=False)[mask]
    np.testing.assert_allclose(kept - white, advantages[mask].mean())


def test_rewards_of_tokens():
    mask = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    old, reference = rng.normal(size=(2, 3, 4))
    rewards = ppo.token_rewards([1.0, 2.0, 3.0], mask, old=old, reference=reference, beta=0.1)
    wanted = -0.1 * (old - reference) * mask
    wanted[0, 2] += 1
    wanted[1, 3] += 2
    np.testing.assert_allclose(rewards, wanted)
    with pytest.raises(ValueError, match="aligned with targets, got"):
        ppo.gae(rewards, np.zeros((3, 5)), mask)  # a value too many in each row
    with pytest.raises(ValueError, match="scores must be finite"):
        ppo.token_rewards([1.0, np.nan, 3.0], mask)
    assert np.isfinite(ppo.token_rewards([1.0, 2.0, np.nan], mask)).all()  # the last row has nothing to score


def test_the_losses_of_ppo():
    values, old, returns = rng.normal(size=(3, B, T)).astype(np.float32)
    mask = rng.uniform(size=(B, T)) < 0.7
    batch = {"targets": jnp.where(mask, 1, -1), "returns": returns, "old_values": old}

    def of_values(values):
        total, stats = post_training.ValueLoss(0.2).from_hidden(Scores(), values[..., None], batch)
        return total / stats.num_targets

    v, R = torch.tensor(values, requires_grad=True), torch.tensor(returns)
    clipped = torch.clamp(v, torch.tensor(old) - 0.2, torch.tensor(old) + 0.2)
    wanted = 0.5 * torch.maximum((v - R) ** 2, (clipped - R) ** 2)[torch.tensor(mask)].mean()
    wanted.backward()
    value, grad = jax.jit(jax.value_and_grad(of_values))(jnp.asarray(values))
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-6)
    np.testing.assert_allclose(grad, v.grad, rtol=1e-5, atol=1e-7)
    # Dual clip: for A < 0 the loss is at most -c A.
    log_ratio, A = rng.normal(size=(2, 1, 200)) * 2
    ratio = np.exp(log_ratio)
    single = np.maximum(-A * ratio, -A * np.clip(ratio, 0.8, 1.2))
    dual = np.where(A < 0, np.minimum(single, -A * 3.0), single)
    surrogate = post_training.Clip(0.2, 0.2, delta=3.0)
    loss = surrogate(*(jnp.asarray(x, jnp.float32) for x in (ratio, A, log_ratio))).loss
    np.testing.assert_allclose(loss, dual, rtol=1e-5)
    assert post_training.PPO().mean == "token"


DIMS = (8, 4)


def vectors(roles):
    """Returns an embedding model's head, and hidden states `roles * B, T, 8`; the last anchor has no tokens."""
    head = nn.EmbeddingHead(8, pooling="mean", rngs=nnx.Rngs(0))
    hidden = rng.normal(size=(roles * B, T, 8)).astype(np.float32)
    lengths = np.resize(LENGTHS.reshape(-1), roles * B)
    lengths[-roles:] = 0
    return Scores(head), jnp.asarray(hidden), jnp.asarray((np.arange(T)[None] < lengths[:, None]).astype(np.int32))


def info_nce(hidden, mask, roles, symmetric):
    """The formula in float64."""
    hidden, mask = torch.tensor(np.asarray(hidden), dtype=torch.float64), torch.tensor(np.asarray(mask))
    hidden.requires_grad = True
    means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    of_roles = means.reshape(B, roles, -1)[: B - 1]
    total = 0.0
    for dim in DIMS:
        x = F.normalize(of_roles[..., :dim], dim=-1)
        scores = x[:, 0] @ torch.cat([x[:, k] for k in range(1, roles)]).T / 0.05
        labels = torch.arange(B - 1)
        loss = F.cross_entropy(scores, labels)
        if symmetric:
            loss = (loss + F.cross_entropy(scores[:, : B - 1].T, labels)) / 2
        total = total + loss
    total.backward()
    return total.item(), hidden.grad.numpy()


def test_a_text_of_one_token_is_that_token_and_one_of_none_is_zero():
    hidden, segment_ids = jnp.asarray(rng.normal(size=(1, 4, 8)), jnp.float32), jnp.array([[1, 2, 2, 0]])
    for by in ("first", "last", "mean"):
        pooled = nn.pool(hidden, by, segment_ids=segment_ids, texts=3)
        middle = hidden[0, 1:3].mean(0) if by == "mean" else hidden[0, 1 if by == "first" else 2]
        np.testing.assert_allclose(pooled[0], jnp.stack([hidden[0, 0], middle, jnp.zeros(8)]), atol=1e-6)


@pytest.mark.parametrize(("roles", "symmetric"), [(2, True), (3, False)])
def test_contrast_of_embeddings(roles, symmetric):
    model, hidden, mask = vectors(roles)
    loss = post_training.InfoNCE(0.05, symmetric=symmetric, dims=DIMS)
    batch = {"segment_ids": mask, "interleaved": jnp.zeros((roles * B, roles))}

    def mean(hidden, batch):
        total, stats = loss.from_hidden(model, hidden, batch)
        return total / stats.num_targets

    wanted, wanted_grad = info_nce(hidden, mask, roles, symmetric)
    value, grad = jax.jit(jax.value_and_grad(mean))(hidden, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(grad, wanted_grad, rtol=1e-4, atol=1e-6)
    # Candidates are those of all devices.
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, devices=jax.devices()[:4]), sharding.FSDP)
    with sharding.use(layout):
        rows = jax.device_put((hidden, batch), jax.sharding.NamedSharding(layout.mesh, jax.P("fsdp")))
        sharded, sharded_grad = jax.jit(jax.value_and_grad(mean))(*rows)
    assert not sharded_grad.sharding.is_fully_replicated
    np.testing.assert_allclose(sharded, value, rtol=1e-6)
    np.testing.assert_allclose(sharded_grad, grad, rtol=1e-5, atol=1e-7)


def test_rows_of_anchors_and_positives():
    rows = {"tokens": jnp.arange(6).reshape(3, 2)}
    batch = {"anchor": rows, "positive": {"tokens": rows["tokens"] + 10}}
    _, joined = post_training.InfoNCE().prepare(None, batch, dtype=None, remat=None)
    assert joined["tokens"][:, 0].tolist() == [0, 10, 2, 12, 4, 14] and joined["interleaved"].shape == (6, 2)
    with pytest.raises(ValueError, match="InfoNCE needs batch"):
        post_training.InfoNCE().prepare(None, {"anchor": rows}, dtype=None, remat=None)
