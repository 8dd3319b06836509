"""Serving of a model's directory by HTTP."""

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from maxlib.inference._chat import read_model, stop_tokens
from maxlib.inference._continuous import LocalEngine
from maxlib.inference._openai import openai_app
from maxlib.tokenization import ChatTemplate, load_tokenizer
from maxlib.weights import model_directory


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
        api_key: Key that clients must send; None needs none.

    Raises:
        ImportError: when uvicorn or Starlette is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise ImportError('a server needs Starlette and uvicorn: pip install "maxlib[serve]"') from None
    directory = model_directory(model)
    tokenizer = load_tokenizer(directory)
    try:
        template = ChatTemplate.from_directory(directory)
    except FileNotFoundError:
        template = None
    engine = LocalEngine(
        read_model(directory),
        slots=slots,
        num_drafts=num_drafts,
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
