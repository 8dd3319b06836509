"""Regression tests for the findings of `nox -s fuzz`, and a few inputs of each target."""

import contextlib
import json

import pytest
from etils import epath
from jinja2.exceptions import SecurityError

from maxlib import data, observability
from maxlib._command import main
from maxlib.checkpoint import DamagedError, _lock, _records
from maxlib.inference import stop_tokens
from maxlib.quantization import _files as quantized
from maxlib.tokenization import ChatTemplate, load_tokenizer
from maxlib.weights import _family, files
from tests.fuzz import run, targets
from tests.fuzz.mutate import SNIPPETS

QUICK = {"adapters": 15, "chat_template": 20, "report": 3, "array_record": 20, "plan": 40}
FAST = ("config", "generation", "layouts", "parquet", "quantized", "records", "safetensors")
QUICK |= dict.fromkeys((*FAST, "tokenizer", "tokens_manifest"), 80)


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
def test_damaged_files_end_in_documented_errors(name, tmp_path):
    if name not in run.targets():
        pytest.skip("its package is not installed")
    target, outside, directory = run.targets()[name], tmp_path / "out", tmp_path / "out" / "in"
    (tmp_path / "whole").mkdir()
    # Not `whole_files`, which forks: this process has threads, and its child might wait for ever.
    target.make(tmp_path / "whole")
    undamaged = run.files_in(tmp_path / "whole", target)
    directory.mkdir(parents=True)
    results = [run.limited(run.one, name, target, number, undamaged, directory) for number in range(QUICK[name])]
    assert [wrong for wrong in results if wrong] == []
    assert [p.name for p in outside.iterdir()] == ["in"]


# Limits of time and memory, which tests/tokenization/test_chat_template.py has by default.
UNLIMITED = "9999", "ns.x", "9 ** 9", "macro"


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(snippet, marks=[pytest.mark.full] * any(word in snippet for word in UNLIMITED))
        for snippet in SNIPPETS
    ],
)
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
    config = next(c for name, c in targets.presets().items() if "layer_types" in c)
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": types}))
    with pytest.raises(ValueError, match=r"config\.json"):
        _family.read_model(tmp_path)


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "../model.safetensors", "", "a" * 300, "a/" * 3000])
def test_names_in_an_index_that_no_file_has(name, tmp_path):
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises((ValueError, FileNotFoundError), match=str(tmp_path)):
        files.find_tensors(tmp_path)


@pytest.mark.parametrize("line", ["[" * 9000, '{"text": ' + "9" * 9000 + "}"])
def test_lines_that_json_cannot_hold(line, tmp_path):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"a\.jsonl: byte \d+: each line must be one JSON object"):
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
        ("config.json", rb'{"model": {"name": "\ud800"}}'),
        ("config.json", b"\xcd"),
    ],
)
def test_a_damaged_line_of_a_run_is_left_out(file, line, tmp_path):
    targets.make_report(tmp_path)
    before = str(observability.goodput(tmp_path)), observability.read_jsonl(tmp_path / "metrics.jsonl")
    path = tmp_path / file
    path.write_bytes(line if file == "config.json" else path.read_bytes() + line + b"\n")
    targets.read_report(tmp_path)
    after = str(observability.goodput(tmp_path)), observability.read_jsonl(tmp_path / "metrics.jsonl")
    assert after[0] == before[0] and after[1][: len(before[1])] == before[1]


def test_images_in_layers_without_number(tmp_path):
    config = next(c for name, c in targets.presets().items() if name.startswith("qwen3_vl"))
    vision = config["vision_config"] | {"depth": 10**9, "deepstack_visual_indexes": [10**9]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
    with pytest.raises(ValueError, match=r"config\.json.*deepstack"):  # and not after counting to 10^9
        _family.read_model(tmp_path)


@pytest.mark.parametrize("field", [{"num_hidden_layers": 1 << 70}, {"no_rope_layer_interval": 0}])
def test_sizes_that_no_model_has(field, tmp_path):
    config = targets.presets()["llama4-llama4-17b-16e/config.json"]
    text = {
        name: value for name, value in config["text_config"].items() if name not in ("no_rope_layers", "layer_types")
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text | field}))
    with pytest.raises(ValueError, match=r"config\.json"):
        _family.read_model(tmp_path)


