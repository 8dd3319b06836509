"""Composable LLM building blocks on JAX and Flax NNX.

The subpackages are `ops` (pure functions), `nn` (layers), `models`, `sharding`, `distributed`, `weights`,
`tokenization`, `data`, `training`, `checkpoint`, `observability`, `inference`, `quantization`, `adapters`,
`post_training` and `plan`. Importing `maxlib` imports none of them: each is imported when it is first named.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

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
    from maxlib._utils.process import enable_compilation_cache as enable_compilation_cache
    from maxlib._utils.process import keep_freed_memory as keep_freed_memory
    from maxlib.weights import from_pretrained as from_pretrained
    from maxlib.weights import push_to_hub as push_to_hub
    from maxlib.weights import save_pretrained as save_pretrained

__version__ = "0.1.0rc1"
__getattr__, __dir__ = lazy(__name__, __file__)
