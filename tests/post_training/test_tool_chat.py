"""Chats with tools: exact tokens of every turn, results and errors of tools, and their descriptions."""

import pytest

from maxlib import inference, tokenization
from maxlib import post_training as pt

TEMPLATE = tokenization.ChatTemplate(
    "{% for t in tools or [] %}<tools>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def divide(a: float, b: float = 1.0) -> float:
    """Divides a by b."""
    return a / b


def greet(name: str | None, times: int, many: list[int], loud: bool) -> str:
    return f"hello {name}"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train_bpe(["what is 6 / 3?"], vocab_size=300, special_tokens=("<|im_start|>", "<|im_end|>"))


def chat(tokenizer, template=TEMPLATE, **options):
    end = [tokenizer.token_to_id("<|im_end|>")]
    settings = {"tokenizer": tokenizer, "template": template, "stop_token_ids": end} | options
    score = lambda messages: float(messages[-1]["content"] == "2.0")
    return pt.ToolChat([{"role": "user", "content": "what is 6 / 3?"}], [divide, greet], score, **settings)


def call(text):
    return f"<tool_call>{text}</tool_call><|im_end|>"


def test_turns_extend_the_exact_tokens(tokenizer):
    environment = chat(tokenizer)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    first = environment.reset()
    assert tokenizer.decode(first.tokens, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    # An encoding of the same text that the tokenizer itself would not choose.
    text = 'so: <tool_call>{"name": "divide", "arguments": {"a": 6, "b": 3}}</tool_call>'
    sampled = [token for letter in text for token in encode(letter)] + encode("<|im_end|>")
    second = environment.step(sampled)
    assert second.tokens[: len(first.tokens) + len(sampled)] == [*first.tokens, *sampled]
    added = tokenizer.decode(second.tokens[len(first.tokens) + len(sampled) :], skip_special_tokens=False)
    assert added == "\n<|im_start|>tool\n2.0<|im_end|>\n<|im_start|>assistant\n"
    assert environment.reward() == 1.0  # the tool's result, until the model says something else
    assert environment.step(encode("it is 2<|im_end|>")) is None and environment.reward() == 0.0
    assert [message["role"] for message in environment.messages] == ["user", "assistant", "tool", "assistant"]
    assert environment.messages[1]["content"] == "so:"
    called = environment.messages[1]["tool_calls"][0]["function"]
    assert called == {"name": "divide", "arguments": {"a": 6, "b": 3}}
    turns = [
        (first, inference.Completion(sampled, [-1.0] * len(sampled), "stop")),
        (second, inference.Completion([1], [-1.0], "stop")),
    ]
    assert len(pt.join_turns(turns)) == 1


def test_errors_are_results_of_tools(tokenizer):
    environment = chat(tokenizer)
    environment.tools["greet"] = lambda: {1}
    environment.reset()
    calls = {
        '{"name": "divide", "arguments": {"a": 1, "b": 0}}': "error: ZeroDivisionError: division by zero",
        '{"name": "divide", "arguments": {"c": 1}}': "error: TypeError: divide() got an unexpected keyword argument 'c'",
        '{"name": "power", "arguments": {}}': "error: there is no tool power; there are divide, greet",
        '{"name": "divide"': "error: a tool call must be JSON",
        '{"name": "greet", "arguments": {}}': "error: TypeError: Object of type set is not JSON serializable",
    }
    for text, message in calls.items():
        environment.step(tokenizer.encode(call(text), add_special_tokens=False).ids)
        assert environment.messages[-1]["content"].startswith(message)


def test_tools_are_described_by_their_hints():
    described = pt.json_schema(divide)["function"]
    assert described["name"] == "divide" and described["description"] == "Divides a by b."
    numbers = {"a": {"type": "number"}, "b": {"type": "number"}}
    assert described["parameters"] == {"type": "object", "properties": numbers, "required": ["a"]}
    kinds = {name: x["type"] for name, x in pt.json_schema(greet)["function"]["parameters"]["properties"].items()}
    assert kinds == {"name": "string", "times": "integer", "many": "array", "loud": "boolean"}
    with pytest.raises(ValueError, match=r"but x of <lambda> has None"):
        pt.json_schema(lambda x: x)


def test_templates_that_do_not_suit_are_refused(tokenizer):
    with pytest.raises(ValueError, match="does not show how it writes tool calls"):
        chat(tokenizer, tokenization.ChatTemplate("{{ messages }}"))
    changes = tokenization.ChatTemplate(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    environment = chat(tokenizer, changes, format="hermes")
    environment.reset()
    with pytest.raises(ValueError, match="must write a turn in the same way with and without"):
        environment.step(
            tokenizer.encode(call('{"name": "divide", "arguments": {"a": 1}}'), add_special_tokens=False).ids
        )
