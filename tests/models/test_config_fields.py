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

LIMITS = {"max_position_embeddings", "tie_word_embeddings"}  # lengths, and ties that the weights decide
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
    names, cfg = set(), read(family, case["config"])
    for field, value in leaves(case["config"]):
        try:
            if read(family, changed(case, field, another(value))["config"]) == cfg:
                names.add(field)
        except (ValueError, TypeError):
            pass
    return names


def of_all(family: str) -> list[str]:
    return sorted(set().union(*(passed_over(family, case) for case in parity.golden(family).values())))


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_only_fields_that_change_nothing_are_passed_over(family):
    assert of_all(family) == json.loads(PATH.read_text()).get(family, [])


def without(config: dict[str, Any], field: str) -> dict[str, Any]:
    name, _, inner = field.partition(".")
    if inner:
        return {**config, name: without(config[name], inner)}
    return {key: value for key, value in config.items() if key != name}


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """Returns all fields that transformers makes of a config."""
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    fields = {name: value for name, value in config.items() if name != "model_type"}
    return json.loads(mapping[config["model_type"]].from_dict(fields).to_json_string(use_diff=False))


@pytest.mark.full
@pytest.mark.parametrize("family", parity.FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(family):
    """Files of transformers leave out fields of nested configs that have the default of their class."""
    compared = 0
    for name, case in parity.golden(family).items():
        for field, _ in leaves(case["config"]):
            config = without(case["config"], field)
            try:
                pair = read(family, config), read(family, completed(config))
            except Exception:  # a size that no longer fits another one
                continue
            compared += 1
            assert pair[0] == pair[1] or field.rpartition(".")[2] in LIMITS, f"{name}: {field}"
    assert compared


@pytest.mark.parametrize(("name", "window"), [("images_causal", 512), ("images_unified", 1024)])
def test_classes_of_a_family_may_have_defaults_of_their_own(name, window):
    config = without(parity.golden("gemma4")[name]["config"], "text_config.sliding_window")
    assert read("gemma4", config).window == window


if __name__ == "__main__":
    listed = {family: names for family in parity.FAMILIES if (names := of_all(family))}
    PATH.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in listed.items()) + "\n}\n")
