"""No field of a config.json is passed over: another value is refused, or makes another configuration.

`passed_over.json` lists by family the fields without effect. `python -m tests.models.test_config_fields` writes it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxlib.weights._hf_config import HARMLESS
from tests.models import parity
from tests.models.conformance import changed, read

OTHERS = {"talker_config", "code2wav_config"}  # models that are not read
PATH = Path(__file__).with_name("passed_over.json")


def leaves(config: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of each field that no family may read as it likes."""
    for name, value in config.items():
        if name in HARMLESS or (name == "model_type" and at):
            continue
        if isinstance(value, dict) and value and name not in OTHERS:
            yield from leaves(value, f"{at}{name}.")
        else:
            yield at + name, value


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, value[0] if value else 0]
    return "another" if isinstance(value, str) else 3


def passed_over(family: str, case: dict[str, Any]) -> set[str]:
    """Returns the fields of a case whose other values change nothing."""
    found, cfg = set(), read(family, case["config"])
    for field, value in leaves(case["config"]):
        try:
            if read(family, changed(case, field, another(value))["config"]) == cfg:
                found.add(field)
        except (ValueError, TypeError):
            pass
    return found


def of_all(family: str) -> list[str]:
    return sorted(set().union(*(passed_over(family, case) for case in parity.golden(family).values())))


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_only_fields_that_change_nothing_are_passed_over(family):
    assert of_all(family) == json.loads(PATH.read_text()).get(family, [])


if __name__ == "__main__":
    listed = {family: names for family in parity.FAMILIES if (names := of_all(family))}
    PATH.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in listed.items()) + "\n}\n")
