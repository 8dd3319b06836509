"""The pipeline schedules GPipe (arXiv:1811.06965) and interleaved (arXiv:2104.04473), as one scan over ticks.

Each stage holds some of a stack's layers; microbatches pass from stage to stage, once or several times around. All
stages run the same program: arrays have a leading axis of stages, split over the mesh axis, and `vmap` runs a chunk of
layers on each. `_pipeline_chunks` has the schedule.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from maxlib.sharding._layout import current, inside_data_shard, inside_stage, replicated_over
from maxlib.sharding._pipeline_chunks import Chunks, Schedule, Tick, chunks
from maxlib.sharding._rules import drop_uneven

Tree = Any
# Names for `jax.checkpoint`: the input of a layer under remat, and the weights of a chunk.
LAYER_INPUT, _CHUNK = "layer_input", "chunk"
# These primitives only copy weights. If remat kept their results, each tick would keep a copy of a chunk's weights.
_CHEAP = ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "sharding_constraint")


class PipelineSpec(NamedTuple):
    """A pipeline for one stack and batch.

    Args:
        axis: The mesh axis of the stages.
        schedule: The schedule.
        chunks: The layers of each stage.
        parts: Data axes over which each device computes its own part of a microbatch, with gradients summed at the end.
    """

    axis: str
    schedule: Schedule
    chunks: Chunks
    parts: tuple[str, ...] = ()


class _Flow(NamedTuple):
    """Carry of the loop over ticks; the leading axis is that of the stages.

    Attributes:
        passed: Outputs of the last tick, `[stages, rows, ...]`.
        out: The last output for each microbatch, valid on the last stage, `[stages, microbatches, rows, ...]`.
        aux: Sums of the layers' reports, `[stages, repeats, size, ...]`.
    """

    passed: Tree
    out: Tree
    aux: Tree


def stages() -> int:
    """Returns the number of stages into which the active layout splits a stack; 1 without a pipeline."""
    layout = current()
    return 1 if layout is None or layout.pipeline is None else layout.mesh.shape[layout.pipeline.axis]


def pipelined(
    stage: Callable[..., tuple[Tree, Tree]], layers: Tree, x: Tree, ctx: Tree, *, remat: Callable | None = None
) -> tuple[Tree, Tree]:
    """Runs layers over `x`, in the pipeline of the active layout (GPipe, arXiv:1811.06965).

    Differentiable: the backward pass runs through the stages in the opposite order.

    Args:
        stage: `(layers, active, x, ctx) -> (x, aux)`. It gets some of the layers; `active` marks those that are not
            idle (None if all are active). An idle layer must return x unchanged.
        layers: Arrays with a leading axis of equal layers, `[periods, ...]`.
        x: Arrays with a leading batch axis, `[rows, ...]`.
        ctx: Other inputs of the layers. Arrays with a leading axis of `rows` are split like x; the others are shared by
            all rows.
        remat: The `jax.checkpoint` policy that `stage` applies to its layers, if any; `stage` must name their inputs
            `LAYER_INPUT`.

    Returns:
        x after all layers, and `aux` with a leading axis of layers, averaged over microbatches.

    Raises:
        ValueError: when layers, rows or microbatches do not fit the stages, or when the layout has no pipeline.
    """
    plan, rows = planned(layers, x), jax.tree.leaves(x)[0].shape[0]
    # Layers report on all rows of a microbatch (for example, router balance), so with aux a microbatch is not split.
    if jax.tree.leaves(jax.eval_shape(lambda *args: stage(layers, None, *args)[1], x, ctx)):
        plan = plan._replace(parts=())

    def is_row(a):
        return a.ndim > 0 and a.shape[0] == rows

    common = jax.tree.map(lambda a: 0 if is_row(a) else None, ctx)
    # [rows, ...] -> [microbatches, rows of one, ...]; arrays shared by all rows get a leading axis of size 1.
    ctx = jax.tree.map(lambda a: split_microbatches(a, plan) if is_row(a) else jnp.expand_dims(a, 0), ctx)

    # [microbatches, ...] -> [stages, microbatches, ...]: only stage 0 reads x, but with a copy on each stage its
    # gradient is summed over stages once instead of in every tick.
    def copies(a):
        return jnp.broadcast_to(a[None], (plan.schedule.stages, *a.shape))

    x = placed(jax.tree.map(lambda a: copies(split_microbatches(a, plan)), x), plan)
    # [periods, ...] -> [stages, repeats, (parts,) size, ...]
    stage_params = _in_parts(in_stages(layers, plan), plan), idle(plan)
    on_parts = each_part(stage, plan, (0, None, 0, common))
    on_stages = each_stage(lambda stage_params, x, ctx: on_parts(*stage_params, x, ctx), plan)

    def run(stage_params, now, x, ctx):
        return on_stages(stage_params, now.repeat, x, _rows_of(ctx, now.microbatch))

    if plan.schedule.repeats > 1:
        # `_chunk` selects different weights in each tick; without this policy autodiff would save each selection.
        run = jax.checkpoint(run, policy=_kept(remat), prevent_cse=False)
    tick, flow = functools.partial(_tick, run, stage_params, x, ctx, plan), _empty(run, stage_params, x, ctx, plan)
    flow, _ = lax.scan(tick, flow, jnp.arange(plan.schedule.ticks))
    out = jax.tree.map(lambda a: merge_microbatches(a, plan), of_stage(flow.out, plan.schedule.stages - 1))
    return out, in_order(jax.tree.map(lambda a: a / plan.schedule.microbatches, flow.aux), plan)


def _tick(run, stage_params, x, ctx, plan, flow, t):
    """Runs one tick: every stage takes the previous stage's last output and computes a chunk."""
    schedule, now = plan.schedule, plan.schedule.forward(t, plan.schedule.all)  # fields are [stages]
    # The microbatch that stage 0 reads in this tick: [stages, microbatches, rows, ...] -> [stages, rows, ...]
    new = jax.tree.map(lambda a: a[:, schedule.forward(t, 0).microbatch], x)
    entering = placed(stage_inputs(flow.passed, new, now), plan)
    passed, aux = run(stage_params, now, entering, ctx)
    # Every stage writes to its own `out`, though only the last stage's is read: finished microbatches then stay on
    # their device until the end. A microbatch's last round overwrites values of earlier rounds and of the bubble.
    leaving = schedule.forward(t, schedule.stages - 1).microbatch
    out = jax.tree.map(lambda o, a: o.at[:, leaving].set(a), flow.out, passed)
    return _Flow(placed(passed, plan), placed(out, plan), add_up(flow.aux, aux, now)), None


