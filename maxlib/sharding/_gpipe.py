"""Layers over devices: each stage holds some of a stack's layers, and microbatches pass from stage to stage, once
(GPipe, arXiv:1811.06965) or several times around (arXiv:2104.04473)."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from maxlib.sharding._layout import current, in_a_stage, in_parts, replicated_over
from maxlib.sharding._pipeline_chunks import Chunks, Schedule, Tick, chunks
from maxlib.sharding._rules import drop_uneven

Tree = Any
# Names for `jax.checkpoint`: what layers under remat are computed again from, and the weights of a chunk.
LAYER_INPUT, _CHUNK = "layer_input", "chunk"
# What makes copies of weights rather than new numbers: if these were kept, each tick would keep a chunk's weights.
_CHEAP = ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "sharding_constraint")


class Plan(NamedTuple):
    """A pipeline for one stack and batch.

    parts: mesh axes over which every device computes its own part of a microbatch, as if there was no other.
    """

    axis: str
    schedule: Schedule
    chunks: Chunks
    parts: tuple[str, ...] = ()


class _Flow(NamedTuple):
    """Carry of the loop over ticks; the leading axis is that of the stages.

    Attributes:
        passed: what each stage made last, `[stages, rows, ...]`.
        out: what it made last of each microbatch, `[stages, microbatches, rows, ...]`.
        aux: sums of what its layers report, `[stages, repeats, size, ...]`.
    """

    passed: Tree
    out: Tree
    aux: Tree


def stages() -> int:
    """Counts the stages into which the layout in use cuts a stack; 1 without a pipeline."""
    layout = current()
    return 1 if layout is None or layout.pipeline is None else layout.mesh.shape[layout.pipeline.axis]


def pipelined(
    stage: Callable[..., tuple[Tree, Tree]], layers: Tree, x: Tree, ctx: Tree, *, remat: Callable | None = None
) -> tuple[Tree, Tree]:
    """Runs layers over `x`, in the pipeline of the layout in use.

    Differentiable: the backward pass runs through the stages in the opposite order.

    Args:
        stage: `(layers, works, x, ctx) -> (x, aux)`. It is given some of the layers, and with `works` which of those
            are not idle (None if all work); through an idle one x has to pass as it is.
        layers: arrays with a leading axis of equal layers.
        x: arrays with a leading batch axis.
        ctx: the same; what has another length there is common to all rows.
        remat: the policy by which `stage` computes its layers again, if it does; it names their inputs `LAYER_INPUT`.

    Returns:
        x after all layers, and what they report (`aux`, arrays with a leading layer axis), its mean over microbatches.

    Raises:
        ValueError: for layers, rows and microbatches that do not fit the stages, and without a pipeline.
    """
    plan, rows = planned(layers, x), jax.tree.leaves(x)[0].shape[0]
    # What layers report is of all rows of a microbatch.
    if jax.tree.leaves(jax.eval_shape(lambda *args: stage(layers, None, *args)[1], x, ctx)):
        plan = plan._replace(parts=())
    is_row = lambda a: a.ndim > 0 and a.shape[0] == rows
    common = jax.tree.map(lambda a: 0 if is_row(a) else None, ctx)
    # [rows, ...] -> [microbatches, rows of one, ...]; what all rows share gets an axis of one
    ctx = jax.tree.map(lambda a: split_microbatches(a, plan) if is_row(a) else jnp.expand_dims(a, 0), ctx)
    # [stages, microbatches, ...]: each stage has a copy, so that gradients are summed over stages once, not in every
    # tick.
    copies = lambda a: jnp.broadcast_to(a[None], (plan.schedule.stages, *a.shape))
    x = placed(jax.tree.map(lambda a: copies(split_microbatches(a, plan)), x), plan)
    stage_params = _in_parts(in_stages(layers, plan), plan), idle(plan)
    on_parts = each_part(stage, plan, (0, None, 0, common))
    on_stages = each_stage(lambda stage_params, x, ctx: on_parts(*stage_params, x, ctx), plan)
    run = lambda stage_params, turn, x, ctx: on_stages(stage_params, turn.repeat, x, _rows_of(ctx, turn.microbatch))
    if plan.schedule.repeats > 1:
        run = jax.checkpoint(run, policy=_kept(remat), prevent_cse=False)
    tick, flow = functools.partial(_tick, run, stage_params, x, ctx, plan), _empty(run, stage_params, x, ctx, plan)
    flow, _ = lax.scan(tick, flow, jnp.arange(plan.schedule.ticks))
    out = jax.tree.map(lambda a: merge_microbatches(a, plan), of_stage(flow.out, plan.schedule.stages - 1))
    return out, in_order(jax.tree.map(lambda a: a / plan.schedule.microbatches, flow.aux), plan)


def _tick(run, stage_params, x, ctx, plan, flow, t):
    schedule, turn = plan.schedule, plan.schedule.forward(t, plan.schedule.all)  # of each stage: [stages]
    new = jax.tree.map(lambda a: a[:, schedule.forward(t, 0).microbatch], x)
    entering = placed(stage_inputs(flow.passed, new, turn), plan)
    passed, aux = run(stage_params, turn, entering, ctx)
    # The last time around overwrites what came before; nothing leaves a stage's devices before the end.
    leaving = schedule.forward(t, schedule.stages - 1).microbatch
    out = jax.tree.map(lambda o, a: o.at[:, leaving].set(a), flow.out, passed)
    return _Flow(placed(passed, plan), placed(out, plan), add_up(flow.aux, aux, turn)), None


def _rows_of(ctx: Tree, microbatch: jax.Array) -> Tree:
    return jax.tree.map(lambda a: a[microbatch if a.shape[0] > 1 else jnp.zeros_like(microbatch)], ctx)


def _empty(run, stage_params, x, ctx, plan) -> _Flow:
    number, turn = plan.schedule.stages, plan.schedule.forward(jnp.zeros((), int), plan.schedule.all)
    passed = placed(jax.tree.map(lambda a: jnp.zeros_like(a[:, 0]), x), plan)
    out = placed(jax.tree.map(jnp.zeros_like, x), plan)
    _, aux = jax.eval_shape(run, stage_params, turn, passed, ctx)
    total = lambda a: jnp.zeros((number, plan.schedule.repeats, *a.shape[1:]), a.dtype)
    return _Flow(passed, out, jax.tree.map(total, aux))


def planned(layers: Tree, x: Tree) -> Plan:
    """Fits the pipeline in use to these layers and this batch. Raises ValueError without one that fits."""
    if (layout := current()) is None or (pipeline := layout.pipeline) is None:
        raise ValueError(
            "there is no pipeline: call this inside sharding.use(layout) with a layout that joins "
            "sharding.Pipeline('stage', microbatches=8), on a mesh with more than one stage"
        )
    number = layout.mesh.shape[pipeline.axis]
    periods, rows = (jax.tree.leaves(tree)[0].shape[0] for tree in (layers, x))
    cut = chunks(periods, number, pipeline.repeats)
    if rows % pipeline.microbatches:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into {pipeline.microbatches} microbatches; change one of them"
        )
    if pipeline.repeats > 1 and pipeline.microbatches % number:
        raise ValueError(
            f"with repeats={pipeline.repeats}, microbatches must be a multiple of the {number} stages, got "
            f"{pipeline.microbatches}: they go around in groups of that size"
        )
    axes = replicated_over()
    parts = axes if rows // pipeline.microbatches % parts_in(axes) == 0 else ()
    return Plan(pipeline.axis, Schedule(number, pipeline.microbatches, pipeline.repeats), cut, parts)


def parts_in(axes: tuple[str, ...]) -> int:
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)


def in_stages(tree: Tree, plan: Plan) -> Tree:
    """Lays a stack's arrays out as `[stages, repeats, size, ...]`, on the devices of each stage.

    They lie so already if the chunks are in order. Else they lie whole in layers and cut along another dimension
    (`parameter_spec`), and travel all-to-all.
    """
    shape = (plan.chunks.stages, plan.chunks.repeats, plan.chunks.size)
    if plan.chunks.in_order:
        return placed(jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), tree), plan)
    return placed(jax.tree.map(lambda a: _whole(a[plan.chunks.index], 3), tree), plan)


def in_order(tree: Tree, plan: Plan) -> Tree:
    """Undoes `in_stages`, for gradients and what layers report."""
    whole = lambda a: a.reshape(-1, *a.shape[3:])
    if plan.chunks.in_order:
        return jax.tree.map(whole, tree)
    return jax.tree.map(lambda a: whole(_whole(a, 3))[plan.chunks.places], tree)


def _whole(a: jax.Array, dims: int) -> jax.Array:
    """Holds the first dimensions whole on every device; the compiler finds what splits the others."""
    return lax.with_sharding_constraint(a, P(*[None] * dims, *[P.UNCONSTRAINED] * (a.ndim - dims)))


def idle(plan: Plan) -> jax.Array | None:
    """Marks the places of the chunks that work, as `in_stages` lays them; None if all do."""
    works = plan.chunks.works
    return None if works.all() else placed(jnp.asarray(works), plan)


def each_stage(run: Callable[..., Tree], plan: Plan) -> Callable[..., Tree]:
    """Runs `run(chunk, ...)` on every stage at once, with the chunk of `stage_params` whose turn it is."""

    def one(stage_params, repeat, *args):
        with in_a_stage():
            return run(_chunk(stage_params, repeat), *args)

    return jax.vmap(one, spmd_axis_name=plan.axis)


def each_part(run: Callable[..., Tree], plan: Plan, in_axes: tuple[Any, ...]) -> Callable[..., Tree]:
    """Runs `run` on each part of a microbatch by itself, so that nothing is summed over their devices in every tick.

    Args:
        run: the work on a part.
        plan: without parts, `run` comes back as it is.
        in_axes: as in `jax.vmap`.
    """
    if not plan.parts:
        return run

    def parts(*args):
        with in_parts(plan.parts):
            return jax.vmap(run, in_axes=in_axes, spmd_axis_name=plan.parts)(*args)

    return parts


def _in_parts(tree: Tree, plan: Plan) -> Tree:
    """Copies layers that lie in stages for each part: their gradients are summed over parts once."""
    if not plan.parts:
        return tree
    number, rest = parts_in(plan.parts), P.UNCONSTRAINED

    def copies(a):
        # [stages, repeats, size, ...] -> [stages, repeats, parts, size, ...]
        a = jnp.broadcast_to(a[:, :, None], (*a.shape[:2], number, *a.shape[2:]))
        return lax.with_sharding_constraint(a, P(plan.axis, rest, plan.parts, *[rest] * (a.ndim - 3)))

    return jax.tree.map(copies, tree)


def _chunk(stage_params: Tree, repeat: jax.Array) -> Tree:
    return jax.tree.map(lambda a: a[0] if a.shape[0] == 1 else checkpoint_name(a[repeat], _CHUNK), stage_params)


def _kept(remat: Callable | None) -> Callable:
    """Makes the policy of a tick: it keeps all that `remat` keeps, but never a chunk's weights, which are there."""

    def keep(primitive: Any, *args: Any, **params: Any) -> Any:
        if (name := params.get("name")) in (_CHUNK, LAYER_INPUT) and primitive.name == "name":
            return name == LAYER_INPUT
        return primitive.name not in _CHEAP if remat is None else remat(primitive, *args, **params)

    return keep


