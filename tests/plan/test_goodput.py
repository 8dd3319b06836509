"""Goodput at scale: the simulation against closed forms, and against the published figures of a large run."""

import dataclasses
import math

import numpy as np
import pytest

from maxlib import plan

CLUSTER = plan.Cluster(
    hosts=100, hours_between_failures=500, restart=300, tiers=[plan.Tier(save=20, restore=60)], straggling=1.05
)
LOCAL = plan.Tier(save=2, restore=10, survives=0.9)


def expected_goodput(cluster: plan.Cluster, interval: float) -> float:
    """Daly's closed form (2006): with exponential failures of mean M, `interval` seconds of training and a save take
    M e^(R / M) (e^((interval + save) / M) - 1) seconds, R a restart with its restore.
    """
    (tier,), mean = cluster.tiers, cluster.mean_time_between_failures
    restart = math.exp((cluster.restart + tier.restore) / mean)
    return interval / cluster.straggling / (mean * restart * math.expm1((interval + tier.save) / mean))


@pytest.mark.parametrize("interval", [100.0, 850.0, 6000.0])
def test_the_simulation_is_dalys_formula(interval):
    simulated = plan.simulate_goodput(CLUSTER, [interval], days=300)
    assert simulated.useful == pytest.approx(expected_goodput(CLUSTER, interval), rel=0.01)
    shares = [getattr(simulated, name) for name in ("useful", "lost", "saving", "restarting", "straggling")]
    assert sum(shares) == pytest.approx(1)
    assert simulated.failures == pytest.approx(300 * 24 / 5, rel=0.03)


def test_the_best_interval_loses_the_least():
    (best,) = CLUSTER.best_intervals()
    assert best == pytest.approx((2 * 20 * 18_000) ** 0.5)
    grid = np.geomspace(best / 8, best * 8, 41)
    goodput = [expected_goodput(CLUSTER, interval) for interval in grid]
    assert expected_goodput(CLUSTER, best) > max(goodput) * 0.9995
    assert max(goodput[0], goodput[-1]) < max(goodput) * 0.95


def test_a_near_tier_saves_what_it_survives():
    cluster = dataclasses.replace(CLUSTER, tiers=[LOCAL, *CLUSTER.tiers])
    intervals = cluster.best_intervals()
    assert intervals[0] < CLUSTER.best_intervals()[0] < intervals[1]
    both = plan.simulate_goodput(cluster, intervals, days=200)
    alone = plan.simulate_goodput(CLUSTER, CLUSTER.best_intervals(), days=200)
    assert both.useful > alone.useful and both.lost < 0.75 * alone.lost and both.saving < alone.saving
    unused = plan.simulate_goodput(cluster, [float("inf"), CLUSTER.best_intervals()[0]], days=200)
    assert unused.useful == pytest.approx(alone.useful, rel=0.01)


def test_the_goodput_of_llama_3_405b():
    """419 unexpected failures of 2,048 hosts in 54 days, and over 90 % of the time effective (arXiv:2407.21783)."""
    cluster = plan.Cluster(
        hosts=2048, hours_between_failures=54 * 24 * 2048 / 419, restart=600, tiers=[plan.Tier(save=10, restore=120)]
    )
    run = plan.simulate_goodput(cluster, cluster.best_intervals(), days=54)
    assert run.failures == pytest.approx(419, rel=0.15) and 0.90 < run.useful < 0.95


def test_the_goodput_of_gemini_ultra():
    """85 % with a shared store, 97 % with redundant copies in memory (arXiv:2312.11805). The rate of failures is not
    published: it is taken from the first figure, and the second follows.
    """
    shared = plan.Tier(save=10, restore=120)
    cluster = plan.Cluster(hosts=1, hours_between_failures=1.862, restart=600, tiers=[shared])
    assert expected_goodput(cluster, *cluster.best_intervals()) == pytest.approx(0.85, abs=1e-3)
    memory = plan.Tier(save=0.1, restore=15, survives=0.95)
    for restart, goodput in ((120, 0.964), (60, 0.972)):
        near = dataclasses.replace(cluster, restart=restart, tiers=[memory, shared])
        simulated = plan.simulate_goodput(near, near.best_intervals(), days=20)
        assert simulated.useful == pytest.approx(goodput, abs=0.004)


def test_failures_of_a_log():
    """Two failures, each after a save: what is lost and redone can be counted by hand."""
    cluster = dataclasses.replace(CLUSTER, straggling=1.0)
    run = plan.simulate_goodput(cluster, [100.0], days=1000 / 86_400, failures=[130.0, 620.0])
    # 100 trained, 20 saving, 10 lost, 360 restarting; 100 trained, 20 saving, 10 lost, 360 restarting; 20 trained
    shares = run.useful, run.saving, run.lost, run.restarting
    assert run.failures == 2 and shares == pytest.approx((0.22, 0.04, 0.02, 0.72))
    assert "with 2 failures: useful 22.0 %, lost 2.0 %, saving 4.0 %, restarting 72.0 %" in str(run)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="last tier must survive"):
        dataclasses.replace(CLUSTER, tiers=[LOCAL])
    with pytest.raises(ValueError, match="positive interval for each of 1 tiers"):
        plan.simulate_goodput(CLUSTER, [])
    with pytest.raises(ValueError, match="failures must be rising times in seconds"):
        plan.simulate_goodput(CLUSTER, [100.0], failures=[620.0, 130.0])
    with pytest.raises(ValueError, match=r"share in \(0, 1\]"):
        plan.Tier(save=1, restore=1, survives=1.5)
    with pytest.raises(ValueError, match="straggling at least 1"):
        dataclasses.replace(CLUSTER, straggling=0.5)
