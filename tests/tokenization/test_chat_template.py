"""Chat templates: output equals that of transformers, from every file that may contain them; unsafe templates fail."""

import json

import jinja2
import pytest

from maxlib.tokenization._chat_template import ChatTemplate

SIMPLE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'joker' %}{{ raise_exception('no ' + message.role) }}{% endif %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {{- '<' + message['role'] + '>' }}
    {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}<assistant>{% endif %}"""
TURNS = [{"role": "user", "content": " 1 < 2? "}, {"role": "assistant", "content": "Ja, größer & <b>"}]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": "<x>"}}}]


def stored(directory, config, template=None):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return ChatTemplate.from_directory(directory)


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}], ids=str)
def test_rendered_as_in_transformers(options):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    names = {"add_generation_prompt": True, "bos_token": "<s>"} | options
    want, _ = utils.render_jinja_template([TURNS], chat_template=SIMPLE, **names)
    assert ChatTemplate(SIMPLE, special_tokens={"bos_token": "<s>"})(TURNS, **options) == want[0]


def test_found_wherever_directories_keep_it(tmp_path):
    short = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "add_bos_token": True}
    want = "<s> 1 < 2? </s>"
    assert stored(tmp_path, tokens | {"chat_template": short})(TURNS) == want
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": short}]
    assert stored(tmp_path, tokens | {"chat_template": named})(TURNS) == want
    assert stored(tmp_path, tokens | {"chat_template": "old"}, template=short)(TURNS) == want


def test_a_directory_without_one_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no chat template, .*pass one as default="):
        stored(tmp_path, {"bos_token": "<s>"})


def test_a_default_serves_a_directory_without_one_and_knows_its_tokens(tmp_path):
    default = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    template = ChatTemplate.from_directory(tmp_path, default=default)
    assert template([{"role": "user", "content": "hi"}]) == "hi</s>" and template.source == default
    (tmp_path / "chat_template.jinja").write_text("own")
    assert ChatTemplate.from_directory(tmp_path, default=default).source == "own"


def test_a_template_refuses_messages():
    with pytest.raises(ValueError, match="refuses these messages: no joker"):
        ChatTemplate(SIMPLE, special_tokens={"bos_token": "<s>"})([{"role": "joker", "content": ""}])


def test_a_template_stays_in_its_sandbox():
    with pytest.raises(jinja2.exceptions.SecurityError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}")(TURNS)
    with pytest.raises(jinja2.exceptions.SecurityError):
        ChatTemplate("{{ messages.append(1) }}")(TURNS)


def test_what_the_model_writes_is_marked():
    chat = [*TURNS, *TURNS]
    template = ChatTemplate(SIMPLE, special_tokens={"bos_token": "<s>"})
    text, spans = template.generated(chat)
    assert text == template(chat, add_generation_prompt=False)
    assert template.marks_generation and not ChatTemplate("{{ messages }}").marks_generation
    assert [text[a:b] for a, b in spans] == [m["content"].strip() for m in chat]
    with pytest.raises(ValueError, match="must not contain the characters"):
        template.generated([{"role": "user", "content": "a\ufdd0"}])
