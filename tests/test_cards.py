"""Cards of model families: what the documentation says of each is read off the model."""

import runpy
from pathlib import Path

import pytest

from maxlib import weights

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cards():
    return runpy.run_path(str(ROOT / "docs" / "_extension" / "cards.py"))


def test_families_have_their_rows_of_parity(cards):
    table = (ROOT / "docs" / "models.md").read_text().partition("<!-- begin parity -->")[2]
    names = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")}
    names -= {"family", "---"}
    assert len(names) > 20
    for name in names:
        rows = [line for line in cards["parity"](name).splitlines() if line.startswith("| ")]
        assert len(rows) > 2, name
    assert cards["parity"]("nothing") == ""


@pytest.mark.full
def test_a_card_has_sizes_memory_and_a_picture(cards):
    (family,) = (family for family in weights.families() if family.name == "mixtral")
    text = cards["card"](family)
    assert "| `mixtral-8x7b` | 46.70B, 12.88B active | 87.0 | GQA | full |" in text
    assert "32 \N{MULTIPLICATION SIGN} Block" in text and 'model_type` `"mixtral"`' in text
    # 16 bytes for each of 46.7 billion parameters are 747 GB: 16 GPUs of 80 GB, once a step has room too.
    assert "takes 16 H100s" in text