def _rows_of(ctx: Tree, microbatch: jax.Array) -> Tree:
    """Selects each stage's microbatch: `[microbatches, ...] -> [stages, ...]`; shared arrays have one entry for all."""
    return jax.tree.map(lambda a: a[microbatch if a.shape[0] > 1 else jnp.zeros_like(microbatch)], ctx)


def _empty(run, stage_params, x, ctx, plan) -> _Flow:
    """Returns the zeros with which the scan begins."""
    number, now = plan.schedule.stages, plan.schedule.forward(jnp.zeros((), int), plan.schedule.all)
    passed = placed(jax.tree.map(lambda a: jnp.zeros_like(a[:, 0]), x), plan)
    out = placed(jax.tree.map(jnp.zeros_like, x), plan)
    _, aux = jax.eval_shape(run, stage_params, now, passed, ctx)

    def total(a):
        return jnp.zeros((number, plan.schedule.repeats, *a.shape[1:]), a.dtype)

    return _Flow(passed, out, jax.tree.map(total, aux))


def planned(layers: Tree, x: Tree) -> PipelineSpec:
    """Fits the pipeline of the active layout to these layers and this batch.

    Args:
        layers: Arrays with a leading axis of layers.
        x: Arrays with a leading batch axis.

    Raises:
        ValueError: when there is no pipeline, when stages, microbatches and repeats do not divide layers and rows, or
            when a microbatch has fewer rows than devices that share it.
    """
    if (layout := current()) is None or (pipeline := layout.pipeline) is None:
        raise ValueError(
            "there is no pipeline: call this inside sharding.use(layout) with a layout that includes "
            "sharding.Pipeline('stage', microbatches=8), on a mesh with more than one stage"
        )
    number = layout.mesh.shape[pipeline.axis]
    periods, rows = (jax.tree.leaves(tree)[0].shape[0] for tree in (layers, x))
    cut = chunks(periods, number, pipeline.repeats)
    if rows % pipeline.microbatches:
        raise ValueError(
            f"a batch of {rows} rows cannot be split into {pipeline.microbatches} microbatches; change one of them. Images need a "
            "row of patches for each row of tokens, as data.pack makes them"
        )
    _check_shared(rows // pipeline.microbatches, pipeline.microbatches)
    if pipeline.repeats > 1 and pipeline.microbatches % number:
        raise ValueError(
            f"with repeats={pipeline.repeats}, microbatches must be a multiple of the {number} stages, got "
            f"{pipeline.microbatches}: they pass through the stages in groups of that size"
        )
    # Parts need mesh axes over which weights are replicated, and rows of a microbatch that these axes divide.
    axes = replicated_over()
    parts = axes if rows // pipeline.microbatches % parts_in(axes) == 0 else ()
    return PipelineSpec(pipeline.axis, Schedule(number, pipeline.microbatches, pipeline.repeats), cut, parts)


def _check_shared(rows: int, microbatches: int) -> None:
    """Raises ValueError when the data axes split a microbatch into more parts than it has rows."""
    with inside_stage():  # exclude the stages, which only split the batch outside the pipeline
        layout = current()
        assert layout is not None  # the caller runs inside one
        # Devices that share experts exchange tokens, so there may be fewer rows than such devices.
        axes = tuple(axis for axis in layout.mesh_axes("batch") if axis in ("data", "fsdp"))
        number = math.prod(layout.mesh.shape[axis] for axis in axes)
    if rows < number:
        raise ValueError(
            f"a microbatch must have a row for each of the {number} devices of {axes} that share it, got {rows} rows: "
            f"use a batch of at least {microbatches * number} rows, or fewer than {microbatches} microbatches"
        )


def parts_in(axes: tuple[str, ...]) -> int:
    """Returns the number of parts into which these mesh axes split a microbatch."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)


def in_stages(tree: Tree, plan: PipelineSpec) -> Tree:
    """Reshapes a stack's arrays from `[periods, ...]` to `[stages, repeats, size, ...]`, each stage on its devices."""
    shape = (plan.chunks.stages, plan.chunks.repeats, plan.chunks.size)
    if plan.chunks.in_order:
        # The layer axis is already split into these equal, consecutive parts, so a reshape moves no data.
        return placed(jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), tree), plan)
    # Otherwise the stages split another dimension (`Pipeline.parameter_spec`). Selecting layers is then local, and
    # resharding from that dimension to the stage axis is one all-to-all.
    return placed(jax.tree.map(lambda a: _whole(a[plan.chunks.index], 3), tree), plan)


