"""Mixtures keep their weights, lose no token, and resume exactly on other hosts."""

import contextlib
import itertools
import json
import warnings
from collections import Counter

import grain
import numpy as np
import pytest

from maxlib import data
from tests.data.corpus import process

LENGTH, BATCH, SHARDS = 16, 12, 6
NAMES = ("web", "code", "wiki")


def corpus(number: int, count: int, longest: int = 40) -> list[np.ndarray]:
    """Documents in which token = 1_000_000 * source + 1000 * (document + 1) + its index."""
    lengths = np.random.default_rng(number).integers(1, longest, count)
    return [1_000_000 * number + 1000 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)]


CORPORA = {name: corpus(i, count) for i, (name, count) in enumerate(zip(NAMES, (40, 30, 13), strict=True))}
SOURCES = {name: data.in_memory(documents) for name, documents in CORPORA.items()}


def source_of(tokens) -> np.ndarray:
    return np.asarray(tokens) // 1_000_000


def mixture(**kwargs) -> data.Mixture:
    return data.Mixture(**{"sources": SOURCES, "weights": {"web": 4, "code": 2, "wiki": 1}, "seed": 0, **kwargs})


def loader(mixed, *, host=0, hosts=1, strategy="first_fit", overlong="split", **kwargs) -> data.Loader:
    rows = lambda part: data.pack(mixed[part], length=LENGTH, strategy=strategy, bins=4, overlong=overlong)
    with process(host, hosts):
        return data.Loader(rows, batch_size=BATCH, num_shards=SHARDS, timeout=60.0, **kwargs)


def curriculum(step: int) -> dict[str, float]:
    return {"web": 1, "code": 0 if step < 4 else 1, "wiki": 0.5}


MIXTURES = {
    "weights": lambda: mixture(),
    "documents, epochs": lambda: mixture(by="documents", epochs={"wiki": 2}),
    "curriculum": lambda: mixture(weights=curriculum, tokens_per_step=BATCH * LENGTH),
}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("documents, epochs", "concat_then_split"),
        pytest.param("curriculum", "first_fit", marks=pytest.mark.full),
        pytest.param("documents, epochs", "first_fit", marks=pytest.mark.full),
        pytest.param("curriculum", "concat_then_split", marks=pytest.mark.full),
        pytest.param("weights", "first_fit", marks=pytest.mark.full),
        pytest.param("weights", "concat_then_split", marks=pytest.mark.full),
    ],
)
def test_one_three_and_two_hosts_see_the_same_global_batches(kind, strategy):
    mixed = MIXTURES[kind]()
    uninterrupted = loader(mixed, strategy=strategy)
    state = None
    for hosts, steps in ((1, 4), (3, 4), (2, 5)):
        loaders = [loader(mixed, host=i, hosts=hosts, strategy=strategy) for i in range(hosts)]
        for resumed in loaders if state is not None else ():
            resumed.set_state(state)
        for _ in range(steps):
            want, got = next(uninterrupted), [next(host) for host in loaders]
            for name in want:
                np.testing.assert_array_equal(np.concatenate([batch[name] for batch in got]), want[name])
        counts = sum((Counter(host.metrics()) for host in loaders), Counter())
        assert counts == Counter(uninterrupted.metrics())
        state = json.loads(json.dumps({shard: s for host in loaders for shard, s in host.get_state().items()}))


@pytest.mark.parametrize("strategy", ["first_fit", "concat_then_split"])
def test_an_epoch_holds_the_exact_multiset_of_tokens(strategy):
    epochs = {"web": 1, "code": 1, "wiki": 3}
    batches = list(loader(mixture(epochs=epochs), strategy=strategy))
    got = Counter(int(t) for batch in batches for t in batch["tokens"][batch["segment_ids"] > 0])
    assert got == Counter(int(t) for name in NAMES for _ in range(epochs[name]) for d in CORPORA[name] for t in d)


