"""Shapes and types of every function in maxlib, checked while the tests run."""

import ast

import beartype
import jaxtyping._import_hook

# An int is welcome where a float is annotated, as pyright has it.
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def install() -> None:
    """Checks functions and methods, but not the constructors that `dataclasses` writes.

    jax rebuilds a dataclass that is a pytree with whatever its leaves are at the time (tracers of another
    rank under vmap, None, plain objects), so a checked constructor would refuse what is right.
    """
    hook = jaxtyping._import_hook
    hook.JaxtypingTransformer.visit_ClassDef = ast.NodeVisitor.generic_visit
    hook.install_import_hook("maxlib", f"{__name__}.check")
