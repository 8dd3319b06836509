"""Released directories of vision models, as used by the commands and the fine-tuning example."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import maxlib
from maxlib import nn
from maxlib._command import main
from tests.models import parity
from tests.models.image_conformance import IMAGE
from tests.test_examples import example

TEMPLATE = """{% for m in messages %}w1 {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{% if part.type == 'image' %}w60{% else %}{{ part.text }}{% endif %} {% endfor %}{% endif %} w2 {% endfor %}"""
# By family: a case of its tests, and what prepares its images, into at most six squares.
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 24}}
PIXTRAL |= {"image_break_token": "w58", "image_end_token": "w59"}  # of the processor around it
FAMILIES = {
    "gemma4": ("images_shared_clipped", {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 6}),
    "mistral": ("sees", PIXTRAL),
    "mistral4": ("sees", PIXTRAL),
}
TRAINING = ["--steps", 1, "--batch-size", 2, "--length", 24]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory) -> Path:
    """A model that sees with a tokenizer of one word per id, a template and the settings of a processor."""
    name, processor = FAMILIES[request.param]
    case, path = parity.golden(request.param)[name], tmp_path_factory.mktemp(request.param)
    ends = "lm_head.weight", "model.embed_tokens.weight"  # Gemma 4 has no head of its own
    head = next(name for end in ends for name in case["shapes"] if name.endswith(end))
    weights = parity.tensors(case["shapes"])[head]
    weights[IMAGE] = 0  # no placeholder is written
    model = maxlib.from_pretrained(parity.directory(path / "source", case, **{head: weights}))
    maxlib.save_pretrained(model, path / "model")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.cfg.vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "model" / "tokenizer.json"))
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (path / "model" / name).write_text(json.dumps(processor))
    return path / "model"


def chats(path: Path) -> Path:
    """Chats of words."""
    texts = [
        [" ".join(f"w{i}" for i in row) for row in pair] for pair in np.random.RandomState(0).randint(3, 50, (40, 2, 5))
    ]
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in texts]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in turns))
    return path


@pytest.mark.full
def test_the_commands_and_finetuning(capsys, directory, tmp_path):
    """Text is written, converted, counted and trained on."""
    run = lambda *words: (main([str(word) for word in words]), capsys.readouterr())
    model = maxlib.from_pretrained(directory)
    # The text is what the model gives token by token.
    status, said = run("generate", directory, "w3 w4 w5", "--raw", "--tokens", 4, "--json")
    tokens = [3, 4, 5]
    for _ in range(4):
        tokens.append(int(model.logits(model(jnp.asarray([tokens]), dtype=jnp.float32).hidden)[0, -1].argmax()))
    assert status == 0 and json.loads(said.out)["text"].split() == [f"w{i}" for i in tokens[3:]]
    status, said = run("generate", directory, f"w3 w{IMAGE}", "--raw", "--tokens", 4)
    assert status == 2 and "have 1 image placeholders, but the given images make 0" in said.err
    # Everything is counted, the encoder too, and converted with what prepares images.
    status, said = run("inspect", directory, "--json")
    assert status == 0 and json.loads(said.out)["total"]["numbers"] == nn.num_parameters(model)
    status, said = run("convert", directory, tmp_path / "half", "--dtype", "bfloat16")
    assert status == 0 and (tmp_path / "half" / "preprocessor_config.json").exists()
    want, got = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "half"))
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value.astype(got[name].dtype), err_msg=name)
    # Chats of text are trained on; no gradient reaches the encoder, which weight decay shrinks by 2e-6.
    train = ["finetune.py", directory, chats(tmp_path / "text"), "--chats", "--out", tmp_path / "run", *TRAINING]
    assert "A held-out chat: w1" in example(*train)
    tuned = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert tuned.keys() == want.keys()
    for name, value in want.items():
        sees = "vision" in name or "projector" in name
        assert np.allclose(tuned[name], value, rtol=1e-5, atol=0) or not sees, name
    assert any(not np.allclose(tuned[name], value, rtol=1e-5, atol=0) for name, value in want.items())
