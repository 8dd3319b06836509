"""What the bench of plans counts and refuses."""

import types

import pytest

from maxlib.plan._hlo import Collective, Costs
from tests.benchmarks import plans as bench


def test_the_bench_compares_collectives_and_what_they_move():
    kinds = {"all-gather": 16, "all-reduce": 3, "reduce-scatter": 8, "all-to-all": 3, "collective-permute": 1}
    collectives = tuple(Collective(kind, ("fsdp",), count, count, count * 2.0**30) for kind, count in kinds.items())
    got = types.SimpleNamespace(costs=Costs(1.0, 1.0, collectives, 0))
    assert (bench.written(got), bench.moved(got)) == (31, 31.0)
    assert bench.Peer(1.0, 31, 31.0).excess(got) == [] == bench.Peer(None).excess(got)
    assert bench.Peer(1.0, 30, 40.0).excess(got) == ["31 collectives for 30"]
    assert bench.Peer(1.0, 31, 30.99).excess(got) == ["31.00 GiB moved for 30.99"]
    assert [bench.theirs(peer) for peer in (None, bench.Peer(None), bench.Peer(9.3))] == [
        "not measured",
        "does not fit",
        "9.30",
    ]


@pytest.mark.parametrize(("plans", "seconds"), [(23, 100.0), (24, 600.0)])
def test_the_bench_of_a_search_fails_when_layouts_are_missing_or_it_takes_ten_minutes(plans, seconds, monkeypatch):
    best = types.SimpleNamespace(compiled=True)
    found = types.SimpleNamespace(plans=[best] * plans, refused=[()] * 6, seconds=seconds, best=best)
    monkeypatch.setattr(bench.plan, "search", lambda *_, **__: found)
    bench.search(check=False)
    with pytest.raises(SystemExit, match="layouts in .*: 30 have to be tried within 600"):
        bench.search(check=True)
    found.plans, found.seconds = [best] * 24, 599.0
    bench.search(check=True)
