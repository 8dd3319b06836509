"""Evaluation: scores and continuations against logits by hand, and three tasks against lm-eval's own `hf` backend."""

import importlib.util
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import data, inference, ops, tokenization, training, weights
from maxlib.inference import Generator, _harness
from maxlib.inference._scoring import score
from tests.nn.tiny import filled_llama

PAIRS = [([5, 9, 2], [7, 30]), ([11], [3, 1, 4, 1, 5]), ([2, 6, 5, 3, 5, 8, 9, 7, 9], [3])]
with_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval")


@pytest.fixture(scope="module")
def generator():
    return Generator(filled_llama(num_layers=2), dtype=jnp.float32)


@pytest.fixture(scope="module")
def log_probs(generator):
    """The log-probabilities after each of some ids, in float64."""

    @jax.jit
    def logits(model, tokens):
        return model.logits(model(tokens, dtype=jnp.float32).hidden)

    def compute(ids):
        scores = np.asarray(logits(generator.model, jnp.asarray([ids + [0] * (16 - len(ids))])), np.float64)[
            0, : len(ids)
        ]
        return scores - np.log(np.exp(scores).sum(-1, keepdims=True))

    return compute


def test_scores_are_sums_over_continuations(generator, log_probs):
    """The last batch is not full, and a context longer than the model reads loses its beginning."""
    ((answer,),) = [generator.generate([PAIRS[0][0]], max_new_tokens=1)]
    pairs = [*PAIRS, (PAIRS[0][0], answer)]
    got = dict(score(generator, pairs, batch_size=3, max_length=8))
    for n, (context, continuation) in enumerate(pairs):
        row = (context + continuation)[-9:]
        want = log_probs(row[:-1])[-len(continuation) :]
        assert got[n][0] == pytest.approx(sum(want[np.arange(len(continuation)), continuation]), abs=2e-5)
        assert got[n][1] == (want.argmax(-1) == continuation).all()
    assert [scored[1] for _, scored in sorted(got.items())] == [False, False, False, True]


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [2] * 9)])
def test_what_cannot_be_scored_is_refused(generator, pair):
    with pytest.raises(ValueError, match="request 1 must have a context .* of 1 to 8"):
        list(score(generator, [PAIRS[0], pair], batch_size=2, max_length=8))


