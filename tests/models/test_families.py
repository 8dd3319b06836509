"""Families whose cases are all that is special about them: a row of `families.json` is a class of conformance tests.

    "TestArcee": {"family": "arcee", "config": "ArceeConfig", "cases": {"untied": {"vocab_size": 53}}, "matters": ...}

is `class TestArcee(Conformance)` with these attributes, but `base` is what a row changes of the usual one, and
`sizes` stand instead of it; `experts` are split over data; a family of `one_spelling` has no older one to read; `full`
tests run by default for a relative. A family with tests of its own has a file.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.conformance import BASE, Conformance

PATH = Path(__file__).with_name("families.json")


def conformance(name: str, row: dict[str, Any]) -> type[Conformance]:
    attributes = row | {"__doc__": row["about"], "__module__": __name__}
    attributes["base"] = row.get("sizes", BASE) | row.get("base", {})
    attributes["windows"] = {case: set(slots) for case, slots in row.get("windows", {}).items()}
    if row.get("experts"):
        attributes["rules"] = Conformance.rules | {"expert": "data"}
    if row.get("one_spelling"):
        attributes["test_both_spellings_are_read"] = None
    tests = type(name, (Conformance,), attributes)
    return pytest.mark.full(tests) if row.get("full") else tests


globals().update({name: conformance(name, row) for name, row in json.loads(PATH.read_text()).items()})