def stage_inputs(passed: Tree, new: Tree, turn: Tick) -> Tree:
    """Hands each stage what the one before has made; the first one takes up `new`, or what has been around."""
    fresh = (jnp.arange(len(turn.repeat)) == 0) & (turn.repeat == 0)
    along = lambda a: fresh.reshape(-1, *[1] * (a.ndim - 1))
    # Over stages that lie on devices of their own, a roll by one is a permute to the neighbour.
    return jax.tree.map(lambda a, b: jnp.where(along(a), b, jnp.roll(a, 1, axis=0)), passed, new)


def add_up(total: Tree, new: Tree, turn: Tick) -> Tree:
    """Adds to the `total` of all chunks what those that work have given now."""

    def add(s, a, repeat, works):
        a = jnp.where(works, a, 0)
        return s + a[None] if s.shape[0] == 1 else s.at[repeat].add(a)

    return jax.tree.map(lambda s, a: jax.vmap(add)(s, a, turn.repeat, turn.works), total, new)


def of_stage(tree: Tree, stage: int) -> Tree:
    """Copies what one stage has to all devices, as a sum: a slice would first be moved to the first stage."""

    def only(a):
        here = (jnp.arange(a.shape[0]) == stage).reshape(-1, *[1] * (a.ndim - 1))
        return jnp.sum(jnp.where(here, a, 0), axis=0, dtype=a.dtype)

    return jax.tree.map(only, tree)


