"""generation_config.json and config.json: the ids that end a text."""

import json
from pathlib import Path

from maxlib.inference import stop_tokens
from tests.fuzz.run import Target


def make(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [1, 2], "text_config": {"eos_token_id": 3}}))
    fields = {"eos_token_id": [2, 106], "do_sample": True, "temperature": 0.6, "transformers_version": "5.0.0"}
    (directory / "generation_config.json").write_text(json.dumps(fields))


def read(directory: Path) -> None:
    assert all(type(i) is int for i in stop_tokens(directory))


TARGET = Target(make, read, {"generation_config.json": "json", "config.json": "json"})
