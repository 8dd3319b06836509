"""Batches and options that a loss cannot use are refused, and what must hold is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import adapters, training
from maxlib import post_training as pt
from tests.nn.tiny import filled_llama
from tests.post_training.every_loss import ROWS, VOCAB, T, batch, built, halves

RNG = np.random.default_rng(0)
HIDDEN, WEIGHT = (jnp.asarray(RNG.normal(size=(*size, 4)), jnp.float32) for size in ((ROWS, T), (VOCAB,)))


class Head:
    softcap, head_weight = None, lambda self: WEIGHT


@pytest.mark.parametrize(
    "loss",
    [pt.DAPO(), pt.GRPO(mean=pt.FixedLengthMean(8)), pt.GRPO(), pt.DPO(), pt.KTO()],
    ids=["token", "fixed", "sequence", "pairs", "kto"],
)
def test_ids_of_a_corpus_are_no_numbers_of_segments(loss):
    """They work in attention, where only runs count; sums over sequences would leave them out in silence."""
    mean = jax.jit(lambda data: loss.from_hidden(Head(), HIDDEN, data))
    (good, few), (bad, many) = mean(batch()), mean(batch() | {"segment_ids": batch()["segment_ids"] * 5017})
    assert np.isfinite(good) and float(few.num_targets) > 0
    assert np.isnan(bad) or np.isnan(many.num_targets)


def test_rows_of_pairs_in_one_array_are_refused():
    """As TRL stacks them; without segments the loss was 0 of 0 pairs, and only weight decay acted."""
    first, second = (jax.tree.map(jnp.asarray, half) for half in halves().values())
    stacked = {name: jnp.concatenate([first[name], second[name]]) for name in ("tokens", "targets")}
    run = lambda model: pt.SimPO()(model, stacked, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"finds no pairs in a batch of \['targets', 'tokens'\].*chosen.*segment_ids"):
        jax.eval_shape(run, built())


def test_what_is_missing_is_named():
    data, small = jax.tree.map(jnp.asarray, batch()), built()
    without = lambda *names: {name: x for name, x in data.items() if name not in names}
    shape = lambda loss, data: jax.eval_shape(lambda m: loss(m, data, dtype=jnp.float32), small)
    with pytest.raises(ValueError, match="DPO compares with a reference"):
        shape(pt.DPO(), without("reference_log_probs"))
    with pytest.raises(ValueError, match="the KL term compares with a reference"):
        shape(pt.GRPO(kl_term=pt.KL(0.1)), without("reference_log_probs"))
    with pytest.raises(ValueError, match=r"needs batch\['advantages'\]"):
        shape(pt.GRPO(), without("advantages"))
    with pytest.raises(ValueError, match=r"a correction needs batch\['sampler_log_probs'\]"):
        shape(pt.GRPO(correction=pt.RolloutCorrection()), without("sampler_log_probs"))
    with pytest.raises(ValueError, match="KTO needs"):
        shape(pt.KTO(), without("kl_baseline"))
    with pytest.raises(ValueError, match="distillation needs a teacher"):
        shape(pt.Distillation(), without("teacher_ids"))
    with pytest.raises(ValueError, match="no trainable adapters to remove"):
        shape(pt.DPO(reference=adapters.base_model), data)
    with pytest.raises(TypeError, match="put a model of its own beside the trained one"):
        pt.DPO(reference=small)(small, data)
    other = filled_llama(num_layers=1, vocab=VOCAB + 8)
    with pytest.raises(ValueError, match="the same vocabulary; the student's has 64 tokens, the teacher's 72"):
        shape(pt.Distillation(teacher=lambda model: other), data)
    uneven = halves() | {"rejected": {"tokens": np.zeros((8, 3), np.int32)}}
    with pytest.raises(ValueError, match="chosen and rejected must have the same arrays"):
        shape(pt.DPO(), uneven)


def test_one_advantage_for_several_completions_of_a_row_is_an_error():
    """Each completion has its own; one number for a row is one for a single completion."""
    total = lambda data: pt.GRPO().from_hidden(Head(), HIDDEN, data)[0]
    shared = {**batch(), "advantages": np.linspace(-1, 1, ROWS, dtype=np.float32)}
    shared = {name: jnp.asarray(x) for name, x in shared.items()}
    with pytest.raises(ValueError, match="several completions, but .* one number for each row: give it as B T"):
        total(shared)
    jitted = jax.jit(total)
    assert np.isnan(jitted(shared))
    single = shared | {"targets": jnp.where(shared["segment_ids"] == 2, shared["targets"], -1)}
    wide = single | {"advantages": jnp.broadcast_to(shared["advantages"][:, None], shared["tokens"].shape)}
    assert float(jitted(single)) == float(jitted(wide)) != 0


def losses_of(cls=training.Loss):
    """All losses of the library that say what they read."""
    for loss in cls.__subclasses__():
        if loss.__module__.startswith("maxlib."):
            yield from [loss] if loss.reads is not None else []
            yield from losses_of(loss)


@pytest.mark.parametrize("cls", sorted(losses_of(), key=str), ids=lambda cls: cls.__name__)
def test_weights_of_targets_are_read_or_refused(cls):
    """A loss that leaves them out weighs all targets alike, in silence."""
    rows = {"tokens": np.zeros((1, 2)), "targets": np.zeros((1, 2)), "loss_weights": np.ones((1, 2))}
    assert ("loss_weights" in cls.reads) == (cls in (training.NextToken, training.MTP, training.DFT))
    if "loss_weights" not in cls.reads:
        for data in (rows, {"chosen": rows, "rejected": rows}):
            with pytest.raises(ValueError, match=f"{cls.__name__} does not read batch.'loss_weights'"):
                object.__new__(cls).check_names(data)


def test_options_of_terms_that_all_share_are_refused():
    with pytest.raises(ValueError, match=r"all terms share \['weighted'\]"):
        pt.MixedPreference(((0.5, pt.DPO(weighted=True)), (0.5, pt.DPO(loss_type="ipo"))))


def test_an_option_of_another_divergence_is_refused():
    with pytest.raises(ValueError, match="alpha is for divergence='alpha_divergence', got it for 'js_divergence'"):
        pt.DPO(divergence="js_divergence", alpha=0.3)