def split_microbatches(a: jax.Array, plan: Plan) -> jax.Array:
    """Cuts rows into `[microbatches, parts, rows, ...]`, without the second axis if there are no parts.

    Microbatch `i` takes every `n`-th row, so that rows that are spread over devices stay so in each, and those that the
    stages have shared come to all of them.
    """
    rest = P.UNCONSTRAINED
    with in_a_stage():
        layout = current()
        assert layout is not None  # of whoever made the plan
        rows, _ = drop_uneven(layout.spec("batch"), a.shape, layout.mesh)
    a = lax.with_sharding_constraint(a, P(*(*rows, None)[:1], *[rest] * (a.ndim - 1)))
    # [rows, ...] -> [rows of one, microbatches, ...] -> [microbatches, rows of one, ...]
    dealt = jnp.swapaxes(a.reshape(-1, plan.schedule.microbatches, *a.shape[1:]), 0, 1)
    if not plan.parts:
        return dealt
    cut = dealt.reshape(len(dealt), parts_in(plan.parts), -1, *a.shape[1:])
    return lax.with_sharding_constraint(cut, P(rest, plan.parts, *[rest] * a.ndim))


def merge_microbatches(a: jax.Array, plan: Plan) -> jax.Array:
    """Undoes `split_microbatches`."""
    a = a.reshape(len(a), -1, *a.shape[3:]) if plan.parts else a
    return jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:])


def placed(tree: Tree, plan: Plan) -> Tree:
    """Puts the leading axis, that of the stages, onto the devices of the mesh axis; all else is as it was."""
    rest = P.UNCONSTRAINED
    put = lambda a: lax.with_sharding_constraint(a, P(plan.axis, *[rest] * (a.ndim - 1)))
    return jax.tree.map(put, tree)
