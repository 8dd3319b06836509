"""The short form of `tests.training.soak`: nothing that a process holds grows with what it repeats."""

import pytest

from maxlib import checkpoint, training
from tests.training import soak, tiny


def short(directory, times):
    """Training with a save and metrics at each step and an evaluation at every fifth, on a model that compiles fast."""
    ticks = []
    ours = training.Trainer(
        tiny.model,
        optimizer=training.adamw(1e-3, mask=None),
        loss=tiny.loss,
        loader=soak.loader_of(seed=0),
        evaluation=training.Evaluation(soak.loader_of(seed=1, num_batches=2), every=5),
        directory=directory,
        checkpointer=checkpoint.Checkpointer(directory / "run", every=1, keep=2),
        callbacks=[
            (1, lambda _: ticks.append(None)),
            training.ParameterExport(directory / "parameters", every=10, keep=1),
        ],
    )
    for step in range(5, times + 1, 5):
        ours.fit(step)
        yield from ticks
        ticks.clear()
    ours.checkpointer.close()


@pytest.mark.parametrize(("part", "times"), [("short", 40), ("loader", 20)])
def test_nothing_grows(monkeypatch, part, times):
    monkeypatch.setitem(soak.PARTS, "short", short)
    samples = soak.run(part, times)
    assert [problem for problem in soak.failures(samples) if not problem.startswith(("memory", "threads"))] == []
    assert samples[-1]["files"] <= samples[len(samples) // 2]["files"]  # old steps and exports go


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", soak.PARTS)
def test_nothing_grows_for_long(part):
    assert soak.failures(soak.run(part, soak.TIMES[part] // 10)) == []


def test_a_leak_is_found(tmp_path):
    """Of a descriptor a repeat, of a thread that stays, of memory."""
    base = {"seconds": 1.0, "threads": 9.0, "python threads": 3.0, "descriptors": 6.0, "rss_kib": 1e6, "shm_files": 0.0}
    grow = lambda name, by: [base | {"times": i, "files": 1.0, name: base[name] + by * i} for i in range(40)]
    assert soak.failures(grow("seconds", 0)) == []
    assert soak.failures(grow("descriptors", 1)) == ["descriptors went from 14 to 45"]
    assert soak.failures(grow("python threads", 1))[0].startswith("python threads went")
    assert soak.failures(grow("rss_kib", 25)) == ["memory grows by 25.0 KiB a repeat"]
    assert soak.failures(grow("rss_kib", 15)) == []
