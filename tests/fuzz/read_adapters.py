"""PEFT directories: the configuration and the tensors of adapters."""

import functools
from pathlib import Path

from flax import nnx

from maxlib import adapters
from tests.fuzz.run import Target
from tests.nn.tiny import filled_llama

FILES = {"adapter_config.json": "json", "adapter_model.safetensors": "safetensors"}


@functools.cache
def base():
    return filled_llama()


def make(directory: Path) -> None:
    adapters.save(adapters.add(base(), adapters.LoRA(2, 4), rngs=nnx.Rngs(0)), directory)


def read(directory: Path) -> None:
    adapters.load(base(), directory)


# Compiled programs of the first input stay.
TARGET = Target(make, read, FILES, gib=3.0)
