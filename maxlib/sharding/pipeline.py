"""Layers over devices: each stage holds consecutive layers, and microbatches pass from stage to stage (GPipe,
arXiv:1811.06965)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from maxlib.sharding.rules import Pipeline, current

Tree = Any


def stages() -> int:
    """Into how many stages the rules in use cut a stack; 1 without a pipeline."""
    return 1 if (found := in_use()) is None else found[1]


def pipelined(stage: Callable[..., tuple[Tree, Tree]], layers: Tree, x: Tree, ctx: Tree) -> tuple[Tree, Tree]:
    """`stage(layers, x, ctx) -> (x, aux)` over all layers, in the pipeline of the rules in use.

    layers: arrays with a leading axis of equal layers. x, ctx: arrays with a leading batch axis; what has another
    length there is common to all rows. aux: arrays with a leading layer axis; they come back as the mean over
    microbatches. Differentiable: the backward pass runs through the stages in the opposite order.
    Raises ValueError for layers that the stages, or rows that the microbatches do not divide, and without a pipeline.
    """
    pipeline, num_stages = required()
    ticks, rows = pipeline.microbatches + num_stages - 1, jax.tree.leaves(x)[0].shape[0]
    check_pipeline(layers, rows, pipeline, num_stages)
    rowwise = lambda a: deal(a, pipeline.microbatches)
    is_row = lambda a: a.ndim > 0 and a.shape[0] == rows
    x, held = jax.tree.map(rowwise, x), placed(jax.tree.map(lambda a: cut(a, num_stages), layers), pipeline)
    shared = jax.tree.map(lambda a: rowwise(a) if is_row(a) else jnp.expand_dims(a, 0), ctx)
    every_stage = jax.vmap(stage, spmd_axis_name=pipeline.axis)

    def tick(carry, t):
        passed, total = carry
        own = t - jnp.arange(num_stages)  # which microbatch each stage has
        first = jax.tree.map(lambda a: a[jnp.minimum(t, pipeline.microbatches - 1)], x)
        entering = jax.tree.map(lambda a, b: jnp.roll(a, 1, axis=0).at[0].set(b), passed, first)
        turn = jnp.clip(own, 0, pipeline.microbatches - 1)
        here = jax.tree.map(lambda a: a[turn if a.shape[0] > 1 else jnp.zeros_like(turn)], shared)
        passed, aux = every_stage(held, placed(entering, pipeline), here)
        works = (own >= 0) & (own < pipeline.microbatches)
        total = jax.tree.map(lambda s, a: s + jnp.where(_along(works, a), a, 0), total, aux)
        return (placed(passed, pipeline), total), jax.tree.map(lambda a: a[-1], passed)

    empty = jax.tree.map(lambda a: jnp.zeros((num_stages, *a.shape[1:]), a.dtype), x)
    shapes = jax.eval_shape(
        lambda: every_stage(held, empty, jax.tree.map(lambda a: a[jnp.zeros(num_stages, int)], shared))
    )
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes[1])
    (_, total), out = lax.scan(tick, (placed(empty, pipeline), zeros), jnp.arange(ticks))
    join = lambda a: gather_in(a[num_stages - 1 :])
    mean = lambda a: (a / pipeline.microbatches).reshape(-1, *a.shape[2:])
    return jax.tree.map(join, out), jax.tree.map(mean, total)


def in_use() -> tuple[Pipeline, int] | None:
    if (now := current()) is None or not isinstance(place := now[1].get("layers"), Pipeline):
        return None
    size = now[0].shape[place.axis]
    return (place, size) if size > 1 else None


def required() -> tuple[Pipeline, int]:
    """The pipeline in use and its number of stages. Raises ValueError where there is none."""
    if (found := in_use()) is None:
        raise ValueError(
            "there is no pipeline: call this inside sharding.use(mesh, rules) with a rule such as "
            "{'layers': sharding.Pipeline('stage', microbatches=8)} and a mesh with more than one stage"
        )
    return found


def check_pipeline(layers: Tree, rows: int, pipeline: Pipeline, num_stages: int) -> None:
    repeats = jax.tree.leaves(layers)[0].shape[0]
    if repeats % num_stages:
        raise ValueError(
            f"{repeats} repeats of layers cannot be cut into {num_stages} equal stages; give the stack a prefix that leaves a "
            "multiple of them, or the mesh another number of stages"
        )
    if rows % pipeline.microbatches:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into {pipeline.microbatches} microbatches; change one of them"
        )


def cut(a: jax.Array, parts: int) -> jax.Array:
    return a.reshape(parts, a.shape[0] // parts, *a.shape[1:])


def deal(a: jax.Array, parts: int) -> jax.Array:
    """Part `i` takes every `parts`-th row, so that rows that are spread over devices stay so in each part."""
    return jnp.swapaxes(a.reshape(a.shape[0] // parts, parts, *a.shape[1:]), 0, 1)


def gather_in(a: jax.Array) -> jax.Array:
    """The rows of all parts in their own order again."""
    return jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:])


def _along(works: jax.Array, a: jax.Array) -> jax.Array:
    return works.reshape(-1, *[1] * (a.ndim - 1))


def placed(tree: Tree, pipeline: Pipeline) -> Tree:
    """Stage by stage on the devices of the axis; all else is as it was."""
    rest = P.UNCONSTRAINED
    put = lambda a: lax.with_sharding_constraint(a, P(pipeline.axis, *[rest] * (a.ndim - 1)))
    return jax.tree.map(put, tree)