class Ids:
    """A tokenizer that writes ids as numbers."""

    def encode(self, text, add_special_tokens=True):
        return [int(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(f"<{i}>" for i in ids)


@with_lm_eval
def test_continuations_end_at_texts_and_at_the_end_token(generator):
    prompts, decode = [context for context, _ in PAIRS], Ids().decode
    free = generator.generate(prompts, max_new_tokens=8)
    assert len({*free[0]}) > 2 and free[0] != free[1]
    until, end = decode(free[0][2:4])[1:-1], next(i for i in free[1] if i not in free[0])
    harness = inference.Harness(generator.model, Ids(), eos=end, dtype=jnp.float32, batch_size=2)
    requests = [
        types.SimpleNamespace(args=(" ".join(map(str, prompt)), {"until": [until, ""], "max_gen_toks": 8}))
        for prompt in prompts
    ]
    got = harness.generate_until(requests, disable_tqdm=True)
    for text, ids in zip(got, free, strict=True):
        assert text == decode(ids[: ids.index(end)] if end in ids else ids).split(until)[0]
    assert decode(free[0]).startswith(got[0]) and 0 < len(got[0]) < len(decode(free[0]))
    assert len(got[1]) < len(decode(free[1]))


@with_lm_eval
def test_continuations_end_at_each_of_several_tokens_and_at_special_ones(generator):
    """A special token is found by its text, which is not in the answer."""
    (free,) = generator.generate([PAIRS[0][0]], max_new_tokens=8)
    first, second, third, *_ = dict.fromkeys(free[1:])
    assert free[0] not in (first, second, third)

    class Special(Ids):
        def decode(self, ids, skip_special_tokens=True):
            return super().decode([i for i in ids if not (skip_special_tokens and i == second)])

    for stops, until, count in ([third, first], [], 1), ([third], [f"<{second}>"], free.index(second)):
        options = {"eos": stops[0], "stop_token_ids": stops, "dtype": jnp.float32}
        harness = inference.Harness(generator.model, Special(), **options)
        request = types.SimpleNamespace(args=(" ".join(map(str, PAIRS[0][0])), {"until": until, "max_gen_toks": 8}))
        assert harness.generate_until([request], disable_tqdm=True) == [Special().decode(free[:count])]


def test_options_of_tasks():
    options = lambda **settings: _harness._options(settings, 256)
    assert options(until="\n", do_sample=False, temperature=0.7) == (["\n"], 256, inference.GREEDY)
    assert options(max_new_tokens=3, temperature=0.5, top_p=0.9) == ([], 3, inference.Sampler(0.5, top_p=0.9))
    with pytest.raises(ValueError, match="got {'num_beams': 4}"):
        options(num_beams=4)
    with pytest.raises(ValueError, match="temperature above 0"):
        options(do_sample=True)


WORDS = "the cat sat on a mat while rain fell over old roofs and nobody came".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model and its tokenizer as published ones lie, and the documents of three tasks."""
    home = tmp_path_factory.mktemp("harness")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 40)) for _ in range(20)]
    tokenizer = tokenization.train_bpe(texts, vocab_size=300)
    weights.save_pretrained(filled_llama(num_layers=2, vocab=300, rope=ops.Rope(12, max_length=64)), home / "model")
    tokenization.save_tokenizer(tokenizer, home / "model", bos_token="<bos>", eos_token="<eos>")
    documents = [
        {"text": text, "start": " ".join(text.split()[:9]), "choices": text.split()[9:12], "gold": n % 3}
        for n, text in enumerate(texts)
    ]
    (home / "documents.json").write_text("\n".join(map(json.dumps, documents)))
    return home


def tasks(directory):
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(directory / "documents.json")},
            "cache_dir": str(directory / "cache"),
        },
        "test_split": "test",
        "metadata": {"version": 1.0},
    }
    return [
        shared
        | {
            "task": "choose",
            "output_type": "multiple_choice",
            "doc_to_text": "{{start}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "num_fewshot": 1,
            "fewshot_split": "test",
        },
        shared
        | {
            "task": "perplexity",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        shared
        | {
            "task": "continue",
            "output_type": "generate_until",
            "doc_to_text": "{{start}}",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["a", "e"], "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


def responses(model, directory):
    import lm_eval

    options = {"bootstrap_iters": 0, "log_samples": True, "verbosity": "ERROR"}
    results = lm_eval.simple_evaluate(model, tasks=tasks(directory), **options)
    order = lambda sample: sample["doc_id"]
    answers = {
        task: [answer["resps"] for answer in sorted(some, key=order)] for task, some in results["samples"].items()
    }
    return results["results"], answers


@pytest.mark.full
@with_lm_eval
def test_answers_end_where_those_of_the_hf_backend_end(directory, tmp_path):
    """At each of several ids that end texts, and at the text of a special token, which answers do not have."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, prompt = tmp_path / "model", "the cat sat on"
    shutil.copytree(directory / "model", model)
    theirs = HFLM(pretrained=str(model), device="cpu", dtype="float32")
    ids = theirs.tokenizer(prompt, return_tensors="pt").input_ids
    free = theirs.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    tokenizer = tokenization.load_tokenizer(model)
    texts = [tokenizer.decode([i]) for i in free]
    special, end = [i for i in range(2, 12) if texts[i].isascii() and texts[i] not in "".join(texts[:i])][:2]
    tokenizer.add_special_tokens([tokenizer.id_to_token(free[special]), tokenizer.id_to_token(free[end])])
    tokenization.save_tokenizer(tokenizer, model, bos_token="<bos>", eos_token="<eos>")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, free[end]]}))
    ours = inference.Harness.from_pretrained(model, dtype=jnp.float32)
    theirs = HFLM(pretrained=str(model), device="cpu", dtype="float32")
    for until, length in ([], end), ([texts[special]], special):
        requests = [Instance("generate_until", {}, (prompt, {"until": [*until], "max_gen_toks": 12}), 0) for _ in "ab"]
        got, want = (harness.generate_until([r], True) for harness, r in zip((ours, theirs), requests, strict=True))
        assert got == want == [tokenizer.decode(free[:length])]


