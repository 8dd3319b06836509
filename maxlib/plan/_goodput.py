"""What failures cost a long run: goodput from rates of failure, saves and restarts (Young 1974)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """One place where checkpoints go.

    Args:
        save: Seconds for which a save stops training; of an asynchronous save, the copy to host memory.
        restore: Seconds to read a checkpoint and send it to all devices.
        survives: Share of the failures after which this tier still has its checkpoints; 1 for a shared store, less for
            the hosts' own disks or memory.

    Raises:
        ValueError: when a time is negative or `survives` is no share.
    """

    save: float
    restore: float
    survives: float = 1.0

    def __post_init__(self):
        if self.save < 0 or self.restore < 0 or not 0 < self.survives <= 1:
            raise ValueError(f"save and restore must be seconds, and survives a share in (0, 1], got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A run's hosts and what a failure of one costs; the whole run stops and restarts.

        llama3 = plan.Cluster(
            hosts=2048,
            hours_between_failures=6334,  # of one host: 419 failures of 2048 hosts in 54 days
            restart=600,
            tiers=[plan.Tier(save=10, restore=120)],
        )
        print(plan.simulate_goodput(llama3, llama3.best_intervals(), days=54))

    Args:
        hosts: Number of hosts.
        hours_between_failures: Mean time between failures of one host, in hours.
        restart: Seconds from a failure to the first step, without reading the checkpoint: to notice it, to find other
            hosts, to start processes and to compile.
        tiers: Where checkpoints go, the nearest first; the last one must survive every failure.
        straggling: Factor of a step's time with the usual stragglers over that without, at least 1.

    Raises:
        ValueError: when numbers are not positive, or the last tier does not survive every failure.
    """

    hosts: int
    hours_between_failures: float
    restart: float
    tiers: Sequence[Tier]
    straggling: float = 1.0

    def __post_init__(self):
        if self.hosts < 1 or not self.hours_between_failures > 0 or self.restart < 0 or self.straggling < 1:
            raise ValueError(f"hosts and times must be positive and straggling at least 1, got {self}")
        if not self.tiers or self.tiers[-1].survives != 1:
            raise ValueError("the last tier must survive every failure: a shared store, with survives=1")

    @property
    def mean_time_between_failures(self) -> float:
        """Seconds between failures of the run."""
        return 3600 * self.hours_between_failures / self.hosts

    def best_intervals(self) -> list[float]:
        """Returns for each tier the seconds of training between saves that lose the least: sqrt(2 save M) (Young).

        M is the mean time between the failures after which the run restores from this tier.
        """
        shares, covered = [], 0.0
        for tier in self.tiers:
            shares.append(max(tier.survives - covered, 0.0))
            covered = max(covered, tier.survives)
        means = [self.mean_time_between_failures / share if share else math.inf for share in shares]
        return [math.sqrt(2 * tier.save * mean) for tier, mean in zip(self.tiers, means, strict=True)]


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Shares of a run's wall time.

    Attributes:
        days: Wall time.
        failures: Number of failures.
        useful: Share of steps that were kept, at their speed without stragglers: the goodput.
        lost: Share of steps that were computed again.
        saving: Share for which saves stopped training.
        restarting: Share of restarts and restores.
        straggling: Share of waiting for stragglers.
    """

    days: float
    failures: int
    useful: float
    lost: float
    saving: float
    restarting: float
    straggling: float

    def __str__(self) -> str:
        names = ("useful", "lost", "saving", "restarting", "straggling")
        shares = ", ".join(f"{name} {100 * getattr(self, name):.1f} %" for name in names)
        return f"{self.days:.1f} days with {self.failures} failures: {shares}"


def simulate_goodput(
    cluster: Cluster,
    intervals: Sequence[float],
    *,
    days: float = 30.0,
    seed: int = 0,
    failures: Sequence[float] | None = None,
) -> Goodput:
    """Simulates a run with random failures, or with those of a log.

    Args:
        cluster: The hosts, their failures and what they cost.
        intervals: Seconds of training between saves, one for each tier; infinity for a tier that is not used.
        days: Wall time to simulate.
        seed: Seed of the failures, and of which tiers they leave.
        failures: Seconds from the start of the run to each failure, rising, such as those of a log of incidents. The
            default draws them independently of each other with the cluster's mean. A log matters where restarts take
            much of the time: random failures often hit a restart, where they cost less.

    Raises:
        ValueError: when there is not a positive interval for each tier, or failures do not rise.
    """
    if failures is not None and list(failures) != sorted(failures):
        raise ValueError("failures must be rising times in seconds")
    if len(intervals) != len(cluster.tiers) or not all(interval > 0 for interval in intervals):
        raise ValueError(f"there must be a positive interval for each of {len(cluster.tiers)} tiers, got {intervals}")
    random, end, mean = np.random.default_rng(seed), 86_400 * days, cluster.mean_time_between_failures
    logged = None if failures is None else iter(failures)
    now = trained = saving = lost = restarting = 0.0  # seconds
    saved = [0.0] * len(intervals)  # seconds of training that each tier has

    def failure_after(last: float) -> float:
        return last + random.exponential(mean) if logged is None else next(logged, math.inf)

    failure, count = failure_after(0.0), 0

    def fail() -> None:
        """Goes back to the newest checkpoint that is left, and draws the next failure."""
        nonlocal now, trained, lost, restarting, failure, count
        left = random.random()
        n = max((i for i, tier in enumerate(cluster.tiers) if left < tier.survives), key=lambda i: saved[i])
        lost += trained - saved[n]
        trained = saved[n]
        saved[:] = [min(seconds, trained) for seconds in saved]
        count += 1
        begin = failure
        while True:  # another failure during the restart begins it anew
            failure = failure_after(begin)
            needed = cluster.restart + cluster.tiers[n].restore
            if failure >= begin + needed:
                restarting, now = restarting + needed, begin + needed
                return
            restarting, begin, count = restarting + failure - begin, failure, count + 1

    while now < end:
        due = [seconds + interval for seconds, interval in zip(saved, intervals, strict=True)]
        n = min(range(len(due)), key=due.__getitem__)
        until = now + due[n] - trained
        if min(until, end) >= failure:
            trained += failure - now
            fail()
            continue
        if until >= end:
            trained, now = trained + end - now, end
            break
        trained, now = due[n], until
        if now + cluster.tiers[n].save > failure:
            saving += failure - now
            fail()
            continue
        saving, now, saved[n] = saving + cluster.tiers[n].save, now + cluster.tiers[n].save, trained
    useful = trained / cluster.straggling
    shares = [seconds / now for seconds in (useful, lost, saving, restarting, trained - useful)]
    return Goodput(now / 86_400, count, *shares)