def test_records_nested_too_deeply(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 9000)
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        _records.read(epath.Path(tmp_path / "manifest.json"))


@pytest.mark.parametrize("text", ["[1]", "[" * 9000, "3", ""])
def test_an_owner_that_is_none_does_not_stop_a_run(text, tmp_path):
    (tmp_path / _lock.FILE).write_text(text)
    lock = _lock.RunLock(epath.Path(tmp_path))
    assert lock.taken() is None
    lock.release()


@pytest.mark.parametrize(
    "text", ["{}", "[", "", "\x00", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}']
)
def test_a_tokenizer_that_is_none(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no .*nothing: expected a tokenizer\.json"):
        load_tokenizer(tmp_path / "nothing")


def test_a_tokenizer_that_cannot_encode(tmp_path):
    words = json.loads(targets.tokenizers()["wordpiece/tokenizer.json"])
    del words["model"]["vocab"]["[UNK]"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer that can be used \(.*UNK"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 9000, "\x00", "[1]", '{"eos_token_id": 1, "eos_token_id": 2}', '{"eos_token_id": "x"}']
)
def test_ends_of_texts_that_are_none(text, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        stop_tokens(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"text_config": [1]}')
    with pytest.raises(ValueError, match=r"/config\.json: text_config must be a JSON object, got \[1\]"):
        stop_tokens(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": null}')
    assert stop_tokens(tmp_path) == []


@pytest.mark.parametrize(
    "change", [{"name": ".."}, {"name": ""}, {"name": "../x"}, {"name": "a\0"}, {"documents": 5}, {"bytes": "x"}]
)
def test_a_manifest_of_tokens_that_is_none(change, tmp_path):
    targets.make_tokens_manifest(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    for text in (json.dumps(manifest | {"files": [manifest["files"][0] | change]}), "{}", "[" * 9000):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json"):
            data.read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["a.array_record", "tokens-00000.array_record"])
def test_a_damaged_array_record_is_named(name, tmp_path):
    targets.make_array_record(tmp_path)
    path, num_named = tmp_path / name, 0
    content = path.read_bytes()
    for at in (*range(0, 500, 9), *range(-120, 0, 9)):  # records lie in the first bytes, their index in the last
        at %= len(content)
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with contextlib.suppress(ValueError):
            targets.read_array_record(tmp_path)
            continue
        num_named += 1
        with pytest.raises(ValueError, match=str(tmp_path)):
            targets.read_array_record(tmp_path)
    assert num_named > 0


@pytest.mark.parametrize("at", [3, 30, 100, -30, -6])
def test_a_damaged_parquet_file_is_named(at, tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["one", "two"]}), path, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    for value in range(0, 256, 15):
        content[at] = value
        path.write_bytes(content)
        problem = ""
        try:
            assert [document["text"] for document in data.parquet(path)] == ["one", "two"]
        except ValueError as error:
            problem = str(error)
        assert not problem or "a.parquet" in problem


@pytest.mark.parametrize(
    "change",
    [
        {"formats": {"a": {"weights": "int3"}}},
        {"formats": {"a": {"bits": 4}}},
        {"formats": []},
        {"dtypes": {}},
        {"layouts": {"layers": [[1, "4"]]}},
        {"layouts": {"layers": [[1]]}},
        {"version": 1},
    ],
)
def test_formats_of_weights_that_are_none(change, tmp_path):
    targets.make_quantized(tmp_path)
    path = tmp_path / quantized.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"quantization\.json"):
        quantized._read(path)


def test_an_account_of_no_time(tmp_path):
    line = {"session": 0, "time": 1.0, "at": 0.0, "step": 3, "seconds": {"step": 0}}
    (tmp_path / "goodput.jsonl").write_text(json.dumps(line) + "\n")
    assert "0.0%" in str(observability.goodput(tmp_path))


@pytest.mark.parametrize(
    "words", ["--loss ..x:y", "--loss json:", "--lora rank=x", "--sequence x", "--mesh fsdp=9999999999999"]
)
def test_arguments_of_a_plan_that_are_none(words, capsys):
    try:
        status = main(["plan", "llama3-8b", "--target", "h100x8", *words.split()])
    except SystemExit as error:
        status = error.code
    assert status == 2 and "Traceback" not in capsys.readouterr().err
