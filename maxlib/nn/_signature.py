"""Signatures of layers for notebooks, where flax's metaclass hides those of constructors."""

import inspect
from typing import Any

from flax import nnx


class InitSignature:
    """Class attribute `__signature__`: the arguments of the class's own `__init__`.

    Without it `help(nn.Attention)`, `nn.Attention?` and the tooltips of notebooks show `(*args, **kwargs)`. Subclasses
    inherit the attribute and show their own arguments; an instance shows those of `__call__`.
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


def show_signatures() -> None:
    """Gives every layer of maxlib that has been imported its `__signature__`."""
    for cls in nnx.Module.__subclasses__():
        if cls.__module__.startswith("maxlib."):
            cls.__signature__ = InitSignature()  # pyright: ignore[reportAttributeAccessIssue]
