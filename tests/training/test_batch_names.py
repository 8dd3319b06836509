"""Batch keys that no loss reads: masks and misspelt keys must raise an error."""

import functools
import warnings

import jax
import numpy as np
import optax
import pytest

from maxlib import nn, ops, sharding, training
from maxlib import post_training as pt
from maxlib.training._batch_checks import check_first_batch
from maxlib.training._step import make_gradient
from tests.nn.tiny import filled_llama
from tests.training import custom_losses, tiny

SHAPE = (8, 8)
SGD = optax.sgd(0.1)
IDS, SCORES = np.zeros(SHAPE, np.int32), np.zeros(SHAPE, np.float32)
TEXT = {"tokens": IDS, "targets": IDS}
ROLLOUTS = TEXT | {"advantages": SCORES}
KTO = TEXT | {"desirable": SCORES, "kl_baseline": SCORES[:, 0], "reference_log_probs": SCORES}


@functools.cache
def model():
    return filled_llama(num_layers=1, vocab=16)


def run(loss, batch):
    return jax.eval_shape(lambda model, batch: loss(model, batch, jax.random.key(0)), model(), batch)


MISSPELT = {
    "documents": (training.NextToken(), TEXT | {"segments": IDS}, r"reads batch\['segment_ids'\], got 'segments'"),
    "padding": (training.DFT(), TEXT | {"attention_mask": IDS}, r"reads batch\['valid'\], got 'attention_mask'"),
    "labels": (training.NextToken(), {"tokens": IDS, "labels": IDS}, r"reads batch\['targets'\], got 'labels'"),
    "loss mask": (training.NextToken(), TEXT | {"loss_mask": IDS}, "set targets to -1 where nothing is learned"),
    "near": (training.NextToken(), TEXT | {"segment_id": IDS}, r"reads batch\['segment_ids'\], got 'segment_id'"),
    "old": (pt.GRPO(), ROLLOUTS | {"old": SCORES}, r"reads batch\['old_log_probs'\], got 'old'"),
    "old, near": (
        pt.PolicyLoss(),
        ROLLOUTS | {"old_log_prob": SCORES},
        r"batch\['old_log_probs'\], got 'old_log_prob'",
    ),
    "TRL's old": (pt.DAPO(), ROLLOUTS | {"old_per_token_logps": SCORES}, r"batch\['old_log_probs'\]"),
    "sampler": (pt.DAPO(), ROLLOUTS | {"sampler_logprobs": SCORES}, r"batch\['sampler_log_probs'\]"),
    "z": (pt.KTO(), {n: x for n, x in KTO.items() if n != "kl_baseline"} | {"z": SCORES}, r"batch\['kl_baseline'\]"),
    "pairs": (pt.DPO(), {"chosen": TEXT | {"loss_mask": IDS}, "rejected": TEXT}, "targets to -1"),
    "half": (pt.DPO(), {"choosen": TEXT, "rejected": TEXT}, r"batch\['chosen'\], got 'choosen'"),
    "teacher": (pt.Distillation(), TEXT | {"teacher_id": IDS}, r"batch\['teacher_ids'\], got 'teacher_id'"),
}


@pytest.mark.parametrize("case", MISSPELT)
def test_a_name_in_place_of_another_is_refused(case):
    loss, batch, message = MISSPELT[case]
    with pytest.raises(ValueError, match=message):
        run(loss, batch)


def test_columns_of_packing_are_no_misspelt_names():
    training.NextToken().check_names(TEXT | {"sources": IDS})  # of rows that BySource evaluates too


def weighted(model, batch, key):
    """A function of a user's, which reads what the loss inside it does not."""
    value, stats = training.NextToken()(model, batch, key)
    return value * batch["weight"][0], stats