def in_order(tree: Tree, plan: PipelineSpec) -> Tree:
    """Undoes `in_stages`, `[stages, repeats, size, ...] -> [periods, ...]`, for gradients and aux."""

    def flat(a):
        return a.reshape(-1, *a.shape[3:])

    if plan.chunks.in_order:
        return jax.tree.map(flat, tree)
    return jax.tree.map(lambda a: flat(_whole(a, 3))[plan.chunks.slots], tree)


def _whole(a: jax.Array, dims: int) -> jax.Array:
    """Replicates the first `dims` dimensions; the compiler chooses how to split the others."""
    return lax.with_sharding_constraint(a, P(*[None] * dims, *[P.UNCONSTRAINED] * (a.ndim - dims)))


def idle(plan: PipelineSpec) -> jax.Array | None:
    """Returns a mask of the slots that have a layer, `[stages, repeats, size]`; None if all do."""
    active = plan.chunks.active
    return None if active.all() else placed(jnp.asarray(active), plan)


def each_stage(run: Callable[..., Tree], plan: PipelineSpec) -> Callable[..., Tree]:
    """Returns a function `(stage_params, repeat, *args)` that calls `run(chunk, *args)` on every stage at once.

    Args:
        run: The work of one stage; its arrays have no axis of stages.
        plan: The pipeline. `vmap` maps over the stages and binds their axis to the mesh axis, for constraints inside.
    """

    def run_stage(stage_params, repeat, *args):
        with inside_stage():
            return run(_chunk(stage_params, repeat), *args)

    return jax.vmap(run_stage, spmd_axis_name=plan.axis)


def each_part(run: Callable[..., Tree], plan: PipelineSpec, in_axes: tuple[Any, ...]) -> Callable[..., Tree]:
    """Maps `run` over the parts of a microbatch, so that ticks do not sum gradients over the devices of different
    parts.

    Args:
        run: The work on one part.
        plan: The pipeline; if it has no parts, `run` is returned unchanged.
        in_axes: As in `jax.vmap`.
    """
    if not plan.parts:
        return run

    def parts(*args):
        with inside_data_shard(plan.parts):
            return jax.vmap(run, in_axes=in_axes, spmd_axis_name=plan.parts)(*args)

    return parts


def _in_parts(tree: Tree, plan: PipelineSpec) -> Tree:
    """Gives each part its own copy of the layers, so that their gradients are summed over parts once."""
    if not plan.parts:
        return tree
    number, rest = parts_in(plan.parts), P.UNCONSTRAINED

    def copies(a):
        # [stages, repeats, size, ...] -> [stages, repeats, parts, size, ...]. No device stores more: weights are
        # replicated over these axes anyway. The transpose of broadcast_to is the one sum over parts.
        a = jnp.broadcast_to(a[:, :, None], (*a.shape[:2], number, *a.shape[2:]))
        return lax.with_sharding_constraint(a, P(plan.axis, rest, plan.parts, *[rest] * (a.ndim - 3)))

    return jax.tree.map(copies, tree)