def drawn(mixed, count: int, part=slice(0, None, 1)) -> list:
    reading = iter(mixed[part])
    return [next(reading) for _ in range(count)]


@pytest.mark.parametrize("by", ["tokens", "documents"])
def test_shares_hold_at_every_moment(by):
    spent = dict.fromkeys(NAMES, 0)
    for document in drawn(mixture(by=by), 150):
        spent[document["source"]] += len(document["tokens"]) if by == "tokens" else 1
        off = [spent[name] - sum(spent.values()) * w / 7 for name, w in zip(NAMES, (4, 2, 1), strict=True)]
        assert max(map(abs, off)) <= 3 * (40 if by == "tokens" else 1)


def test_weights_follow_the_step():
    mixed = mixture(weights=curriculum, tokens_per_step=100)
    before = 0
    for document in drawn(mixed, 60):
        if document["source"] == "code":
            break
        before += len(document["tokens"])
    assert 400 <= before < 480  # the others may still be owed a document
    # Six shards together reach the step six times sooner.
    mine = drawn(mixed, 20, slice(0, None, 6))
    assert 400 / 6 <= sum(len(d["tokens"]) for d in mine[: [d["source"] for d in mine].index("code")]) < 400 / 6 + 80


def test_a_source_that_is_used_up_leaves_its_share():
    names = [d["source"] for d in drawn(mixture(epochs={"wiki": 1}, by="documents"), 300)]
    assert Counter(names)["wiki"] == 13
    rest = Counter(names[-90:])
    assert rest == {"web": 60, "code": 30}


def test_seeds_and_nesting():
    ids = lambda mixed: [int(d["tokens"][0]) for d in drawn(mixed, 30)]
    assert ids(mixture()) == ids(mixture()) != ids(mixture(seed=1))
    inner = data.Mixture(
        {"code": SOURCES["code"], "wiki": SOURCES["wiki"]}, {"code": 1, "wiki": 1}, by="documents", seed=0
    )
    outer = data.Mixture({"web": SOURCES["web"], "rest": inner}, {"web": 1, "rest": 1}, by="documents", seed=0)
    assert Counter(source_of([d["tokens"][0] for d in drawn(outer, 80)]).tolist()) == {0: 40, 1: 20, 2: 20}


def test_sources_change_on_resume_and_the_rest_keeps_its_order():
    """One is added, one leaves, weights change; later the one that left returns."""
    books = {"books": data.in_memory(corpus(5, 20))}
    stages = [
        (SOURCES, {"web": 4, "code": 2, "wiki": 1}),
        ({**books, "code": SOURCES["code"], "web": SOURCES["web"]}, {"web": 1, "code": 1, "books": 2}),
        ({**SOURCES, **books}, {"web": 1, "code": 1, "books": 1, "wiki": 3}),
    ]
    read, state = {name: [] for name in (*NAMES, "books")}, None
    for sources, weights in stages:
        reading = iter(data.Mixture(sources, weights, seed=0)[::1])
        with contextlib.nullcontext() if state is None else pytest.warns(UserWarning, match="are new, and"):
            reading.set_state(state) if state is not None else None
        sizes = Counter()
        for _ in range(60):
            document = next(reading)
            read[document["source"]].append(int(document["tokens"][0]))
            sizes[document["source"]] += len(document["tokens"])
            for name, weight in weights.items():  # within one document of the others', from the resume on
                share = weight / sum(weights.values())
                assert abs(sizes[name] - share * sizes.total()) < 80
        state = json.loads(json.dumps(reading.get_state()))
    for name, source in (SOURCES | books).items():
        alone = drawn(data.Mixture({name: source}, seed=0), len(read[name]))
        assert read[name] == [int(document["tokens"][0]) for document in alone]


