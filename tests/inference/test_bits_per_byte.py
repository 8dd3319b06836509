"""Bits per byte of documents and cloze tasks: windows and numbers of lm-eval, and sums over tokens."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import inference, tokenization
from maxlib.inference import Cloze, Generator, rolling_windows
from tests.nn.tiny import filled_llama

with_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval")
TEXTS = {"short": ["the cat sat", "on a mat"], "long": ["while rain fell over old roofs and nobody came " * 2]}
TASKS = [Cloze("the cat", (" sat", " mat"), 0), Cloze("on a ", ("roof", "mat", "cat"), 1)]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train_bpe([text for texts in TEXTS.values() for text in texts], vocab_size=300)


@pytest.fixture(scope="module")
def generator():
    return Generator(filled_llama(num_layers=2, vocab=300), dtype=jnp.float32)


def evaluation(tokenizer, **options):
    return inference.BitsPerByte(tokenizer, 1, TEXTS, {"words": TASKS}, max_length=16, **options)


@with_lm_eval
def test_windows_are_those_of_lm_eval():
    from lm_eval import utils

    for count in range(25):
        for length in range(1, 9):
            tokens = list(range(100, 100 + count))
            windows = utils.get_rolling_token_windows(tokens, 7, length, context_len=1)
            want = [tuple(map(list, utils.make_disjoint_window(window))) for window in windows]
            assert [(list(a), list(b)) for a, b in rolling_windows(tokens, prefix=7, max_length=length)] == want


@with_lm_eval
def test_bits_per_byte_is_that_of_lm_eval(tokenizer, generator):
    """Its own metric, of log-likelihoods that its loop asks of the harness."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import bits_per_byte

    got = evaluation(tokenizer, batch_size=3)(generator)
    harness = inference.Harness(generator.model, tokenizer, eos=1, bos=1, dtype=jnp.float32, max_length=16)
    pairs = {}
    for name, texts in TEXTS.items():
        requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
        values = harness.loglikelihood_rolling(requests, disable_tqdm=True)
        pairs[name] = [(value, len(text.encode())) for value, text in zip(values, texts, strict=True)]
        assert got[f"{name}/bits_per_byte"] == pytest.approx(bits_per_byte(pairs[name]), rel=1e-6)
    assert got["micro_bits_per_byte"] == pytest.approx(
        bits_per_byte([pair for row in pairs.values() for pair in row]), rel=1e-6
    )
    mean = (got["short/bits_per_byte"] + got["long/bits_per_byte"]) / 2
    assert got["macro_bits_per_byte"] == pytest.approx(mean, rel=1e-12)


def test_cloze_tasks_and_other_batch_sizes(tokenizer, generator):
    got, model = evaluation(tokenizer, batch_size=2)(generator), generator.model
    assert evaluation(tokenizer, batch_size=5)(generator) == pytest.approx(got, rel=1e-6)
    score = jax.jit(lambda model, ids: model.logits(model(ids, dtype=jnp.float32).hidden)[0])
    bits = []
    for task in TASKS:
        of_choices = []
        for choice in task.choices:
            ids = [1, *tokenizer.encode(task.context + choice).ids]
            scored = len(ids) - 1 - len(tokenizer.encode(task.context.rstrip()).ids)
            logits = np.asarray(score(model, jnp.array([ids + [0] * (16 - len(ids))])), np.float64)[: len(ids) - 1]
            log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            total = log_probs[np.arange(len(ids) - 1), ids[1:]][-scored:].sum()
            of_choices.append(-total / math.log(2) / len(choice))
        bits.append((of_choices[task.answer], of_choices[task.answer] == min(of_choices)))
    assert got["words/bits_per_byte"] == pytest.approx(np.mean([b for b, _ in bits]), rel=1e-5)
    assert got["words/accuracy"] == np.mean([correct for _, correct in bits])


def test_letters_are_no_documents(tokenizer):
    with pytest.raises(ValueError, match=r"documents\['wiki'\] must be a list of texts"):
        inference.BitsPerByte(tokenizer, 1, {"wiki": "the cat"})
    with pytest.raises(ValueError, match="answer must be the index of one of 2 choices, got 2"):
        Cloze("the cat", (" sat", " mat"), 2)
