"""Presets are what released config.json files say: `released/NAME.json`, `NAME@SPELLING.json` for another spelling."""

import json
from pathlib import Path

import pytest

from maxlib import weights
from maxlib.weights import HFConfig

RELEASED = sorted((Path(__file__).parent / "released").glob("*.json"))
PREDICTIONS = "num_nextn_predict_layers", "mtp_num_hidden_layers"  # of tokens after the next one


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_presets_are_what_the_releases_say(path):
    name = path.stem.partition("@")[0]
    family = next(family for family in weights.families() if name in family.presets)
    config = json.loads(path.read_text())
    fields = HFConfig(config)
    cfg = family.fields.read(fields)
    assert cfg == family.presets[name]
    fields.done()
    if hasattr(cfg, "stored_mtp"):
        said = config | config.get("text_config", {})
        assert cfg.stored_mtp == next((said[key] for key in PREDICTIONS if key in said), 0)
