"""Creates parameters directly as shards on the mesh."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib._utils.paths import dotted
from maxlib.sharding._layout import Layout, check_layout, use

Model = TypeVar("Model")


def check_no_aliases(model: Any) -> None:
    """Raises ValueError if a model has the same parameter at two paths, such as `self.head = self.embed`.

    Pytrees have no identity: `jax.jit` and `jax.tree.map` return two separate parameters. Only the model as built shows
    that they are one, so call this before any of these functions.
    """
    first: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        here = dotted(path)
        if isinstance(leaf, nnx.Param) and (other := first.setdefault(id(leaf), here)) != here:
            raise ValueError(
                f"{other} and {here} are the same parameter, but JAX would copy it to two parameters and train them "
                "separately. Store it once and call it twice: a tied head is embed.logits(x), and a module that "
                "several layers use is an attribute of their parent, which passes it to them"
            )


def shardings(model: Model, layout: Layout) -> Model:
    """Returns `model` with every array replaced by the `NamedSharding` that `layout` gives it.

    Variables without axis names are replicated.

    Args:
        model: A module, or its `jax.eval_shape`.
        layout: The mesh and the strategy.

    Raises:
        ValueError: when an axis is not declared, when a mesh axis does not divide a dimension, or when two names of a
            parameter use the same mesh axis; the message names the parameter.
    """
    check_layout(layout)

    def place(path, leaf):
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(layout.mesh, P())
        return leaf.replace(layout.sharding(dotted(path), leaf))

    return jax.tree_util.tree_map_with_path(place, model, is_leaf=lambda x: isinstance(x, nnx.Variable))


def eval_shape(build: Callable[[], Model]) -> Model:
    """Returns `jax.eval_shape(build)`; raises ValueError if a parameter occurs twice in the model."""

    def checked() -> Model:
        model = build()
        check_no_aliases(model)
        return model

    return jax.eval_shape(checked)


def init_sharded(build: Callable[[], Model], layout: Layout) -> Model:
    """Builds a model whose parameters are created as shards: no device ever holds a whole parameter.

        layout = sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP)
        model = sharding.init_sharded(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)), layout)

    Args:
        build: Builds the model, such as `lambda: Llama(cfg, rngs=nnx.Rngs(0))`.
        layout: The mesh and the strategy.

    Returns:
        The model, with the same values as `build` gives on one device.

    Raises:
        TypeError: when `build` is a model.
        ValueError: as for `shardings`, and when a parameter occurs twice (`self.head = self.embed`).
    """
    if isinstance(build, nnx.Module):
        raise TypeError(
            f"init_sharded takes a function that builds the model, lambda: {type(build).__name__}(...), got a model; "
            "jax.device_put(model, sharding.shardings(model, layout)) splits one that exists"
        )
    check_layout(layout)
    # With out_shardings, XLA also splits the random number generation: each device computes its own shard.
    places = shardings(eval_shape(build), layout)
    with use(layout):
        return jax.jit(build, out_shardings=places, compiler_options=_compiler_options())()


def _compiler_options() -> dict[str, int]:
    """Returns options for a program that runs once.

    On CPUs LLVM takes four times as long for random numbers at XLA's usual level 3 as at level 1, which gives the same
    bits. A level in `XLA_FLAGS` stays.
    """
    level = "xla_backend_optimization_level"
    return {level: 1} if jax.default_backend() == "cpu" and level not in os.environ.get("XLA_FLAGS", "") else {}
