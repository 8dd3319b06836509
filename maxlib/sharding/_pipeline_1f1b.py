"""A pipeline whose backward passes begin before all forward passes have ended (1F1B, arXiv:1806.03377).

In every tick each stage runs a chunk of its layers forward for one microbatch, and backward for an earlier one. It
keeps the input of each layer for at most `2 S V - 1` pairs of microbatch and chunk (`S` stages, `V` repeats), no matter
how many microbatches there are; GPipe keeps the inputs of all of them. The backward pass recomputes one layer at a
time. No stage runs backward in the first `S V - 1` ticks, and none forward in the last `S V - 1`, so these ticks have
separate loops.
"""

# S = 3 stages, M = 4 microbatches, V = 1. F2 is microbatch 2 forward, B0 is microbatch 0 backward:
#
#   tick       0     1     2     3     4     5     6     7
#   stage 0    F0    F1    F2    F3    B0    B1    B2    B3
#   stage 1          F0    F1    F2B0  F3B1  B2    B3
#   stage 2                F0B0  F1B1  F2B2  F3B3
#             | forward   | both                  | backward  |
# The three loops have lead = S V - 1, ticks - lead and lead ticks. In the middle loop the last stage computes the loss
# of the microbatch that it has just finished, and starts its backward pass in the same tick.

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from maxlib.sharding._gpipe import (
    PipelineSpec,
    Tree,
    add_up,
    each_part,
    each_stage,
    idle,
    in_order,
    in_stages,
    merge_microbatches,
    of_stage,
    parts_in,
    placed,
    planned,
    split_microbatches,
    stage_inputs,
)
from maxlib.sharding._layout import inside_stage


class _Flow(NamedTuple):
    """Carry of the loops over ticks; all but the last two fields have a leading stage axis.

    If a microbatch is split into parts (`PipelineSpec.parts`), an axis of parts comes before `rows` or `repeats`.

    Attributes:
        passed: Outputs of the last tick, `[stages, rows, ...]`.
        kept: Inputs of layers, a ring buffer over ticks, `[stages, kept, size, rows, ...]`.
        returned: Gradients of the chunk inputs of the last tick, `[stages, rows, ...]`.
        grad_in: Gradients of `x` by microbatch, valid on stage 0, `[stages, microbatches, rows, ...]`.
        layers: Sums of the layers' gradients, at least float32, `[stages, repeats, size, ...]`.
        aux: Sums of the layers' reports, `[stages, repeats, size, ...]`.
        head: Sums of the head's gradients, at least float32.
        loss: Sums of the loss and of its statistics.
    """

    passed: Tree
    kept: Tree
    returned: Tree
    grad_in: Tree
    layers: Tree
    aux: Tree
    head: Tree
    loss: Tree


class _Work(NamedTuple):
    """Inputs and functions shared by all ticks; `d` is the gradient of an `x`.

    Attributes:
        through: `(stage_params, x, ctx) -> (x, more, aux, kept)`, the forward pass of a chunk.
        back: `(stage_params, total, kept, ctx, d, repeat, active) -> (total plus layer gradients, d)`, the backward
            pass of a chunk.
        loss: `(head, x, ctx) -> (loss and stats, gradients of the head, d)`.
        stage_params: Layers, other arrays of the stage, and the mask of active slots, each `[stages, repeats, size,
            ...]`.
        head: Parameters of the loss.
        x: Inputs by microbatch, `[microbatches, rows, ...]`.
        ctx: Other inputs of layers and loss, `[microbatches, rows, ...]`.
        plan: The pipeline.
    """

    through: Callable[..., Tree]
    back: Callable[..., Tree]
    loss: Callable[..., Tree]
    stage_params: tuple[Tree, ...]
    head: Tree
    x: Tree
    ctx: Tree
    plan: PipelineSpec


