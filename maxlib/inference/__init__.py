"""Generation: prefill and decode over any model. Every name is loaded on first use."""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.inference._chat import Chat as Chat
    from maxlib.inference._chat import stop_tokens as stop_tokens
    from maxlib.inference._continuous import LocalEngine as LocalEngine
    from maxlib.inference._denoise import Denoised as Denoised
    from maxlib.inference._denoise import denoise as denoise
    from maxlib.inference._engine import Completion as Completion
    from maxlib.inference._engine import Engine as Engine
    from maxlib.inference._generate import Generator as Generator
    from maxlib.inference._generate import generate as generate
    from maxlib.inference._harness import Harness as Harness
    from maxlib.inference._processors import Grammar as Grammar
    from maxlib.inference._processors import LogitBias as LogitBias
    from maxlib.inference._requests import LogitsProcessor as LogitsProcessor
    from maxlib.inference._requests import Request as Request
    from maxlib.inference._sampling import GREEDY as GREEDY
    from maxlib.inference._sampling import Sampler as Sampler
    from maxlib.inference._scoring import BitsPerByte as BitsPerByte
    from maxlib.inference._scoring import Cloze as Cloze
    from maxlib.inference._scoring import rolling_windows as rolling_windows
    from maxlib.inference._scoring import score_documents as score_documents
    from maxlib.inference._serve import openai_app as openai_app
    from maxlib.inference._serve import serve as serve
    from maxlib.inference._server import ReloadingServerEngine as ReloadingServerEngine
    from maxlib.inference._server import ServerEngine as ServerEngine
    from maxlib.inference._server import ServerError as ServerError
    from maxlib.inference._text import stream_text as stream_text
    from maxlib.inference._tool_calls import ParsedAnswer as ParsedAnswer
    from maxlib.inference._tool_calls import ToolCall as ToolCall
    from maxlib.inference._tool_calls import parse_tool_calls as parse_tool_calls
    from maxlib.inference._tool_calls import tool_call_format as tool_call_format

__getattr__, __dir__ = lazy(__name__, __file__)
