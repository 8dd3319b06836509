"""Evaluation by source and in bits per byte, of several sets, at chosen steps, and with an early end."""

import math

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import data, observability, sharding, training
from tests.training import tiny
from tests.training.trainers import SGD, trainer

SOURCES = ("web", "code", "books")
BYTES = np.arange(tiny.VOCAB) % 5
LOSS = training.BySource(SOURCES, BYTES)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    tiny.share_steps(monkeypatch)


def documents(count=24):
    """Documents of two of the three sources."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, tiny.VOCAB, rng.integers(2, 12)).astype(np.int32) for _ in range(count)]
    return [{"tokens": x, "source": SOURCES[i % 2]} for i, x in enumerate(tokens)]


def batches(rows, size):
    """Rows in batches, the last filled with rows without targets."""
    short = -len(rows) % size
    empty = {**rows[0], "targets": np.full_like(rows[0]["targets"], -1)}
    rows = [*rows, *[empty] * short]
    return [jax.tree.map(lambda *x: np.stack(x), *rows[i : i + size]) for i in range(0, len(rows), size)]


@pytest.fixture(scope="module")
def rows():
    packed = data.pack(grain.MapDataset.source(documents()), length=16, sources=SOURCES)
    return list(packed)


def evaluated(rows, size, layout=None):
    state = training.make_state(tiny.model(), SGD)
    step = jax.jit(training.make_eval_step(LOSS, dtype=jnp.float32))
    return training.evaluate(step, state, [training.shard_batch(b, layout) for b in batches(rows, size)])


@pytest.fixture(scope="module")
def by_fours(rows):
    return evaluated(rows, 4)


def test_sums_by_source_are_those_of_float64_and_add_up(by_fours):
    got, model, parts = by_fours, tiny.model(), {}
    tokens = jnp.asarray([np.pad(d["tokens"], (0, 12 - len(d["tokens"]))) for d in documents()])
    logits_of_rows = jax.jit(lambda model: model.logits(model(tokens, dtype=jnp.float32).hidden))(model)
    for document, padded in zip(documents(), np.asarray(logits_of_rows, np.float64), strict=True):
        logits = padded[: len(document["tokens"])]
        targets = document["tokens"][1:]
        nll = (np.log(np.exp(logits).sum(-1))[:-1] - logits[np.arange(len(targets)), targets]).sum()
        new = np.array([nll, len(targets), BYTES[targets].sum()])
        parts[document["source"]] = parts.get(document["source"], 0) + new
    total = sum(parts.values())
    assert got["num_targets"] == total[1] and got["books/share"] == got["books/nll"] == 0
    assert got["nll"] == pytest.approx(total[0] / total[1], rel=1e-6)
    assert got["bits_per_byte"] == pytest.approx(total[0] / total[2] / math.log(2), rel=1e-6)
    for name, (nll, count, size) in parts.items():
        assert got[f"{name}/nll"] == pytest.approx(nll / count, rel=1e-6)
        assert got[f"{name}/bits_per_byte"] == pytest.approx(nll / size / math.log(2), rel=1e-6)
    assert sum(got[f"{name}/share"] * got[f"{name}/nll"] for name in SOURCES) == pytest.approx(got["nll"], rel=1e-6)
    for name in ("nll", "bits_per_byte"):  # the source without targets does not count
        assert got[f"macro_{name}"] == pytest.approx((got[f"web/{name}"] + got[f"code/{name}"]) / 2, rel=1e-6)


def test_results_do_not_depend_on_batch_size_and_mesh(rows, by_fours):
    want = by_fours
    layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=4))
    with sharding.use(layout):
        split = evaluated(rows, 8, layout)
    assert split.keys() == want.keys() and split["num_targets"] == want["num_targets"]
    for name, value in want.items():
        assert split[name] == pytest.approx(value, rel=1e-6), name


def test_counts_beyond_float32_are_exact():
    """2^24 + 1 targets: a float32 sum would stop counting."""
    stats = training.Stats(jnp.float32(2**23), {"nll": jnp.float32(2**23)})
    last = training.Stats(jnp.float32(1), {"nll": jnp.float32(1)})
    state = training.make_state(tiny.model(), SGD)
    got = training.evaluate(lambda state, batch: batch["stats"], state, [{"stats": s} for s in (stats, stats, last)])
    assert got == {"num_targets": 2**24 + 1, "nll": 1.0}


def test_a_document_needs_one_of_the_named_sources():
    with pytest.raises(
        ValueError, match=r"sources=\['web'\], each document's 'source' must be one of them, got 'code'"
    ):
        list(data.pack(grain.MapDataset.source(documents(2)), length=16, sources=["web"]))


def test_several_sets_at_their_steps_and_a_target_that_ends_the_run(rows, tmp_path):
    same = {"loader": [tiny.batch()] * 50}
    held_out = training.Evaluation([tiny.batch()], every=2)
    before = trainer(evaluation=held_out, **same)
    values = [before.fit(step)["eval/loss"] for step in (2, 4, 6)]
    assert values[0] > values[1] > values[2]
    evaluation = {
        "mix": training.Evaluation(batches(rows, 4), at=(1, 4), loss=training.BySource(SOURCES, BYTES)),
        "own": training.Evaluation([tiny.batch()], every=2, stop_at=("loss", float(values[2]))),
    }
    ours = trainer(evaluation=evaluation, directory=tmp_path, **same)
    last = ours.fit(40)
    written = observability.read_jsonl(tmp_path / "metrics.jsonl")
    steps = {name: [row["step"] for row in written if f"eval/{name}/loss" in row] for name in evaluation}
    assert ours.step == 6 and steps == {"mix": [1, 4, 6], "own": [2, 4, 6]}
    assert last["eval/mix/web/bits_per_byte"] > 0
    page = observability.report(tmp_path).read_text()
    assert "mix/macro_bits_per_byte" in page and "own/loss" in page
    assert ours.fit(41)["eval/own/loss"] == last["eval/own/loss"] and ours.step == 6  # also when it is called again


def test_a_run_does_not_wait_for_a_metric_that_there_is_not():
    evaluation = training.Evaluation([tiny.batch()], stop_at=("eval/nll", 3.0))
    with pytest.raises(ValueError, match="names the metric 'eval/nll', so training would never stop; .* has loss, nll"):
        evaluation.check_stop_at({"nll": 1.0, "loss": 1.0})
