"""The program that renders chat templates: it answers requests, both as JSON.

Templates are untrusted, so this runs in a process of its own. Whatever a template does there, even inside one call of a
C function, the kernel ends the process at the limit of time and refuses it memory beyond the limit. It imports nothing
of maxlib, so that it starts fast.
"""

import functools
import json
import resource
import signal
import sys
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

MEMORY = 1 << 30  # bytes
LARGEST = 1 << 24  # maximum characters of the output
# Tokens that every tokenizer may state. Others, such as `image_token`, belong to some models only, and templates that
# several models share write them unasked.
STANDARD_TOKENS = {f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}


class StrictToken(Undefined):
    """A value that is not defined. Writing a standard special token that no file states is an error."""

    __slots__ = ()

    def __str__(self) -> str:
        name = self._undefined_name
        if self._undefined_obj is missing and name in STANDARD_TOKENS:
            raise UndefinedError(f"no file of the tokenizer states its {name}: name it in special_tokens=")
        return ""


class Generation(Extension):
    """The tag `{% generation %}`, which marks the model's text for training; in prompts it only renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in ("generation_begins", "generation_ends"))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Writes JSON. Unlike jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> NoReturn:
    raise ValueError(f"the chat template refuses these messages: {message}")


def now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.lru_cache(16)
def compiled(source: str) -> Template:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], undefined=StrictToken
    )
    env.filters["tojson"] = to_json
    env.globals |= {"raise_exception": refuse, "strftime_now": now}
    try:
        return env.from_string(source)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # also SyntaxError and AssertionError of the compilation
        raise ValueError(f"the chat template is not one of Jinja ({error})") from error


def render(source: str, special_tokens: dict[str, str | None], variables: dict[str, Any] | None) -> str:
    """Renders a template, or only compiles it if `variables` is None."""
    template = compiled(source)
    if variables is None:
        return ""
    # What the files state not to exist renders as nothing.
    tokens = {name: Undefined(name=name) if token is None else token for name, token in special_tokens.items()}
    text = template.render(tokens | variables)
    if len(text) > LARGEST:
        raise ValueError(f"the chat template makes more than {LARGEST:,} characters")
    return text


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render(request["source"], request["special_tokens"], request["variables"])}
    except SecurityError as error:
        return {"security": str(error)}
    except ValueError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"the chat template takes more than {MEMORY >> 30} GiB of memory"}
    except RecursionError:
        return {"error": "the chat template calls itself or is nested without end"}
    except Exception as error:  # a template may raise anything for unexpected values
        return {"error": f"the chat template cannot render this ({type(error).__name__}: {error})"}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:  # the parent has ended
            return
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # its signal ends this process
        reply = json.dumps(answer(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(reply)


if __name__ == "__main__":
    main()
