"""What the bench of plans counts and refuses."""

import types

import pytest

from maxlib.plan.hlo import Collective, Costs
from tests.benchmarks import plans as bench


def test_the_bench_counts_collectives_by_kind():
    kinds = {"all-gather": 16, "all-reduce": 3, "reduce-scatter": 8, "all-to-all": 3, "collective-permute": 1}
    collectives = tuple(Collective(kind, ("fsdp",), count, count, 1.0) for kind, count in kinds.items())
    got = types.SimpleNamespace(costs=Costs(1.0, 1.0, collectives, 0))
    assert bench.written(got) == (16, 11, 4)
    assert bench.Peer(1.0, 16, 11, 4).excess(got) == [] == bench.Peer(None).excess(got)
    assert bench.Peer(1.0, 15, 12, 9).excess(got) == ["all-gather: 16 for 15"]
    assert bench.Peer(1.0, 16, 10, 4).excess(got) == ["reductions: 11 for 10", "all: 31 for 30"]
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
