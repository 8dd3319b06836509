"""Implementation of `python -m maxlib.ops`: tests and times the kernels on this machine, and tunes their tiles."""

from maxlib.ops._check.parent import check as check
from maxlib.ops._check.parent import tune as tune
