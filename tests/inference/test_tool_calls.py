"""Tool calls that the families' own chat templates write are read back; malformed ones are errors."""

import importlib.util
import json
from pathlib import Path

import pytest

from maxlib.inference import ParsedAnswer, ToolCall, parse_tool_calls, tool_call_format
from maxlib.tokenization import ChatTemplate

TRL = importlib.util.find_spec("trl")  # only its templates are read: to import it takes seconds
if TRL is None or TRL.origin is None:
    pytest.skip("TRL has the templates", allow_module_level=True)
TEMPLATES = Path(TRL.origin).parent / "chat_templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds a text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "The text."},
                    "most": {"type": "integer", "description": "How many."},
                    "where": {"type": "object", "description": "Fields."},
                },
                "required": ["text"],
            },
        },
    }
]
CALLS = [
    ToolCall("find", {"text": 'a "quote", </tool_call>\n{brace}', "most": 3}),
    ToolCall("find", {"text": "7", "where": {"id": [1, None], "ok": True}}),
]


def test_the_format_is_that_of_the_template_for_tools():
    """A directory may have two, of which the default has no calls."""
    plain, with_tools = "{{ messages[0].content }}", (TEMPLATES / "qwen2_5.jinja").read_text()
    template = ChatTemplate({"default": plain, "tool_use": with_tools}, special_tokens={"eos_token": "</s>"})
    assert tool_call_format(template.tool_source) == "hermes" and ChatTemplate(plain).tool_source == plain


@pytest.mark.parametrize(
    ("name", "format", "count", "end"),
    [
        ("qwen2_5", "hermes", 2, "<|im_end|>"),
        ("qwen3", "hermes", 2, "<|im_end|>"),
        ("qwen3_5_think", "hermes", 2, "<|im_end|>"),
        ("llama3_1", "llama3", 1, "<|eot_id|>"),
        ("deepseekv3", "deepseek", 2, "<｜end▁of▁sentence｜>"),
        ("gptoss", "gpt-oss", 1, "<|call|>"),
    ],
)
def test_what_a_template_writes_is_read(name, format, count, end):
    source = (TEMPLATES / f"{name}.jinja").read_text()
    assert tool_call_format(source) == format
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    question = [{"role": "user", "content": "Where?"}]
    # DeepSeek's template joins strings: its arguments are JSON already.
    calls = [
        {
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments) if format == "deepseek" else call.arguments,
            },
        }
        for call in CALLS[:count]
    ]
    options = {} if format == "deepseek" else {"tools": TOOLS}
    prompt = template(question, **options)
    content = "I look." if format == "deepseek" else ""
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    text = template([*question, message], add_generation_prompt=False, **options)
    shared = next(i for i in range(len(prompt), -1, -1) if text.startswith(prompt[:i]))
    answer = text[shared:].split(end)[0] if format == "deepseek" else text[shared:].strip().removesuffix(end)
    got = parse_tool_calls(answer.removeprefix("<｜Assistant｜>"), format, tools=TOOLS)
    assert got.tool_calls == CALLS[:count] and got.content == content


def test_the_rest_of_an_answer_stays_and_reasoning_holds_no_calls():
    call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    assert parse_tool_calls(f"<think>\n{call}?\n</think>\n\nI look.\n{call}", "hermes") == ParsedAnswer(
        "I look.", [ToolCall("find", {})], f"{call}?"
    )
    harmony = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert parse_tool_calls(harmony, "gpt-oss") == ParsedAnswer("Yes.", [], "Hm.")
    assert parse_tool_calls('{"city": "Ulm"}', "llama3") == ParsedAnswer('{"city": "Ulm"}', [])
    two = '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}'
    assert parse_tool_calls(two, "llama3").tool_calls == [ToolCall("a", {}), ToolCall("b", {"x": 1})]


def test_newer_deepseek_calls_are_read():
    v31 = 'Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"most": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    assert parse_tool_calls(v31, "deepseek") == ParsedAnswer("Wait.", [ToolCall("find", {"most": 2})])
    v32 = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="text" string="true">7'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="most" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    )
    assert parse_tool_calls(v32, "deepseek").tool_calls == [ToolCall("find", {"text": "7", "most": 7})]


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ('<tool_call>\n{"name": "find", "argum', "hermes"),
        ('<tool_call>{"name": "find", "arguments": [1]}</tool_call>', "hermes"),
        ("<tool_call>[1]</tool_call>", "hermes"),
        ('<tool_call>{"name": "find", "arguments": "{"}</tool_call>', "hermes"),
        ("<tool_call><function=find><parameter=text>a", "hermes"),
        ('<｜DSML｜function_calls><｜DSML｜invoke name="find">', "deepseek"),
        ('<tool_call>{"name": "find", "arguments": {"text": NaN}}</tool_call>', "hermes"),
        ("<|python_tag|>search.call(query=1)", "llama3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{", "deepseek"),
        ("<|channel|>commentary to=functions.find<|message|>nonsense<|call|>", "gpt-oss"),
    ],
)
def test_malformed_calls_are_errors(text, format):
    with pytest.raises(ValueError, match="tool call"):
        parse_tool_calls(text, format)


@pytest.mark.parametrize(
    ("schema", "written", "want"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "7", "7"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"type": ["string", "null"]}, '"quoted"', '"quoted"'),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "number"]}, "7", 7),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "integer"}, "7", 7),
        ({}, "7", 7),
        ({}, "NaN", "NaN"),
        ({"type": "number"}, "-Infinity", "-Infinity"),
        ({"type": 5, "anyOf": [3], "enum": 1}, "7", 7),
    ],
    ids=str,
)
def test_a_written_parameter_has_a_type_of_its_schema(schema, written, want):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    text = f"<tool_call><function=f><parameter=x>\n{written}\n</parameter></function></tool_call>"
    (call,) = parse_tool_calls(text, "hermes", tools=tools).tool_calls
    assert call.arguments == {"x": want}