def one_f_one_b(
    stage: Callable[..., tuple[Tree, jax.Array, Tree]],
    loss: Callable[..., tuple[jax.Array, Tree]],
    layers: Tree,
    fixed: Tree,
    head: Tree,
    x: Tree,
    ctx: Tree,
    *,
    sums_over_rows: bool = False,
) -> tuple[tuple[jax.Array, Tree, Tree], tuple[Tree, Tree, Tree]]:
    """Computes the loss of a batch and its gradients with the 1F1B schedule, in the pipeline of the active layout.

    Args:
        stage: `(layers, fixed, active, x, ctx) -> (x, more, aux)`; the scalar `more` is added to the loss. `active`
            marks the layers that are not idle, as in `pipelined`.
        loss: `(head, x, ctx) -> (sum, stats)` of a microbatch that has left the last stage.
        layers: Arrays with a leading axis of equal layers, `[periods, ...]`.
        fixed: Other arrays of the layers, with the same leading axis; they get no gradient.
        head: Parameters of the loss.
        x: Arrays with a leading batch axis, `[rows, ...]`.
        ctx: Other inputs of layers and loss, all with a leading batch axis.
        sums_over_rows: Promises that `stage` and `loss` treat rows independently and sum over them. Gradients are then
            summed over the data axes once per step instead of once per tick.

    Returns:
        `(loss, stats, aux)` and the gradients of `(layers, head, x)`. Loss and stats are sums over microbatches, `aux`
        is the mean.

    Raises:
        ValueError: when layers, rows or microbatches do not fit the stages, or when the layout has no pipeline.
    """
    plan = planned(layers, x)
    plan = plan if sums_over_rows else plan._replace(parts=())
    # [rows, ...] -> [microbatches, rows of one, ...]
    x, ctx = (jax.tree.map(lambda a: split_microbatches(a, plan), tree) for tree in (x, ctx))
    # [periods, ...] -> [stages, repeats, size, ...]
    stage_params = in_stages(layers, plan), in_stages(fixed, plan), idle(plan)
    calls = _through(stage, plan), _back(stage, plan), _loss_of(loss, plan)
    work = _Work(*calls, stage_params, head, x, ctx, plan)
    flow, lead, ticks = _empty(work), plan.schedule.lead, plan.schedule.ticks
    tick = functools.partial(_tick, work)
    # Only forward, until a microbatch reaches the last chunk; then both; then only backward. Three programs take
    # compile time, but one loop over all ticks + lead would compute masked backward passes in the first ticks.
    flow, _ = lax.scan(functools.partial(tick, backward=False), flow, jnp.arange(lead))
    flow, _ = lax.scan(tick, flow, jnp.arange(lead, ticks))
    flow, _ = lax.scan(functools.partial(tick, forward=False), flow, jnp.arange(ticks, ticks + lead))
    value, stats = flow.loss
    aux = jax.tree.map(lambda a: a / plan.schedule.microbatches, flow.aux)
    # Stage 0 has chunk 0, which gives the gradients of x: [stages, microbatches, ...] -> [rows, ...]
    grad_in = jax.tree.map(lambda a: merge_microbatches(a, plan), of_stage(flow.grad_in, 0))
    grads = in_order(_sum_parts(flow.layers, 1, plan), plan), _sum_parts(flow.head, 0, plan), grad_in
    return (value, stats, in_order(aux, plan)), grads


def _one(tree: Tree) -> Tree:
    """Gives a layer a leading axis of size 1, because `stage` takes a stack."""
    return jax.tree.map(lambda a: a[None], tree)


def _through(stage, plan):
    """Returns a function that runs a chunk forward, layer by layer, and saves the input of each layer."""

    def run(stage_params, x, ctx):
        def step(x, stage_params):
            new, more, aux = stage(*_one(stage_params), x, ctx)
            # Stack the input x of every layer, the only values that the backward pass saves.
            return new, (more, jax.tree.map(lambda a: a[0], aux), x)

        x, (more, aux, kept) = lax.scan(step, x, stage_params)
        return x, jnp.sum(more), aux, kept

    on_parts = each_part(run, plan, (None, 0, 0))  # all parts share the weights

    def through(stage_params, x, ctx):
        x, more, aux, kept = on_parts(stage_params, x, ctx)
        return x, jnp.sum(more), aux, kept

    return through


