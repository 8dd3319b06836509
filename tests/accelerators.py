"""Which device tests run on: CPU devices, or with MAXLIB_TEST_PLATFORM=gpu (or tpu), or `-m gpu`, the accelerator here.

Tests with the mark `gpu` or `tpu` are skipped on another platform. Whoever asks for one gets an error where jax finds
none, and a failure where not a single test of that mark ran.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence

VARIABLE = "MAXLIB_TEST_PLATFORM"
ACCELERATORS = ("gpu", "tpu")
INSTALL = {"gpu": "jax[cuda13] on a machine with an NVIDIA GPU", "tpu": "jax[tpu] on a machine with a TPU"}


def asked(arguments: Sequence[str]) -> str:
    """Returns the platform that the environment or pytest's arguments ask for: "cpu", "gpu" or "tpu".

    Raises:
        ValueError: The environment names another one.
    """
    match = re.search(r"(?:^| )-m[ =]?(gpu|tpu)(?: |$)", " ".join(arguments))
    platform = os.environ.get(VARIABLE) or (match[1] if match else "cpu")
    if platform not in ("cpu", *ACCELERATORS):
        raise ValueError(f"{VARIABLE} must be cpu, gpu or tpu, got {platform!r}")
    return platform


PLATFORM = asked(sys.argv[1:])
os.environ[VARIABLE] = PLATFORM  # workers, and processes that tests start, inherit it


def absent(platform: str, device: str) -> str | None:
    """Returns an error message if tests on `platform` are asked for and jax runs on another, `found`."""
    if platform in (device, "cpu"):
        return None
    return (
        f"the tests are to run on a {platform}, but jax runs on {device}: install {INSTALL[platform]} and leave "
        f"JAX_PLATFORMS out, or leave {VARIABLE} and -m {platform} out"
    )


def refused(marks: Sequence[str], platform: str) -> str | None:
    """Returns the reason why a test with these marks does not run on `platform`, or None."""
    wanted = [name for name in ACCELERATORS if name in marks]
    if not wanted or platform in wanted:
        return None
    return f"needs a {' or '.join(wanted)}: {VARIABLE}={wanted[0]}"


class Ran:
    """Counts what ran on an accelerator, by file, and why others did not."""

    def __init__(self, platform: str):
        self.platform, self.counts = platform, Counter()
        self.reasons: Counter[str] = Counter()

    def add(self, report) -> None:
        """Adds a test's report of one phase, if the test has the platform's mark."""
        if self.platform not in report.keywords:
            return
        if report.skipped:
            self.reasons[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)] += 1
        elif report.when == "call":
            self.counts[report.nodeid.partition("::")[0], report.outcome] += 1

    def lines(self, device: str) -> list[str]:
        """Returns what to print at the end."""
        counted = [f"{file}: {count} {outcome} on {device}" for (file, outcome), count in sorted(self.counts.items())]
        skipped = [f"{count} did not run: {reason}" for reason, count in self.reasons.most_common()]
        return [*(counted or [f"not a single test ran on {device}"]), *skipped]
