"""Chat templates: output equals that of transformers, from every file that may contain them; unsafe templates fail."""

import json
import subprocess
import sys
import threading
import time

import jinja2
import pytest
import tokenizers

from maxlib.tokenization._chat_template import ChatTemplate
from maxlib.tokenization._sandbox import SANDBOX
from tests.tokenization.templates import CHATS, TEMPLATES
from tests.tokenization.templates import TOOLS as SCHEMAS

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


def test_saved_templates_replace_those_that_are_there(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("old")
    ChatTemplate({"default": "plain", "tool_use": "tools"}).save(tmp_path)
    read = ChatTemplate.from_directory(tmp_path)
    assert (read([]), read([], tools=[])) == ("plain", "tools")
    with pytest.raises(ValueError, match="must be one of default, tool_use"):
        read([], chat_template="rag")


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


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_chats_of_every_kind_are_rendered_as_in_transformers(template):
    transformers = pytest.importorskip("transformers")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(template, special_tokens=tokens)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **tokens
    )
    names = {"chat_template": template, "tokenize": False}
    texts = 0
    for kind, chat in CHATS.items():
        for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False, "tools": SCHEMAS}):
            want = rendered(theirs.apply_chat_template, chat, **names, **options)
            assert rendered(ours, chat, **options) == want, kind
            texts += want is not None
    assert texts >= 8


def rendered(render, chat, **options):
    """Returns the text, or None for a template that cannot render the chat."""
    try:
        return render(chat, **options)
    except (ValueError, TypeError, jinja2.exceptions.TemplateError):
        return None


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
SHARED = (
    "{% set ns = namespace(x=[1], y=[1]) %}"
    "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
ATTACKS = {
    "loops": LOOP,
    "output of loops": LOOP.replace("BODY", "{{ 'x' * 9999 }}"),
    "lists in loops": LOOP.replace("BODY", "{% set x = range(99999) | list %}"),
    "a list within lists": SHARED + "{{ ns.x }}",
    "a list within lists as JSON": SHARED + "{{ ns.x | tojson }}",
    "lists within lists compared": SHARED + "{{ ns.x == ns.y }}",
    "digits": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "sorting": "{{ ((range(99999) | list) * 99) | sort | length }}" * 9,
    "stripping": "{{ ('a' * 9999999).strip('b' * 9999999 + 'a') }}",
    "replacing": "{{ ('x' * 999) | replace('x', 'y' * 999999) }}",
    "joining": "{{ (['x'] * 99999) | join('y' * 99999) }}",
    "text of a list": "{{ ['x' * 99999] * 99999 }}",
    "a width of %": "{{ '%*d' % (999999999, 1) }}",
    "a width of format": "{{ '{:{}}'.format(1, 999999999) }}",
    "a width of ljust": "{{ 'x'.ljust(999999999) }}",
    "indented JSON": "{{ messages | tojson(indent=999999999) }}",
    "too many characters": "{{ 'x' * 16777217 }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "parentheses": "{{ " + "(" * 9999 + ")" * 9999 + " }}",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_time_and_memory_are_bounded_whatever_a_template_does(attack):
    begin = time.monotonic()
    with pytest.raises(ValueError, match="the chat template (took|takes|makes|calls|is not one|ended|cannot)"):
        ChatTemplate(attack, seconds=0.05)(TURNS)
    assert time.monotonic() - begin < 20  # much more than 0.05 s, because other processes may be at work
    assert ChatTemplate("{{ messages[0].role }}")(TURNS) == "user"  # and the next one works


def test_threads_get_their_own_texts_and_an_interruption_does_no_harm(monkeypatch):
    template, texts = ChatTemplate("{{ n }}"), [""] * 400

    def run(start):
        for n in range(start, 400, 8):
            texts[n] = template([], n=n)

    threads = [threading.Thread(target=run, args=(start,)) for start in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert texts == [str(n) for n in range(400)]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(SANDBOX, "_ask", interrupted)
        template([], n="the answer that nobody reads")
    assert template([], n=1) == "1"


def interrupted(request):
    SANDBOX._connection.send_bytes(request)
    raise KeyboardInterrupt


FORK = """
import os
from maxlib.tokenization import ChatTemplate
template = ChatTemplate("{{ n }}")
child = os.fork()
for n in range(200):
    assert template([], n=(n, child)) == str([n, child])
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both")
"""


def test_a_fork_renders_in_a_process_of_its_own():
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("both\n", "")


def test_values_that_are_no_schemas_are_refused():
    with pytest.raises(ValueError, match="the JSON schema of a tool, got <function"):
        ChatTemplate("{{ tools }}")(TURNS, tools=[stored])


@pytest.mark.parametrize("content", [" half a ", [{"type": "text", "text": "half a "}, {"type": "image"}]])
def test_the_last_message_is_continued_as_in_transformers(content):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    chat = [*TURNS, {"role": "assistant", "content": content}]
    for template in (TEMPLATES["parts"], "{% for m in messages %}{{ m.content }}{% endfor %}"):
        options = {"bos_token": "<s>", "continue_final_message": True}
        want, _ = utils.render_jinja_template([chat], chat_template=template, **options)
        assert ChatTemplate(template)(chat, **options) == want[0]
    with pytest.raises(ValueError, match="a template that writes the last message"):
        ChatTemplate("{{ messages[0].content }}")(chat, continue_final_message=True)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_is_continued_as_in_transformers(name):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    chat = [*TURNS, {"role": "assistant", "content": "", name: "half a "}]
    template = "{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }};{% endfor %}"
    want, _ = utils.render_jinja_template([chat], chat_template=template, continue_final_message=name)
    assert ChatTemplate(template)(chat, continue_final_message=name) == want[0]
    for messages in ([], TURNS):
        with pytest.raises(ValueError, match="continue_final_message needs"):
            ChatTemplate(template)(messages, continue_final_message=name)
