"""Cards of model families: the documentation's facts are read from the models."""

import itertools
import re
import runpy
from pathlib import Path

import pytest

from maxlib import nn, plan, sharding, weights
from maxlib.models.__main__ import row

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


def number_of_fewest(preset, layout):
    """Tries 1, 2, 4, ..., where `cards.fewest` computes where to look."""
    jobs = (plan.Job(preset, f"h100x{2**i}", layout=layout, sequence=4096) for i in itertools.count())
    return next(found.target.devices for found in map(plan.estimated, jobs) if found.fits)


@pytest.mark.parametrize("preset", ["apertus-8b", pytest.param("glm-4.5-air", marks=pytest.mark.full)])
def test_the_fewest_gpus_are_those_of_a_search_one_by_one(cards, preset):
    layout = sharding.Layout({"fsdp": -1}, sharding.FSDP)
    assert cards["fewest"](preset, layout, 4096).target.devices == number_of_fewest(preset, layout) > 1


@pytest.mark.full
def test_experts_that_no_gpu_gathers_are_split(cards):
    (family,) = (family for family in weights.families() if family.name == "mimo_v2")
    assert cards["fewest"]("mimo-v2-flash", sharding.Layout({"fsdp": -1}, sharding.FSDP), 4096) is None
    found, options = cards["trained"](family, "mimo-v2-flash")
    assert "the weights split over `fsdp` and `expert`" in cards["memory"](found)
    assert "--mesh fsdp=-1,expert=8 --strategy fsdp+ep" in options


def test_cards_are_made_anew_when_their_program_changes(cards, tmp_path, monkeypatch):
    started = []
    monkeypatch.setitem(cards["write"].__globals__, "HERE", tmp_path)
    monkeypatch.setattr(cards["subprocess"], "run", lambda command, check: started.append(command[2]))
    for text in ("a", "a", "b"):
        (tmp_path / "cards.py").write_text(text)
        monkeypatch.setitem(cards["write"].__globals__, "__file__", str(tmp_path / "cards.py"))
        cards["write"](tmp_path / "code")
        Path(started[-1]).mkdir(exist_ok=True)
    assert len(started) == len(set(started)) == 2


@pytest.mark.full
def test_a_card_has_sizes_memory_and_a_picture(cards):
    (family,) = (family for family in weights.families() if family.name == "mixtral")
    text = cards["card"](family)
    on_hub = "[mistralai/Mixtral-8x7B-v0.1](https://huggingface.co/mistralai/Mixtral-8x7B-v0.1)"
    assert f"| `mixtral-8x7b` | {on_hub} | 46.70B, 12.88B active | 87.0 | GQA | full |" in text
    assert 'from_pretrained("mistralai/Mixtral-8x7B-v0.1")' in text and "../guides/change-a-model.md" in text
    assert "32 \N{MULTIPLICATION SIGN} Block" in text and 'model_type` `"mixtral"`' in text
    # 16 bytes for each of 46.7 billion parameters are 747 GB: 16 GPUs of 80 GB, once a step has room too.
    assert "fits on 16 H100s" in text


OTHERS = [family.name for family in weights.families() if family.presets and family.name != "gpt2"]


def smallest(family) -> str:
    return min((row(family, preset) for preset in family.presets), key=lambda found: found.total).preset


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)])
def test_a_small_model_without_the_hub_runs_is_saved_and_loaded(cards, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (family,) = (family for family in weights.families() if family.name == name)
    (code,) = re.findall(r"^```python\n(.*?)^```$", cards["without_hub"](family, smallest(family)), re.S | re.M)
    names: dict = {}
    exec(code, names)
    assert capsys.readouterr().out == f"(1, 3, {names['cfg'].vocab})\n"
    assert nn.num_parameters(names["model"]) < 1e8 and names["model"].cfg == names["cfg"]


@pytest.mark.full
def test_every_family_has_a_small_model(cards):
    found = {family.name: cards["narrow"](family, smallest(family)) for family in weights.families() if family.presets}
    assert len(found) > 30 and [name for name, sizes in found.items() if not sizes] == []


def test_every_family_with_presets_has_prose_and_a_row_in_the_guide():
    names = {family.name for family in weights.families() if family.presets}
    guide = (ROOT / "docs" / "guides" / "models.md").read_text()
    assert names == {path.stem for path in (ROOT / "docs" / "families").glob("*.md")}
    assert [name for name in sorted(names) if f"(../families/{name}.md)" not in guide] == []


def test_prose_precedes_the_picture(cards):
    made_of = cards["MADE_OF"]
    text = cards["with_prose"](f"# Mixtral\n\n{made_of}\n\npicture\n", "mixtral")
    assert text.index("router_aux_loss_coef") < text.index(made_of) and "# Mixtral\n\n## What is special\n" in text