def _back(stage, plan):
    """Returns a function that runs a chunk backward, from its last layer to its first, adding gradients to `total`."""

    def run(stage_params, total, kept, ctx, d, at, active):
        def step(flow, kept_of_layer):
            (total, d), ((weights, *others), x, i) = flow, kept_of_layer
            # Recompute this layer's forward pass from its saved input. `more` is added to the loss: dL/d(more) = 1.
            (_, more), pull = jax.vjp(lambda weights, x: stage(*_one((weights, *others)), x, ctx)[:2], weights, x)
            new, d = pull((d, jnp.ones_like(more)))

            # total is [repeats, size, ...]. In the bubble `active` is False and the values belong to no microbatch.
            def add(s, a):
                return s.at[at, i].add(jnp.where(active, a, 0))

            return (jax.tree.map(add, total, new), d), None

        number = jnp.arange(plan.chunks.size)
        return lax.scan(step, (total, d), (stage_params, kept, number), reverse=True)[0]

    return each_part(run, plan, (None, 0, 0, 0, 0, None, None))


def _loss_of(loss, plan):
    """Returns a function that computes the loss of a microbatch and its gradients with respect to the head and x."""

    def once(head, x, ctx):
        with inside_stage():  # a microbatch has too few rows to split over the stages
            return loss(head, x, ctx)

    def run(head, x, ctx):
        value, pull, stats = jax.vjp(lambda head, x: once(head, x, ctx), head, x, has_aux=True)
        return (value, stats), *pull(jnp.ones_like(value))

    on_parts = each_part(run, plan, (None, 0, 0))

    def run_and_sum(head, x, ctx):
        new, head, d = on_parts(head, x, ctx)
        return _sum_parts(new, 0, plan), _placed_parts(head, 0, plan), d

    return run_and_sum


def _sum_parts(tree: Tree, axis: int, plan: PipelineSpec) -> Tree:
    """Sums over the axis of parts, if there is one."""
    return jax.tree.map(lambda a: jnp.sum(a, axis, dtype=a.dtype), tree) if plan.parts else tree


def _placed_parts(tree: Tree, axis: int, plan: PipelineSpec) -> Tree:
    """Keeps the gradients of each part on its devices, so that ticks accumulate them without communication."""
    if not plan.parts:
        return tree
    rest = P.UNCONSTRAINED

    def put(a):
        return lax.with_sharding_constraint(a, P(*[rest] * axis, plan.parts, *[rest] * (a.ndim - axis - 1)))

    return jax.tree.map(put, tree)


def _tick(work, flow, t, *, forward=True, backward=True):
    """Runs one tick of all stages: a forward chunk, the loss of the finished microbatch, a backward chunk."""
    if forward:
        flow = _forward(work, flow, t)
    if not backward:
        return flow, None
    grad_in = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), flow.passed)
    if forward:
        flow, grad_in = _loss(work, flow, t)
    return _backward(work, flow, grad_in, t), None


def _forward(work, flow, t):
    """Runs a chunk forward on every stage, and stores the inputs of its layers."""
    plan, schedule = work.plan, work.plan.schedule
    now, first = schedule.forward(t, schedule.all), schedule.forward(t, 0).microbatch
    new = jax.tree.map(lambda a: a[first][None], work.x)  # [microbatches, rows, ...] -> [1, rows, ...]
    entering = placed(stage_inputs(flow.passed, new, now), plan)
    # Every stage reads the context of its own microbatch: [microbatches, rows, ...] -> [stages, rows, ...]
    ctx = jax.tree.map(lambda a: a[now.microbatch], work.ctx)
    passed, more, aux, kept = each_stage(work.through, plan)(work.stage_params, now.repeat, entering, ctx)
    # Ring buffer: the slot of tick t - kept is free, because its backward pass came at most 2 lead = kept - 1 ticks
    # later.
    kept = jax.tree.map(lambda k, a: k.at[:, t % schedule.kept].set(a), flow.kept, placed(kept, plan))
    value, stats = flow.loss
    value = value + jnp.sum(jnp.where(now.active, more, 0))
    return flow._replace(passed=placed(passed, plan), kept=kept, aux=add_up(flow.aux, aux, now), loss=(value, stats))


