"""Chats: only the chosen turns have targets, and errors name the chat."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from maxlib import data, tokenization
from maxlib.tokenization._chat_template import ChatTemplate

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
FORGETS = "{% for m in messages %}{% if loop.last or m.role == 'user' %}<{{ m.role }}>{{ m.content }}</s>{% endif %}{% endfor %}"
CHAT = [
    {"role": "user", "content": "Größe?"},
    {"role": "assistant", "content": "Zwei Äpfel."},
    {"role": "user", "content": "Und?"},
    {"role": "assistant", "content": "日本語 ok"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train_bpe(
        ["the size of the apple"] * 3, vocab_size=280, special_tokens=("<user>", "<assistant>", "</s>")
    )


def tokenized(tokenizer, template=PLAIN, chat=CHAT, **kwargs):
    source = data.in_memory(["x"]).map(lambda _: {"messages": chat})
    return data.tokenize_chats(source, tokenizer, ChatTemplate(template), **kwargs)[0]


def learned(tokenizer, document) -> str:
    return tokenizer.decode([t for t in document["targets"].tolist() if t >= 0], skip_special_tokens=False)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_only_the_chosen_turns_are_learned(tokenizer, template):
    both = tokenized(tokenizer, template)
    assert tokenizer.decode(both["tokens"], skip_special_tokens=False) == ChatTemplate(PLAIN)(
        CHAT, add_generation_prompt=False
    )
    assert learned(tokenizer, both) == "Zwei Äpfel.</s>日本語 ok</s>"
    assert learned(tokenizer, tokenized(tokenizer, template, learn="last")) == "日本語 ok</s>"
    second = lambda i, messages: i == 2
    assert learned(tokenizer, tokenized(tokenizer, template, learn=second)).endswith("Und?</s>")
    at = both["targets"] >= 0
    np.testing.assert_array_equal(both["targets"][:-1][at[:-1]], both["tokens"][1:][at[:-1]])
    assert both["targets"][-1] == -1


GLM = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize("template", [GLM, MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>")])
def test_turns_without_an_end_that_is_learned_are_said(tokenizer, template):
    """As in GLM, where the next turn's role is the end of a turn; no loss would show that a model never stops."""
    with pytest.warns(UserWarning, match="the model does not learn to stop"):
        assert learned(tokenizer, tokenized(tokenizer, template)) == "Zwei Äpfel.日本語 ok"


def test_a_template_gets_the_variables_of_its_chat(tokenizer):
    """`chat_template_kwargs`, as in data for TRL."""
    template = ChatTemplate("{{ 'the size' if enable_thinking else 'of' }}" + PLAIN)
    source = [{"messages": CHAT, "chat_template_kwargs": variables} for variables in ({"enable_thinking": True}, None)]
    thinks, does_not = data.tokenize_chats(data.records(source, field="messages"), tokenizer, template)
    assert tokenizer.decode(thinks["tokens"]).startswith("the size")
    assert tokenizer.decode(does_not["tokens"]).startswith("of")


def test_tools_may_be_json(tokenizer):
    """As in data for TRL."""
    template = ChatTemplate("{% for tool in tools %}{{ tool.name }},{% endfor %}" + PLAIN)
    tools = [{"name": "the size"}, {"name": "of"}]
    source = data.records([{"messages": CHAT, "tools": x} for x in (tools, json.dumps(tools))], field="messages")
    same, written = data.tokenize_chats(source, tokenizer, template)
    np.testing.assert_array_equal(same["tokens"], written["tokens"])


def test_a_turn_may_be_marked_in_pieces(tokenizer):
    pieces = MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}{% generation %}</s>{% endgeneration %}")
    assert learned(tokenizer, tokenized(tokenizer, pieces)) == learned(tokenizer, tokenized(tokenizer, MARKED))
    for options in ({"learn": "last"}, {"turn_weights": True}):
        with pytest.raises(ValueError, match="marks 4 generations, the chat has 2 assistant turns"):
            tokenized(tokenizer, pieces, **options)


