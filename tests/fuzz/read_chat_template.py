"""Chat templates, and the files that name special tokens."""

import json
from pathlib import Path

from jinja2.exceptions import SecurityError

from maxlib.tokenization import ChatTemplate
from tests.fuzz.run import Target

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content | trim }}
{%- elif m['role'] == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% else %}
{{ m.content + '!' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def make(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    listed = [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "{{ documents }}"}]
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": listed}))
    names = {"eos_token": {"content": "</s>"}, "extra_special_tokens": {"image_token": "<img>"}}
    (directory / "special_tokens_map.json").write_text(json.dumps(names))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))


def read(directory: Path) -> None:
    if (directory / "tokenizer_config.json").stat().st_size % 2:  # half of them without a file of their own
        (directory / "chat_template.jinja").unlink()
    template = ChatTemplate.from_directory(directory)
    assert len(template(MESSAGES)) <= 1 << 24


# What a template itself says names no file.
KINDS = {"chat_template.jinja": "template", "tokenizer_config.json": "json"}
KINDS |= {"special_tokens_map.json": "json", "config.json": "json"}
TARGET = Target(make, read, KINDS, errors=(ValueError, FileNotFoundError, SecurityError), names_file=False)
