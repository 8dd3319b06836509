"""Models on the hub, against a local server, because tests have no network."""

import json
import sys

import jax
import numpy as np
import pytest

import maxlib
from maxlib import nn, weights
from tests.weights import hub_server
from tests.weights.test_pretrained import CFG, build

huggingface_hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")
NAME = "tester/tiny-llama"


@pytest.fixture(scope="module")
def model():
    return build(CFG)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, with an empty cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with hub_server.serve() as (address, hub):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def upload(hub, model, directory, **options):
    maxlib.save_pretrained(model, directory, **options)
    hub.models[NAME] = {path.name: path.read_bytes() for path in directory.iterdir()}
    hub.models[NAME] |= {"pytorch_model.bin": b"pickle", "modeling_tiny.py": b"raise SystemExit", "photo.png": b"0"}


def assert_same(ours, theirs):
    a, b = ({path: v.get_value() for path, v in nn.variables(m).items()} for m in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_name_loads_what_a_directory_does(hub, model, tmp_path):
    upload(hub, model, tmp_path / "export", max_shard_bytes=4000)  # one file in the tests below
    assert_same(maxlib.from_pretrained(NAME), model)
    got = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "/resolve/" in line}
    assert "config.json" in got and any(name.endswith(".safetensors") for name in got)
    assert not got & {"pytorch_model.bin", "modeling_tiny.py", "photo.png"}


def test_what_the_cache_holds_needs_no_hub(hub, model, tmp_path, monkeypatch):
    upload(hub, model, tmp_path / "export")
    directory = weights.download(NAME)
    hub.asked.clear()
    assert weights.download(NAME, revision=hub_server.COMMIT) == directory
    assert not [line for line in hub.asked if "/resolve/" in line]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_same(maxlib.from_pretrained(NAME), model)
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE") as error:
        maxlib.from_pretrained("tester/other")
    assert "no directory 'tester/other' here" in error.value.__notes__[0]


def test_revisions_and_tokens(hub, model, tmp_path):
    upload(hub, model, tmp_path / "export")
    hub.gated.add(NAME)
    with pytest.raises(errors.GatedRepoError):
        maxlib.from_pretrained(NAME)
    hub.tokens.add("hf_good")
    assert_same(maxlib.from_pretrained(NAME, revision="v1", token="hf_good"), model)
    with pytest.raises(errors.RevisionNotFoundError):
        maxlib.from_pretrained(NAME, revision="v9", token="hf_good")


def test_what_is_no_model_is_said(hub, model, tmp_path):
    with pytest.raises(errors.RepositoryNotFoundError) as error:
        maxlib.from_pretrained("nobody/nothing")
    assert "no directory 'nobody/nothing' here" in error.value.__notes__[0]
    upload(hub, model, tmp_path / "export")
    del hub.models[NAME]["model.safetensors"]
    with pytest.raises(ValueError, match=r"lacks model.safetensors. maxlib reads no pickles"):
        maxlib.from_pretrained(NAME)
    hub.models["tester/strange"] = {"model.safetensors.index.json": json.dumps({"weight_map": {"w": "../*"}}).encode()}
    with pytest.raises(ValueError, match=r"must name safetensors files beside it, got '\.\./\*'"):
        weights.download("tester/strange")
    hub.down = True
    with pytest.raises(FileNotFoundError, match="503"):
        maxlib.from_pretrained("tester/other")
    with pytest.raises(ValueError, match="revision= is for models on the hub"):
        maxlib.from_pretrained(tmp_path / "export", revision="main")


@pytest.mark.parametrize("has_card", [False, True])
def test_what_is_pushed_comes_back_with_a_card(hub, model, has_card):
    card = huggingface_hub.ModelCard("---\nlicense: apache-2.0\n---\nMade by a test.") if has_card else True
    address = maxlib.push_to_hub(model, NAME, token="hf_good", model_card=card, message="first")
    assert hub_server.COMMIT in address and hub.commits[0]["summary"] == "first"
    assert_same(maxlib.from_pretrained(NAME), model)
    card = huggingface_hub.ModelCard(hub.models[NAME]["README.md"].decode())
    if has_card:
        assert card.data.license == "apache-2.0" and "Made by a test." in card.text
    else:
        assert card.data.library_name == "transformers" and card.data.tags == ["maxlib"]
        assert "# tiny-llama" in card.text and "`LlamaForCausalLM`" in card.text


def test_without_huggingface_hub_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'maxlib\[hub\]'"):
        maxlib.from_pretrained("org/name")


def test_of_several_hosts_the_first_uploads(hub, model, monkeypatch):
    monkeypatch.setattr("maxlib.weights._family.jax.process_index", lambda: 1)
    monkeypatch.setattr("maxlib.weights._family.save_pretrained", lambda *_, **__: None)
    assert maxlib.push_to_hub(model, NAME, token="hf_good") is None
    assert not hub.models and not hub.commits
