"""What `nox -s fuzz` has found, and some inputs of each of its targets."""

import json

import pytest
from jinja2.sandbox import SecurityError

from maxlib import data, observability
from maxlib.tokenization import ChatTemplate
from maxlib.weights import _family, _files
from tests.fuzz import read_config, read_metrics, run
from tests.fuzz.mutate import SNIPPETS

QUICK = {"adapters": 15, "chat_template": 20, "config": 60, "metrics": 4, "names": 60, "records": 60, "safetensors": 60}


@pytest.mark.parametrize("name", QUICK)
def test_damaged_files_end_in_documented_errors(name, tmp_path):
    target, outside, directory = run.targets()[name], tmp_path / "out", tmp_path / "out" / "in"
    (tmp_path / "whole").mkdir()
    # Not `whole_files`, which forks: this process has threads, and its child might wait for ever.
    target.make(tmp_path / "whole")
    whole = run.files_in(tmp_path / "whole", target)
    directory.mkdir(parents=True)
    found = [run.limited(run.one, name, target, number, whole, directory) for number in range(QUICK[name])]
    assert [wrong for wrong in found if wrong] == []
    assert [p.name for p in outside.iterdir()] == ["in"]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_template_does_no_harm(snippet):
    """It ends soon, with a text of a limited size, a ValueError or one that names the attribute it may not have."""
    try:
        text = ChatTemplate(snippet, seconds=0.3)([{"role": "user", "content": "Hello"}])
    except ValueError as error:
        said = str(error)
    except SecurityError:
        assert "__" in snippet or "append" in snippet
        return
    else:
        said = "the chat template"
        assert len(text) <= 1 << 24 and "root:" not in text
    assert "chat template" in said


@pytest.mark.parametrize("types", [[["a"]], [{}], 10**400, ["full_attention"] * 3])
def test_layer_types_that_are_none(types, tmp_path):
    config = next(c for name, c in read_config.presets().items() if "layer_types" in c)
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": types}))
    with pytest.raises(ValueError, match=r"config\.json"):
        _family.read_model(tmp_path)


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "../model.safetensors", "", "a" * 300, "a/" * 3000])
def test_names_in_an_index_that_no_file_has(name, tmp_path):
    (tmp_path / _files.INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises((ValueError, FileNotFoundError), match=str(tmp_path)):
        _files.find_tensors(tmp_path)


@pytest.mark.parametrize("line", ["[" * 9000, '{"text": ' + "9" * 9000 + "}"])
def test_lines_that_json_cannot_hold(line, tmp_path):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"a\.jsonl: byte 0"):
        data.jsonl(tmp_path / "a.jsonl")[0]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("metrics.jsonl", b"\xff\xfe"),
        ("metrics.jsonl", b'{"step": 3, "loss": "<script>"}'),
        ("metrics.jsonl", b'{"step": 3, "loss": 1' + b"0" * 400 + b"}"),
        ("metrics.jsonl", b'{"step": 3, "moe/load": [[1], [2, 3]]}'),
        ("goodput.jsonl", b"[" * 9000),
        ("goodput.jsonl", b'{"session": 0, "time": 1, "at": 1, "step": {}}'),
        ("samples.jsonl", b'{"step": "x", "text": 3}'),
        ("config.json", b"\xcd"),
    ],
)
def test_a_damaged_line_of_a_run_is_left_out(file, line, tmp_path):
    read_metrics.make(tmp_path)
    before = str(observability.goodput(tmp_path)), observability.read_jsonl(tmp_path / "metrics.jsonl")
    path = tmp_path / file
    path.write_bytes(line if file == "config.json" else path.read_bytes() + line + b"\n")
    read_metrics.read(tmp_path)
    after = str(observability.goodput(tmp_path)), observability.read_jsonl(tmp_path / "metrics.jsonl")
    assert after[0] == before[0] and after[1][: len(before[1])] == before[1]