def _loss(work, flow, t):
    """Computes the loss of the microbatch that leaves the last chunk in this tick, and its gradients."""
    schedule = work.plan.schedule
    now = schedule.forward(t, schedule.stages - 1)
    left = of_stage(flow.passed, schedule.stages - 1)
    ctx = jax.tree.map(lambda a: a[now.microbatch], work.ctx)

    def run(left):
        return work.loss(work.head, left, ctx)

    if schedule.repeats == 1:
        new, head, grad_in = run(left)
    else:  # in V - 1 of V ticks the microbatch starts another round, and the head need not run

        def none(left):
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(run, left))

        new, head, grad_in = lax.cond(now.repeat == schedule.repeats - 1, run, none, left)

    def add(a, b):
        return jax.tree.map(jnp.add, a, b)

    return flow._replace(head=add(flow.head, head), loss=add(flow.loss, new)), grad_in


def _backward(work, flow, grad_in, t):
    """Runs a chunk backward on every stage; `grad_in` is the gradient of the loss, for the last chunk."""
    plan, schedule = work.plan, work.plan.schedule
    now, first = schedule.backward(t, schedule.all), schedule.backward(t, 0).microbatch
    is_last = (schedule.all == schedule.stages - 1) & (now.repeat == schedule.repeats - 1)
    grad_in = placed(_arriving(flow.returned, grad_in, is_last), plan)
    # Each stage looks up its own slot: [stages, kept, size, rows, ...] -> [stages, size, rows, ...]
    kept = jax.vmap(lambda kept, at: jax.tree.map(lambda k: k[at], kept))(flow.kept, now.entered % schedule.kept)
    ctx = jax.tree.map(lambda a: a[now.microbatch], work.ctx)
    args = flow.layers, placed(kept, plan), ctx, grad_in, now.repeat, now.active
    total, returned = each_stage(work.back, plan)(work.stage_params, now.repeat, *args)
    # On stage 0 a microbatch passes backward through chunks (V - 1) S, ..., S, 0; the last write is the gradient of x.
    grad_in = jax.tree.map(lambda c, a: c.at[:, first].set(a), flow.grad_in, returned)
    total = _placed_parts(placed(total, plan), 1, plan)
    return flow._replace(layers=total, returned=placed(returned, plan), grad_in=placed(grad_in, plan))


def _arriving(returned: Tree, of_loss: Tree, is_last: jax.Array) -> Tree:
    """Returns the gradient with which each stage runs backward, `[stages, rows, ...]`: that of its successor's input,
    or of the loss for the last chunk.
    """

    def along(a):
        return is_last.reshape(-1, *[1] * (a.ndim - 1))

    # A roll by -1 sends gradients to the previous stage (from stage 0 to the last one if V > 1).
    def join(a, b):
        return jnp.where(along(a), b[None], jnp.roll(a, -1, axis=0))

    return jax.tree.map(join, returned, of_loss)


def _empty(work) -> _Flow:
    """Returns the zeros with which the loops begin, each array on the devices where it stays."""
    plan, schedule = work.plan, work.plan.schedule

    def zeros(tree, *lead):
        return jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), tree)

    # float32, because sums over microbatches in bfloat16 would lose the later ones.
    def sums(shape, a):
        return jnp.zeros(shape, jnp.promote_types(a.dtype, jnp.float32))

    def first(tree):
        return jax.tree.map(lambda a: a[0], tree)

    stages = schedule.stages
    # Shapes of one chunk's weights (of [stages, repeats, ...]), and of one microbatch: x and its context.
    chunk, *ready = jax.eval_shape(
        lambda: (jax.tree.map(lambda a: a[0, 0], work.stage_params), first(work.x), first(work.ctx))
    )
    passed, _, aux, kept = jax.eval_shape(work.through, chunk, *ready)
    loss, head, _ = jax.eval_shape(work.loss, work.head, *ready)
    x, grad_in = zeros(passed, stages), zeros(passed, stages, schedule.microbatches)
    kept, lead = zeros(kept, stages, schedule.kept), (parts_in(plan.parts),) if plan.parts else ()
    layers = jax.tree.map(lambda a: sums((stages, *lead, *a.shape[1:]), a), work.stage_params[0])
    head = jax.tree.map(lambda a: sums(a.shape, a), head)
    x, kept, grad_in, layers = placed((x, kept, grad_in, layers), plan)
    layers, head = _placed_parts(layers, 1, plan), _placed_parts(head, 0, plan)
    aux, loss = zeros(aux, stages, schedule.repeats), zeros(loss)
    return _Flow(passed=x, kept=kept, returned=x, grad_in=grad_in, layers=layers, aux=aux, head=head, loss=loss)
