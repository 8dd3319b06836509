"""Frozen dataclasses that are pytrees."""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass whose fields are children of a pytree, except those declared with `static()`.

    Unlike `jax.tree_util.register_dataclass`, it does not run `__init__` when JAX rebuilds the value with tracers,
    specs or None in its fields, so that the constructor may check types at run time.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    dynamic = [f.name for f in fields if not f.metadata.get("static")]
    fixed = [f.name for f in fields if f.metadata.get("static")]

    def flatten(value):
        keys = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in dynamic]
        return keys, tuple(getattr(value, name) for name in fixed)

    def unflatten(aux, children):
        # A frozen dataclass refuses setattr, and `__init__` must not run.
        value = object.__new__(cls)
        for name, child in zip(dynamic + fixed, (*children, *aux), strict=True):
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def static(**kwargs):
    """Declares a field that is part of the pytree's structure: hashable, compared by `==`."""
    return dataclasses.field(metadata={"static": True}, **kwargs)