@pytest.mark.full
def test_of_the_templates_of_trl_only_that_of_glm_has_turns_without_an_end():
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    special = {name: f"<{name}>" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    endless = set()
    for path in folder.glob("*.jinja"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            data.tokenize_chats(data.in_memory(["x"]), None, ChatTemplate(path.read_text(), special_tokens=special))
        endless |= {path.stem} if said else set()
    assert endless == {"glm4moe"}


def test_learned_turns_survive_packing(tokenizer):
    source = data.in_memory(["x"] * 5).map(lambda _: {"messages": CHAT})
    chats = data.tokenize_chats(source, tokenizer, ChatTemplate(PLAIN))
    want = 5 * int((chats[0]["targets"] >= 0).sum())
    for strategy in ("first_fit", "concat_then_split"):
        rows = list(data.pack(chats, length=24, strategy=strategy))
        assert sum(int((row["targets"] >= 0).sum()) for row in rows) == want


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_turns_have_weights(tokenizer, template):
    chat = [message | {"weight": weight} for message, weight in zip(CHAT, (1, 0.25, 1, 3), strict=True)]
    document = tokenized(tokenizer, template, chat, turn_weights=True)
    plain, at = tokenized(tokenizer, template), document["targets"] >= 0
    np.testing.assert_array_equal(document["targets"], plain["targets"])
    for weight, text in ((0.25, "Zwei Äpfel.</s>"), (3, "日本語 ok</s>")):
        turn = document["targets"][at & (document["loss_weights"] == weight)].tolist()
        assert tokenizer.decode(turn, skip_special_tokens=False) == text
    assert set(document["loss_weights"][~at]) == {0}
    chat[0]["weight"] = None
    chat[1]["weight"] = 0
    assert learned(tokenizer, tokenized(tokenizer, template, chat, turn_weights=True)) == "日本語 ok</s>"
    assert set(tokenized(tokenizer, template, turn_weights=True)["loss_weights"].tolist()) == {0, 1}


def test_weights_of_turns_that_are_not_asked_for_or_are_none(tokenizer):
    chat = [*CHAT[:3], CHAT[3] | {"weight": 0.5}]
    with pytest.raises(ValueError, match="give turn_weights=True, or remove them"):
        tokenized(tokenizer, chat=chat)
    for weight in (-1, "1", float("nan")):
        with pytest.raises(ValueError, match="'weight' must be a finite number of at least 0"):
            tokenized(tokenizer, chat=[*CHAT[:3], CHAT[3] | {"weight": weight}], turn_weights=True)


def test_what_is_no_chat_is_refused(tokenizer):
    with pytest.raises(ValueError, match="'messages' must be a list of objects with a 'role', got"):
        tokenized(tokenizer, chat=["Hello"])
    with pytest.raises(ValueError, match=r"a chat needs 'messages', got \['text'\]"):
        data.tokenize_chats(data.in_memory(["x"]), tokenizer, ChatTemplate(PLAIN))[0]
    with pytest.raises(ValueError, match="the chosen turns have no tokens"):
        tokenized(tokenizer, "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")


def test_from_files_a_record_that_fails_is_named(tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": [*CHAT[:1], {"role": "assistant"}]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chats = data.tokenize_chats(data.chats(path), tokenizer, ChatTemplate(PLAIN))
    assert learned(tokenizer, chats[0]).endswith("ok</s>")
    second = len(json.dumps(lines[0])) + 1
    with pytest.raises(
        ValueError, match=rf"chats.jsonl: byte {second}: .*no turn to learn .* among the roles \['user'\]"
    ):
        chats[1]
    bad = data.SkipBadRecords(limit=1)
    assert [d is not None for d in bad.guard(chats)[:2]] == [True] and len(bad) == 1
    refuses = "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match=r"chats.jsonl: byte 0: .*the chat template refuses these messages: no"):
        data.tokenize_chats(data.chats(path), tokenizer, ChatTemplate(refuses))[0]
    many = data.records([{"messages": [{"role": "user", "content": str(i)}]} for i in range(30)], field="messages")
    train, valid = data.split(many, validation=0.5)
    assert len(list(train)) + len(list(valid)) == 30
    path.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match=r"byte 0: the field 'messages' must hold messages"):
        data.chats(path)


def test_templates_that_cannot_tell_the_turns(tokenizer):
    with pytest.raises(ValueError, match=r"chat 0: .*renders the messages up to 1 differently when more follow"):
        tokenized(tokenizer, FORGETS)