def _chunk(stage_params: Tree, repeat: jax.Array) -> Tree:
    """Selects a stage's chunk for this round, `[repeats, size, ...] -> [size, ...]`."""
    return jax.tree.map(lambda a: a[0] if a.shape[0] == 1 else checkpoint_name(a[repeat], _CHUNK), stage_params)


def _kept(remat: Callable | None) -> Callable:
    """Returns a tick's remat policy: that of `remat`, but without a chunk's weights, which are parameters."""

    def keep(primitive: Any, *args: Any, **params: Any) -> Any:
        if (name := params.get("name")) in (_CHUNK, LAYER_INPUT) and primitive.name == "name":
            return name == LAYER_INPUT
        return primitive.name not in _CHEAP if remat is None else remat(primitive, *args, **params)

    return keep


def stage_inputs(passed: Tree, new: Tree, now: Tick) -> Tree:
    """Gives each stage the output of the previous stage.

    Args:
        passed: Outputs of the last tick, `[stages, rows, ...]`.
        new: The next microbatch, `[stages, rows, ...]` or `[1, rows, ...]`. Stage 0 reads it in the first round, and
            the output of the last stage in later rounds.
        now: The work of each stage.
    """
    # [stages] -> [stages, 1, ...] in `along`, to broadcast over rows
    fresh = (jnp.arange(len(now.repeat)) == 0) & (now.repeat == 0)

    def along(a):
        return fresh.reshape(-1, *[1] * (a.ndim - 1))

    # The stage axis is split over devices, so XLA turns a roll by one into a collective-permute to the neighbour.
    return jax.tree.map(lambda a, b: jnp.where(along(a), b, jnp.roll(a, 1, axis=0)), passed, new)


def add_up(total: Tree, new: Tree, now: Tick) -> Tree:
    """Adds the layers' reports of this tick to `total`, `[stages, repeats, size, ...]`; the bubble adds nothing."""

    def add(s, a, repeat, active):
        a = jnp.where(active, a, 0)
        return s + a[None] if s.shape[0] == 1 else s.at[repeat].add(a)

    return jax.tree.map(lambda s, a: jax.vmap(add)(s, a, now.repeat, now.active), total, new)


def of_stage(tree: Tree, stage: int) -> Tree:
    """Copies the value of one stage to all devices: `[stages, ...] -> [...]`."""
    # A masked sum is one all-reduce; for a slice, XLA would first move the value to stage 0.

    def only(a):
        here = (jnp.arange(a.shape[0]) == stage).reshape(-1, *[1] * (a.ndim - 1))
        return jnp.sum(jnp.where(here, a, 0), axis=0, dtype=a.dtype)

    return jax.tree.map(only, tree)


def split_microbatches(a: jax.Array, plan: PipelineSpec) -> jax.Array:
    """Splits rows into `[microbatches, parts, rows, ...]`, without the second axis if there are no parts."""
    # Microbatch i takes the rows i, i + M, i + 2 M, ... A device holds consecutive rows, so each microbatch is spread
    # over all devices of the data axes without moving rows between them. For 8 rows on 2 devices, M = 2:
    #   device 0: 0 1 2 3, device 1: 4 5 6 7  ->  microbatch 0: 0 2 | 4 6, microbatch 1: 1 3 | 5 7
    # Outside the pipeline, rows may also be split over the stages, which gather them here.
    rest = P.UNCONSTRAINED
    with inside_stage():
        layout = current()
        assert layout is not None  # the layout of the plan
        rows, _ = drop_uneven(layout.spec("batch"), a.shape, layout.mesh)
    a = lax.with_sharding_constraint(a, P(*(*rows, None)[:1], *[rest] * (a.ndim - 1)))
    # [rows, ...] -> [rows of one, microbatches, ...] -> [microbatches, rows of one, ...]
    split = jnp.swapaxes(a.reshape(-1, plan.schedule.microbatches, *a.shape[1:]), 0, 1)
    if not plan.parts:
        return split
    # [microbatches, rows of one, ...] -> [microbatches, parts, rows of a part, ...]
    cut = split.reshape(len(split), parts_in(plan.parts), -1, *a.shape[1:])
    return lax.with_sharding_constraint(cut, P(rest, plan.parts, *[rest] * a.ndim))


def merge_microbatches(a: jax.Array, plan: PipelineSpec) -> jax.Array:
    """Undoes `split_microbatches`: `[microbatches, (parts,) rows of one, ...] -> [rows, ...]`."""
    a = a.reshape(len(a), -1, *a.shape[3:]) if plan.parts else a
    return jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:])


def placed(tree: Tree, plan: PipelineSpec) -> Tree:
    """Splits the leading stage axis over the mesh axis; the compiler chooses the other dimensions."""
    rest = P.UNCONSTRAINED

    def put(a):
        return lax.with_sharding_constraint(a, P(plan.axis, *[rest] * (a.ndim - 1)))

    return jax.tree.map(put, tree)
