"""Layouts for plans, by the names of strategies."""

from collections.abc import Mapping
from typing import Any

from maxlib import sharding


def layout(strategy: Any = "fsdp", *, dcn: Mapping[str, int] | None = None, **degrees: int) -> sharding.Layout:
    """A strategy, or the name of one, over devices that a plan finds."""
    strategy = sharding.preset(strategy) if isinstance(strategy, str) else strategy
    return sharding.Layout({**(degrees or {"fsdp": -1}), "dcn": dcn}, strategy)
