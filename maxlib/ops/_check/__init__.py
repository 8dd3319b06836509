"""The doctor of `python -m maxlib.ops`: what runs here, whether it is right, how fast it is, and its best tiles."""

from maxlib.ops._check.parent import check as check
from maxlib.ops._check.parent import tune as tune
