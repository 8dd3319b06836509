"""Composable LLM building blocks on JAX and Flax NNX.

The subpackages are `ops` (pure functions), `nn` (layers), `models`, `sharding`, `distributed`, `weights`,
`tokenization`, `data`, `training`, `checkpoint`, `observability`, `inference`, `quantization`, `adapters`,
`post_training` and `plan`. Importing `maxlib` imports none of them: each is imported when it is first named.
"""

import importlib
from typing import TYPE_CHECKING

from maxlib._names import no_attribute

if TYPE_CHECKING:
    from maxlib import adapters as adapters
    from maxlib import checkpoint as checkpoint
    from maxlib import data as data
    from maxlib import distributed as distributed
    from maxlib import inference as inference
    from maxlib import models as models
    from maxlib import nn as nn
    from maxlib import observability as observability
    from maxlib import ops as ops
    from maxlib import plan as plan
    from maxlib import post_training as post_training
    from maxlib import quantization as quantization
    from maxlib import sharding as sharding
    from maxlib import tokenization as tokenization
    from maxlib import training as training
    from maxlib import weights as weights
    from maxlib._command.doctor import show_versions as show_versions
    from maxlib.weights import from_pretrained as from_pretrained
    from maxlib.weights import push_to_hub as push_to_hub
    from maxlib.weights import save_pretrained as save_pretrained

__version__ = "0.1.0.dev0"

_SUBPACKAGES = (
    "adapters",
    "checkpoint",
    "data",
    "distributed",
    "inference",
    "models",
    "nn",
    "observability",
    "ops",
    "plan",
    "post_training",
    "quantization",
    "sharding",
    "tokenization",
    "training",
    "weights",
)
_FUNCTIONS = ("from_pretrained", "push_to_hub", "save_pretrained", "show_versions")


def __getattr__(name: str):
    if name in _SUBPACKAGES:
        return importlib.import_module(f"maxlib.{name}")
    if name == "show_versions":
        return importlib.import_module("maxlib._command.doctor").show_versions
    if name in _FUNCTIONS:
        return getattr(importlib.import_module("maxlib.weights"), name)
    raise no_attribute(__name__, name, _SUBPACKAGES + _FUNCTIONS)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBPACKAGES, *_FUNCTIONS])