@pytest.mark.full
@with_lm_eval
def test_tasks_give_what_the_hf_backend_gives(directory, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.models.huggingface import HFLM

    sizes = {"batch_size": 3, "max_length": 32}
    ours = inference.Harness.from_pretrained(directory / "model", dtype=jnp.float32, eos=1, bos=0, **sizes)
    theirs = HFLM(pretrained=str(directory / "model"), device="cpu", dtype="float32", **sizes)
    (got, got_answers), (want, want_answers) = responses(ours, directory), responses(theirs, directory)
    assert len(got_answers["choose"]) == 20
    for response, other in zip(got_answers["choose"], want_answers["choose"], strict=True):
        for (p, best), (q, also_best) in zip((r[0] for r in response), (r[0] for r in other), strict=True):
            assert float(p) == pytest.approx(float(q), abs=1e-4) and best == also_best
    text = json.loads((directory / "documents.json").read_text().splitlines()[0])["text"]
    assert len(ours.tok_encode(text)) > sizes["max_length"]  # several windows
    for response, other in zip(got_answers["perplexity"], want_answers["perplexity"], strict=True):
        assert float(response[0][0]) == pytest.approx(float(other[0][0]), rel=1e-6)
    assert got_answers["continue"] == want_answers["continue"]
    assert len({str(response) for response in got_answers["continue"]}) > 5
    for task, values in want.items():
        for name, value in values.items():
            if isinstance(value, float):
                assert got[task][name] == pytest.approx(value, rel=1e-5, abs=1e-9), (task, name)


@pytest.mark.full
@with_lm_eval
def test_a_run_is_evaluated_while_it_trains(directory, monkeypatch):
    """The callback scores the weights of its step, and writes numbers beside the run's own."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    model = weights.from_pretrained(directory / "model")
    tokenizer = tokenization_of(directory)
    harness = inference.Harness(model, tokenizer, eos=1, bos=0, dtype=jnp.float32, max_length=32)
    before = harness.evaluate(tasks(directory)[1:2], bootstrap_iters=0)
    text = "\n".join(json.loads(line)["text"] for line in (directory / "documents.json").read_text().splitlines())
    ids = np.array(tokenizer.encode(text).ids)
    rows = [{"tokens": ids[i : i + 32], "targets": ids[i + 1 : i + 33]} for i in range(0, len(ids) - 33, 32)]
    loader = data.Loader(lambda part: dataset(rows)[part].to_iter_dataset(), batch_size=4)
    callback = harness.callback(tasks(directory)[1:2], bootstrap_iters=0)
    trainer = training.Trainer(model, optax.adam(1e-2), loader, callbacks=[(8, callback)])
    written = []
    trainer.writers.append(
        type("Writer", (), {"write": lambda _, step, values: written.append((step, values)), "close": lambda _: None})()
    )
    trainer.fit(16)
    loader.close()
    figures = [
        (step, values["eval/perplexity/word_perplexity"])
        for step, values in written
        if "eval/perplexity/word_perplexity" in values
    ]
    assert [step for step, _ in figures] == [8, 16]
    assert figures[1][1] < figures[0][1] < before["perplexity/word_perplexity"]


def dataset(rows):
    import grain

    return grain.MapDataset.source(rows).repeat()


def tokenization_of(directory):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "model" / "tokenizer.json"))
