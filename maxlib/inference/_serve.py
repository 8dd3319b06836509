"""Serving by HTTP: of an engine as an application, and of a model's directory until a signal ends it."""

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxlib import sharding
from maxlib.inference._chat import read_model, stop_tokens
from maxlib.inference._continuous import LocalEngine
from maxlib.inference._tool_calls import ToolFormat, tool_call_format
from maxlib.tokenization import ChatTemplate, load_tokenizer
from maxlib.weights import model_directory

_INSTALL = 'a server needs Starlette, pydantic and uvicorn: pip install "maxlib[serve]"'


def openai_app(
    engine: LocalEngine,
    tokenizer: Any,
    *,
    name: str,
    template: ChatTemplate | None = None,
    stop_token_ids: Collection[int] = (),
    tool_format: ToolFormat | None = None,
    max_length: int | None = None,
    max_body: int = 16 << 20,
    max_waiting: int = 1024,
    api_key: str | None = None,
) -> Any:
    """Makes an ASGI application that answers OpenAI's completions and chat completions with an engine.

    It has `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and `/metrics` (Prometheus). Logs hold
    neither keys nor texts. Run it with `uvicorn.run(app)`, or `maxlib serve`.

    Args:
        engine: The engine, made with `tokenizer=` so that texts can end a completion.
        tokenizer: A `tokenizers.Tokenizer`.
        name: Name of the model for clients.
        template: Its chat template; without it there are no chats.
        stop_token_ids: Ids that end every text, see `stop_tokens`.
        tool_format: Format of its tool calls; by default that of the template, if it is known.
        max_length: Maximum number of tokens of a prompt and its completion; by default the model's, else 4096.
        max_body: Maximum number of bytes of a request.
        max_waiting: Maximum number of completions that wait for a slot; more are refused with status 429.
        api_key: Key that clients must send; None needs none.

    Raises:
        ImportError: when Starlette or pydantic is not installed.
    """
    try:
        from maxlib.inference._openai import Server
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    if tool_format is None and template is not None:
        tool_format = tool_call_format(template.tool_source)
    server = Server(
        engine,
        tokenizer,
        name,
        template,
        list(stop_token_ids),
        tool_format,
        max_length=max_length or engine.capacity or getattr(engine.generator.model, "max_length", None) or 4096,
        max_body=max_body,
        max_waiting=max_waiting,
        api_key=api_key,
    )
    return server.app()


def serve(
    model: str | Path,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    slots: int = 8,
    max_length: int | None = None,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
    num_drafts: int = 0,
    cache_tokens: int | None = None,
    tensor: int = 1,
    api_key: str | None = None,
) -> None:
    """Serves a model with OpenAI's API until SIGTERM or SIGINT, after which it finishes what runs.

    Args:
        model: A Hugging Face directory, or a name on the hub; also a directory that `quantization.save` wrote.
        name: Name of the model for clients, by default `model`.
        host: Address to listen on.
        port: Port; 0 for a free one.
        slots: Number of rows decoded at once.
        max_length: Maximum number of tokens of a prompt and its completion; by default the model's, else 4096.
        dtype: Dtype of the computation.
        cache_dtype: Dtype of cached keys and values, by default `dtype`.
        num_drafts: Number of n-gram drafts, see `LocalEngine`.
        cache_tokens: Number of tokens for which there is memory, see `LocalEngine`.
        tensor: Number of devices over which heads, MLP and vocabulary are split.
        api_key: Key that clients must send; None needs none.

    Raises:
        ImportError: when uvicorn or Starlette is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise ImportError(_INSTALL) from None
    directory = model_directory(model)
    tokenizer = load_tokenizer(directory)
    try:
        template = ChatTemplate.from_directory(directory)
    except FileNotFoundError:
        template = None
    weights, on_devices = read_model(directory), contextlib.nullcontext()
    if tensor > 1:
        layout = sharding.Layout(sharding.make_mesh(tensor=tensor, devices=jax.devices()[:tensor]), sharding.TP)
        weights, on_devices = jax.device_put(weights, sharding.shardings(weights, layout)), sharding.use(layout)
    with on_devices:
        engine = LocalEngine(
            weights,
            slots=slots,
            num_drafts=num_drafts,
            cache_tokens=cache_tokens,
            tokenizer=tokenizer,
            dtype=jnp.dtype(dtype),
            cache_dtype=None if cache_dtype is None else jnp.dtype(cache_dtype),
        )
        app = openai_app(
            engine,
            tokenizer,
            name=name or str(model),
            template=template,
            stop_token_ids=stop_tokens(directory),
            max_length=max_length,
            api_key=api_key,
        )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        uvicorn.run(app, host=host, port=port, access_log=False, log_config=None)
