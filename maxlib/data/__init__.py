"""From text to batches: sources, tokenization, packing and an exactly resumable loader, composed of grain datasets.

Every name is loaded on first use, because importing grain takes seconds.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxlib.data.ahead import read_manifest as read_manifest
    from maxlib.data.ahead import tokenized as tokenized
    from maxlib.data.ahead import write_tokens as write_tokens
    from maxlib.data.chat import tokenize_chats as tokenize_chats
    from maxlib.data.formats import files as files
    from maxlib.data.formats import parquet as parquet
    from maxlib.data.formats import records as records
    from maxlib.data.formats import stream as stream
    from maxlib.data.formats import tfrecord as tfrecord
    from maxlib.data.loader import Loader as Loader
    from maxlib.data.loader import host_shards as host_shards
    from maxlib.data.loader import shards_of as shards_of
    from maxlib.data.mixture import Mixture as Mixture
    from maxlib.data.packing import Statistics as Statistics
    from maxlib.data.packing import pack as pack
    from maxlib.data.packing import statistics as statistics
    from maxlib.data.quarantine import Quarantine as Quarantine
    from maxlib.data.sources import array_record as array_record
    from maxlib.data.sources import chats as chats
    from maxlib.data.sources import in_memory as in_memory
    from maxlib.data.sources import jsonl as jsonl
    from maxlib.data.sources import split as split
    from maxlib.data.sources import text_files as text_files
    from maxlib.data.stdlib import python_text as python_text
    from maxlib.data.tokenizer import save_tokenizer as save_tokenizer
    from maxlib.data.tokenizer import tokenize as tokenize
    from maxlib.data.tokenizer import train_bpe as train_bpe

_MODULES = {
    "chat": ("tokenize_chats",),
    "formats": ("files", "parquet", "records", "stream", "tfrecord"),
    "loader": ("Loader", "host_shards", "shards_of"),
    "mixture": ("Mixture",),
    "packing": ("Statistics", "pack", "statistics"),
    "quarantine": ("Quarantine",),
    "sources": ("array_record", "chats", "in_memory", "jsonl", "split", "text_files"),
    "stdlib": ("python_text",),
    "ahead": ("read_manifest", "tokenized", "write_tokens"),
    "tokenizer": ("save_tokenizer", "tokenize", "train_bpe"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