def test_a_step_warns_of_what_nobody_reads():
    def trace(loss, batch, **options):
        step = training.make_train_step(loss, optax.sgd(0.1), **options)
        jax.eval_shape(step, jax.eval_shape(lambda: training.make_state(tiny.model(), optax.sgd(0.1))), batch)

    weighed = tiny.batch(8) | {"weight": np.ones(8, np.float32)}
    for options in ({}, {"microbatches": 2, "remat": "full"}):
        with pytest.warns(UserWarning, match=r"DFT does not read batch\['weight'\]"):
            trace(training.DFT(), weighed, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not read")
        trace(weighted, weighed)
        trace(weighted, weighed, microbatches=2)
        trace(training.NextToken(), tiny.batch(8) | {"advantages": weighed["weight"]})


def test_a_pipeline_refuses_them_too():
    with pytest.raises(ValueError, match=r"reads batch\['segment_ids'\], got 'segments'"):
        pipeline = sharding.Pipeline("stage", microbatches=2, schedule="1f1b")
        layout = sharding.Layout(sharding.make_mesh(stage=2, data=4), sharding.DP | pipeline)
        with sharding.use(layout):
            params, rest = nn.partition(filled_llama(num_layers=2, vocab=16))
            batch = TEXT | {"segments": IDS}
            jax.eval_shape(make_gradient(training.NextToken()), params, rest, batch, jax.random.key(0))


TOKENS = np.random.default_rng(0).integers(0, 16, (8, 9)).astype(np.int32)
SHIFTED = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
COPIED = {"tokens": TOKENS[:, :8], "targets": np.where(np.arange(8) < 4, -1, TOKENS[:, :8])}


class Same(tiny.Loader):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def __next__(self):
        return self.batch


@pytest.fixture
def trainer(monkeypatch):
    """Makes trainers that share one step."""
    tiny.share_steps(monkeypatch)
    return lambda batch: training.Trainer(tiny.model(), SGD, Same(batch), loss=tiny.loss)


def test_a_trainer_warns_of_targets_that_are_not_shifted(trainer):
    """Labels as Hugging Face has them teach copying; constant text and shifted targets are what they should be."""
    fit = lambda batch: trainer(batch).fit(2)
    with pytest.warns(UserWarning, match="the model learns to copy") as caught:
        fit(COPIED)
    assert sum("the model learns to copy" in str(warning.message) for warning in caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="every target")
        fit(SHIFTED)
        fit(TEXT)
        check_first_batch({"chosen": SHIFTED, "rejected": SHIFTED | {"targets": np.full((8, 8), -1)}}, tiny.model())
    with pytest.warns(UserWarning, match="the model learns to copy"):
        check_first_batch({"chosen": SHIFTED, "rejected": COPIED}, tiny.model())


def test_a_trainer_refuses_targets_beyond_the_vocabulary(trainer):
    """Inside jit such a target has no logit, and would push all others down."""
    beyond = SHIFTED | {"targets": np.where(np.arange(8) == 3, tiny.VOCAB, SHIFTED["targets"])}
    with pytest.raises(ValueError, match="below the model's vocabulary of 32 tokens.* the first batch has 32"):
        trainer(beyond).fit(1)
    with pytest.raises(ValueError, match="the first batch has 32"):
        check_first_batch({"chosen": SHIFTED, "rejected": beyond}, tiny.model())
    check_first_batch({"tokens": TOKENS, "targets": np.full_like(TOKENS, -100)}, tiny.model())
    with pytest.raises(ValueError, match="targets must .* except -1 .* has -7"):
        check_first_batch({"tokens": TOKENS, "targets": np.full_like(TOKENS, -7)}, tiny.model())


@pytest.mark.parametrize("bad", [tiny.VOCAB, -1])
def test_a_trainer_refuses_tokens_beyond_the_vocabulary(bad, trainer):
    """The step makes their loss NaN, which alone would read as too high a learning rate."""
    beyond = SHIFTED | {"tokens": np.where(np.arange(8) == 3, bad, SHIFTED["tokens"])}
    with pytest.raises(ValueError, match=f"tokens must be below the model's vocabulary of 32 tokens.* batch has {bad}"):
        trainer(beyond).fit(1)


def test_documents_longer_than_the_model_are_refused():
    """Inside jit positions are unknown, so packed rows would train a rotary embedding beyond its range in silence."""
    model = filled_llama(num_layers=1, vocab=16, rope=ops.Rope(12, max_length=5))
    ids = np.repeat([[1, 2]], 8, axis=0).repeat([5, 3], axis=1)
    at = np.arange(8) - np.where(ids == 2, 5, 0)
    check_first_batch(SHIFTED | {"segment_ids": ids, "positions": at}, model)
    check_first_batch(SHIFTED | {"segment_ids": ids}, model)
    for more in ({"positions": at + 1}, {"segment_ids": np.repeat([[1, 2]], 8, axis=0).repeat([2, 6], axis=1)}):
        with pytest.raises(ValueError, match="6 positions in one document, but the model supports 5"):
            check_first_batch(SHIFTED | more, model)


def test_padding_is_no_document():
    model = filled_llama(num_layers=1, vocab=16, rope=ops.Rope(12, max_length=5))
    short, long = (np.arange(8)[None] < np.full((8, 1), size) for size in (2, 6))
    targets = lambda real: np.where(real, SHIFTED["targets"], -1)
    for name in ("valid", "segment_ids"):
        check_first_batch(SHIFTED | {"targets": targets(short), name: short.astype(np.int32)}, model)
        with pytest.raises(ValueError, match="6 positions in one document"):
            check_first_batch(SHIFTED | {"targets": targets(long), name: long.astype(np.int32)}, model)


class Declared(custom_losses.Preferred):
    reads = ("reference", "weight")


def test_names_that_are_read_are_not_warned_of():
    """A loss of the user's has names of its own, and may say which."""
    row = np.zeros(SHAPE[0], np.float32)
    batch = TEXT | {"segment_ids": IDS, "reference": SCORES, "weight": row}
    known = TEXT | {"positions": IDS, "segment_ids": IDS, "valid": IDS > 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(custom_losses.Preferred(), batch)
        run(training.NextToken(), known)
        run(pt.PolicyLoss(), ROLLOUTS | dict.fromkeys(("old_log_probs", "sampler_log_probs"), SCORES))
    run(Declared(), batch)
    with pytest.raises(ValueError, match=r"Declared reads batch\['weight'\], got 'weights'"):
        run(Declared(), TEXT | {"segment_ids": IDS, "reference": SCORES, "weights": row})


def test_targets_at_padding_are_refused():
    """They are learned from nothing: 0 as the padding of targets, or segment_ids that count from 0."""
    ids = np.repeat([[1, 2, 0]], 8, axis=0).repeat([3, 3, 2], axis=1)
    masked = SHIFTED | {"targets": np.where(ids > 0, SHIFTED["targets"], -1)}
    for mask in ({"segment_ids": ids}, {"valid": ids > 0}):
        check_first_batch(masked | mask, tiny.model())
        with pytest.raises(ValueError, match="16 targets of the first batch are at padding"):
            check_first_batch(SHIFTED | mask, tiny.model())
    with pytest.raises(ValueError, match=r"24 targets .* segment_ids count documents from 1"):
        check_first_batch(
            {"chosen": SHIFTED | {"segment_ids": (np.arange(8) > 2) * np.ones((8, 1), int)}}, tiny.model()
        )
