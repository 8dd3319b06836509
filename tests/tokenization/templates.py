"""Chat templates in the manner of published ones, and chats of every kind that they meet."""

TEMPLATES = {
    "turns with tools": """{%- if tools %}{{- '<|start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "Tools:\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|start|>system\\n' + messages[0].content + '<|end|>\\n' }}{%- endif %}
{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi and message.role == "user" and message.content is string
    and not(message.content.startswith('<result>') and message.content.endswith('</result>')) %}
{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}
{{- '<|start|>' + message.role + '\\n' + content + '<|end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|start|>' + message.role + '\\n' }}{%- generation %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}{%- for call in message.tool_calls %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '\\n<call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}{{- '}\\n</call>' }}
{%- endfor %}{{- '<|end|>\\n' }}{%- endgeneration %}
{%- elif message.role == 'tool' %}{{- '\\n<result>\\n' ~ content ~ '\\n</result>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}""",
    "headers and a date": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|header|>system<|/header|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- system_message ~ eos_token }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + (message['content'] | string | trim) + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" + eos_token }}
    {%- else %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}
""",
    "instructions": """{{ bos_token }}{% set ns = namespace(index=0, system='') %}
{% for message in messages %}
{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% continue %}{% endif %}
{% if message['role'] == 'user' %}
[INST] {% if loop.last and ns.system %}{{ ns.system + '\\n\\n' }}{% endif %}{{ message['content'] }} [/INST]
{%- set ns.index = ns.index + 1 %}
{% elif message['role'] == 'assistant' and message['content'] is defined %} {{ message['content'] | trim }}{{ eos_token }}
{%- endif %}{% endfor %}{{ '%d turns, %s' % (ns.index, 'ja' if ns.index > 1 else 'nein') }}""",
    "parts": """{%- macro part(item) -%}
{%- if item.type == 'image' %}<img>{%- elif item.type == 'text' %}{{ item.text | trim }}{%- endif %}
{%- endmacro %}{{ bos_token }}
{%- for message in messages -%}{%- set role = 'model' if message.role == 'assistant' else message.role -%}
<turn>{{ role }}
{% if message.content is string %}{{ message.content | trim }}
{%- elif message.content is iterable %}{%- for item in message.content %}{{ part(item) }}{%- endfor %}{% endif %}</turn>
{% endfor %}{%- if add_generation_prompt -%}<turn>model
{% endif -%}""",
    "schemas": """{%- macro typed(spec) %}{%- if spec.type == 'array' %}{{- typed(spec['items']) + '[]' }}
{%- else %}{{- spec.type | default('any', true) }}{%- endif %}{%- endmacro %}
{%- if tools %}{%- for tool in tools | selectattr('type', 'equalto', 'function') %}{%- set f = tool.function %}
{{- '## ' ~ f.name | upper ~ ' ' ~ f.get('description', '') | replace('"', "'") }}
{%- for name, spec in f.parameters.properties | dictsort %}
{{- '\\n- %s: %s%s' | format(name, typed(spec), ' (needed)' if name in f.parameters.required else '') }}
{%- if spec.enum %}{{- ' of ' + spec.enum | map('string') | join(', ') }}{%- endif %}{%- endfor %}{{- '\\n' }}
{%- endfor %}{%- endif %}
{%- for group in messages | groupby('role') %}{{ group.grouper }}={{ group.list | length }};{% endfor %}
{%- for m in messages %}{{ "{:>9}|{}".format(m.role, loop.cycle('a', 'b')) }}{{ m.content | string | length }}
{%- for call in m.tool_calls or [] %}{%- for key, value in call.function.arguments.items() %}
{{- '\\n<' ~ key ~ '>' ~ (value if value is string else value | tojson(separators=(',', ':'), sort_keys=true)) ~ '</' ~ key ~ '>' }}
{%- endfor %}{%- endfor %}{{ m }}{% if not loop.last %}{{ '\\n' * 2 }}{% endif %}{% endfor %}""",
    "whole messages": "{{ messages | tojson }}{{ tools }}{{ messages[-1].items() | list }}{{ missing }}{{ messages[0].missing }}",
}
PROPERTIES = {
    "city": {"type": "string", "enum": ["Köln", "東京"]},
    "days": {"type": "array", "items": {"type": "integer"}},
    "any": {},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'the "weather"\n',
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
]


def call(arguments):
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def asked(content, answer="Ja."):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


SYSTEM = {"role": "system", "content": " Be brief.\n"}
CHATS = {
    "turns": [SYSTEM, *asked(" Hello? "), *asked("a < b & 'c'", "  x\n"), {"role": "user", "content": "more"}],
    "digits": [
        *asked('Parse {"phone": 5551234567}'),
        *asked("int f() { return 12345678; } {0:99999999} %9999999d", "{{ x }}"),
    ],
    "numbers": [
        *asked("when?"),
        call({"id": 1 << 62, "time": 1732800000000, "x": -1e30, "y": 0.1, "z": None, "w": True}),
    ],
    "results": [
        *asked("?"),
        call({"city": "Köln", "days": [1, 2]}),
        {"role": "tool", "content": '{"t": [21.5, "°C"]}'},
    ],
    "unicode": [*asked("e\u0301 \u200d 👩‍👩‍👧 \u2028 \ud800 \x00 \r\n\t", "<|end|>\\n"), SYSTEM],
    "reasoning": [
        *asked("?", "<think>\nso\n</think>\n\nYes"),
        {"role": "assistant", "content": "b", "reasoning": "why"},
    ],
    "parts": asked(
        [{"type": "text", "text": " see "}, {"type": "image", "image": object()}], [{"type": "text", "text": "ok"}]
    ),
    "long": asked("0123456789 {" * 3000) * 5,
}