def test_a_loader_resumes_with_other_sources():
    """At most the document that each shard was splitting is read twice, or another in its place not at all."""
    first = loader(mixture(epochs=1), strategy="concat_then_split")
    batches = [next(first) for _ in range(2)]
    books = {"books": data.in_memory(corpus(5, 20))}
    later = data.Mixture({**books, **SOURCES}, {"books": 1, "web": 2, "code": 2, "wiki": 1}, epochs=1, seed=0)
    resumed = loader(later, strategy="concat_then_split")
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    with pytest.warns(UserWarning, match=r"\['books'\] are new, and \[\] are no longer read"):
        batches += list(resumed)
    tokens = Counter(int(t) for batch in batches for t in batch["tokens"][batch["segment_ids"] > 0])
    every = Counter(int(t) for d in [*itertools.chain(*CORPORA.values()), *corpus(5, 20)] for t in d)
    twice, never = tokens - every, every - tokens
    assert len({t // 1000 for t in twice}) <= SHARDS and len({t // 1000 for t in never}) <= SHARDS
    assert max(tokens.values()) <= 2


def test_sources_repeated_in_one_order_are_warned_of():
    """Files sorted by topic would be learned in that order again and again."""
    web = {"web": SOURCES["web"]}
    for epochs in (None, 2):
        with pytest.warns(UserWarning, match="the sources web are read in the same order in every epoch"):
            data.Mixture(web, epochs=epochs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.Mixture(web, epochs=1)
        data.Mixture(web, seed=0)
        data.Mixture({"web": SOURCES["web"].shuffle(seed=0).map(lambda document: document)})
        data.Mixture({"web": SOURCES["web"].shuffle(seed=0).repeat()}, {"web": 1})


def test_policies_per_source_are_counted():
    mixed = mixture(epochs=1)
    batches = loader(mixed, overlong={"web": "drop", "code": "truncate"})
    tokens = [int(t) for batch in batches for t in batch["tokens"][batch["segment_ids"] > 0]]
    kept = {"web": lambda d: d if len(d) <= LENGTH else d[:0], "code": lambda d: d[:LENGTH], "wiki": lambda d: d}
    assert Counter(tokens) == Counter(int(t) for name in NAMES for d in CORPORA[name] for t in kept[name](d))
    long = {name: [len(d) for d in CORPORA[name] if len(d) > LENGTH] for name in NAMES}
    metrics = batches.metrics()
    assert metrics["data/dropped_documents/web"] == metrics["data/dropped_documents"] == len(long["web"])
    assert metrics["data/dropped_tokens"] == sum(long["web"])
    for name in NAMES:
        assert metrics[f"data/documents/{name}"] == len(CORPORA[name])
        assert metrics[f"data/tokens/{name}"] == sum(map(len, CORPORA[name]))
    assert metrics["data/truncated_tokens/code"] == sum(long["code"]) - LENGTH * len(long["code"])
    assert metrics["data/tokens/wiki"] == sum(map(len, CORPORA["wiki"]))
    assert metrics["data/split_documents/wiki"] == metrics["data/split_documents"] == len(long["wiki"]) > 0
    assert metrics["data/split_tokens"] == sum(long["wiki"]) - LENGTH * len(long["wiki"])
    with pytest.raises(ValueError, match=r"of the source 'wiki' has \d+ tokens, a row 16"):
        list(loader(mixed, overlong={"wiki": "error"}))
    with pytest.raises(ValueError, match="a source of overlong must be .*'wiki'.* got 'wikki'"):
        next(loader(mixed, overlong={"wikki": "error"}))


def test_empty_and_vanished_sources_are_named(tmp_path):
    with pytest.raises(ValueError, match="The source 'none' of the mixture is empty"):
        data.Mixture({"web": SOURCES["web"], "none": SOURCES["code"][:0]}, seed=0)
    nothing = SOURCES["code"].filter(lambda document: False)
    with pytest.raises(ValueError, match="No document in 90 reads") as caught:
        drawn(data.Mixture({"web": SOURCES["web"], "none": nothing}, seed=0), 3)
    assert "While reading the source 'none' of the mixture." in caught.value.__notes__
    path = tmp_path / "gone.txt"
    path.write_text("one\ntwo\n")
    lines = data.text_files(path, document="line")
    gone = lines.map(lambda document: {"tokens": np.arange(len(document["text"]))})
    path.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        drawn(data.Mixture({"gone": gone}, seed=0), 1)
    assert "While reading the source 'gone' of the mixture." in caught.value.__notes__


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"weights names \['books'\], which are not among"):
        mixture(weights={"books": 1})
    with pytest.raises(ValueError, match="positive number for every source"):
        mixture(weights={"web": 1, "code": 0, "wiki": 1})
    with pytest.raises(ValueError, match="need tokens_per_step="):
        mixture(weights=curriculum)
    with pytest.raises(ValueError, match="already repeats"):
        mixture(sources={**SOURCES, "web": SOURCES["web"].repeat()})
    with pytest.raises(ValueError, match="at least one source, got none"):
        data.Mixture({}, seed=0)
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0 for the source 'wiki'"):
        mixture(epochs={"wiki": 0})
    with pytest.raises(ValueError, match="The source 'mixed' is a Mixture, which sets its own epochs"):
        data.Mixture({"mixed": mixture()}, weights={"mixed": 1}, epochs={"mixed": 2}, seed=0)
    with pytest.raises(ValueError, match=r"The sizes of \['mixed'\] are not known: name weights="):
        data.Mixture({"mixed": mixture(), "web": SOURCES["web"]}, seed=0)
    with pytest.raises(ValueError, match=r"'web' has documents without 'tokens', \['text'\]: use tokenize"):
        drawn(data.Mixture({"web": data.in_memory(["a text"])}, seed=0), 1)
    with pytest.raises(ValueError, match="at step 0 must name a non-negative number"):
        drawn(mixture(weights=lambda step: {"web": -1}, tokens_per_step=1), 1)
    with pytest.raises(ValueError, match=r"exhausted after \d+ tokens of this shard, while \['code'\] have weight 0"):
        list(mixture(weights=lambda step: {"web": 1, "code": 0, "wiki": 1}, tokens_per_step=1, epochs=1)[::1])


def test_bad_records_are_set_aside_and_counted_up_to_the_limit(tmp_path):
    def fails(document):
        if document["tokens"][0] // 1000 in (3, 5):
            raise ValueError("no such token")
        return document

    path = tmp_path / "bad.jsonl"
    bad = data.SkipBadRecords(limit=2, path=path)
    web = bad.guard(SOURCES["web"].map(fails), name="web")
    reading = loader(data.Mixture({"web": web}, epochs=2, seed=0), bad_records=bad)
    tokens = Counter(int(t) // 1000 for batch in reading for t in batch["tokens"][batch["segment_ids"] > 0])
    assert set(tokens) == set(range(1, 41)) - {3, 5}
    assert reading.metrics()["data/bad_records"] == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["record"] for line in lines) == [2, 4]
    assert lines[0]["source"] == "web" and lines[0]["error"] == "ValueError: no such token"
    again = data.SkipBadRecords(limit=1, path=path)
    assert len(again) == 2
    strict = data.SkipBadRecords(limit=1)
    with pytest.raises(
        ValueError, match=r"2 bad records, more than limit=1; the last, record 4 of 'web': no such token"
    ):
        list(strict.guard(SOURCES["web"].map(fails), name="web"))


def test_a_stream_is_a_source():
    class Stream:
        def __getitem__(self, part):
            return SOURCES["code"][part].to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))

    mixed = data.Mixture({"web": SOURCES["web"], "stream": Stream()}, {"web": 1, "stream": 1}, epochs={"web": 1})
    assert Counter(d["source"] for d in mixed[::1]) == {"web": 40, "stream": 30}


def test_a_place_in_another_order_is_refused():
    first, other = (iter(mixture(seed=seed)[::]) for seed in (0, 1))
    next(first)
    with pytest.raises(ValueError, match="sources shuffled with the seed 0, but here it is 1"):
        other.set_state(first.get_state())
