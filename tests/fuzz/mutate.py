"""Mutations of files: of bytes, of JSON values and of template syntax."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 255, 1 << 31, 1 << 63, -(1 << 63), 1 << 70, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "\ud800", "\x00", "../../etc/passwd", "/etc/passwd", "a" * 5000, "<script>", "{{x}}", "é",
    [], {}, [[]], [None], {"": None}, {"x": {"x": {}}},
]  # fmt: skip
SNIPPETS = [
    "{{ messages }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=['x']) %}{% for i in range(99) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ 'x' * 999999999 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x' | indent(999999999) }}",
    "{{ ('x' * 9999).replace('x', 'y' * 9999).replace('y', 'z' * 9999) }}",
    "{{ (messages | string * 99) | replace('o', messages | string * 99) }}",
    "{{ ([messages | string] * 9999) | join('x' * 9999) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y' * 99999) }}",
    "{{ messages | tojson(indent=9999999) }}",
    "{% include 'x' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends 'x' %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% break %}",
    "{{ messages[0]['content'] | urlize | wordwrap(1) | title }}",
    "{{ lipsum(n=99999) }}",
    "{{ range(999999999) | list | length }}",
    "{{ dict(a=1) | dictsort | batch(0) | list }}",
    "{{ messages | map(attribute='content') | sum(start='') }}",
    "{% if",
    "%}",
    "{#",
    "{{ (((((((((((((((((((((((((((((((((((((((((1))))))))))))))))))))))))))))))))))))))))) }}",
]


def mutate(data: bytes, kind: str, rng: random.Random) -> bytes:
    """One to three damages. kind: "arguments", "bytes", "json", "jsonl", "safetensors" or "template"."""
    by_kind = _BY_KIND.get(kind)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = by_kind if by_kind is not None and rng.random() < 0.75 else _bytes
        data = change(data, rng)
    return data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(data) + 1), 1 << rng.randrange(6)
    other = rng.randrange(len(data) + 1)
    changes: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + data[at + size :],
        lambda: data[:at] + rng.randbytes(size) + data[at + size :],
        lambda: data[:at] + rng.randbytes(size) + data[at:],
        lambda: data[:at] + bytes([b ^ (1 << rng.randrange(8)) for b in data[at : at + 1]]) + data[at + 1 :],
        lambda: data[:at] + data[other : other + 64] + data[at:],
        lambda: data[:at] + rng.choice(_PARTS) + data[at:],
        lambda: b"",
    ]
    return rng.choices(changes, cum_weights=_WEIGHTS)[0]()


_PARTS = [b"\x00", b"\xff" * 8, b"\n", b'"', b"{", b"[" * 3000, b"9" * 30]
_WEIGHTS = [4, 8, 12, 14, 22, 24, 27, 27.2]  # the running sum: the last one, an empty file, is rare


def _json(data: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, rng)
    if rng.random() < 0.02:
        return b"[" * 5000 + data
    places: list[tuple[Any, Any]] = []
    _walk(value, places)
    if not places:
        return json.dumps(rng.choice(STRANGE)).encode()
    parent, key = rng.choice(places)
    change = rng.randrange(6)
    if change == 0 and isinstance(parent, dict):
        del parent[key]
    elif change == 1 and isinstance(parent, dict):
        parent[str(rng.choice(STRANGE))] = parent[key]
    elif change == 2:
        parent[key] = [parent[key]]
    elif change == 3:
        other, name = rng.choice(places)
        parent[key] = json.loads(json.dumps(other[name])) if name in other or isinstance(other, list) else None
    else:
        parent[key] = rng.choice(STRANGE)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _walk(value: Any, places: list[tuple[Any, Any]]) -> None:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        places.append((value, key))
        _walk(value[key], places)


def _jsonl(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = _json(lines[at], rng)
    return b"\n".join(lines)


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = _json(data[8 : 8 + size], rng)
    length = len(header) if rng.random() < 0.9 else rng.choice([0, 1 << 40, 1 << 63, len(data), size])
    return length.to_bytes(8, "little") + header + data[8 + size :]


def _template(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(SNIPPETS).encode() + data[at:]


def _arguments(data: bytes, rng: random.Random) -> bytes:
    """Changes, doubles, drops or swaps words, or the parts of one around `=`, `,`, `:`, `+`, `x` and `-`."""
    words = data.split(b" ")
    at = rng.randrange(len(words))
    change = rng.randrange(6)
    if change == 0:
        del words[at]
    elif change == 1:
        words.insert(at, rng.choice(words))
    elif change == 2:
        words[at] = rng.choice(WORDS).encode()
    else:
        parts = re.split(rb"([=,:+x-])", words[at])
        new = rng.choice([rng.choice(WORDS).encode(), b"%d" % rng.choice(NUMBERS), rng.choice(parts)])
        parts[rng.randrange(len(parts))] = new
        words[at] = b"".join(parts)
    return b" ".join(words)


NUMBERS = [-2, -1, 0, 1, 2, 3, 7, 8, 16, 255, 1 << 20, 1 << 31, 1 << 64, 10**40]
WORDS = """
    data fsdp tensor context expert stage dcn pp pp:8 pp:0 pp:3x2 pp_1f1b:4 dp tp fsdp_tp ep cp_ring cp_ulysses cp_gather zero1
    --mesh --dcn --strategy --remat --attention --optimizer --loss --batch --lora --base --flags --microbatches --sequence
    --per-device-batch-size --target none full dots keep offload q k v rank alpha dora rslora int8 nf4 bfloat16
    adamw sgd splash chunked cudnn 1f1b nan inf 1e400 -inf 0.3 ..x:y json:dumps json: :x os.path:join x:y.z
    maxlib.training:evaluate llama3-8b gpt2 cpu h100x8 v5p-8 v5e-16x2 v6e-0 v5p:2x2x2 tpu-overlap gpu-overlap = , : +
    - -- é \x00 ../../etc/passwd
""".split()  # noqa: SIM905
_BY_KIND = {"arguments": _arguments, "json": _json, "jsonl": _jsonl, "safetensors": _safetensors, "template": _template}
