"""The pipeline in which backward passes begin before the forward passes have ended (1F1B, arXiv:1806.03377).

In every tick each stage computes a chunk of its layers for one microbatch forward and, for an earlier one, backward.
In between it keeps what entered each layer, for at most `2 S V - 1` pairs of microbatch and chunk (`S` stages, `V`
repeats) however many there are, and computes one layer at a time again. No stage goes backward in the first `S V - 1`
ticks nor forward in the last, so these are loops of their own, and all of it takes the time of two passes of
`pipelined`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from maxlib.sharding._gpipe import (
    Plan,
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
from maxlib.sharding._layout import in_a_stage


class _Flow(NamedTuple):
    """Carry of the loops over ticks; the leading axis of all but the last two is that of the stages.

    Attributes:
        passed: what each stage made last, `[stages, rows, ...]`.
        kept: inputs of layers by tick, modulo their number, `[stages, kept, size, rows, ...]`.
        returned: gradients of the inputs, `[stages, rows, ...]`.
        grad_in: the last of them by microbatch, `[stages, microbatches, rows, ...]`.
        layers: sums of the layers' gradients, `[stages, repeats, size, ...]`.
        aux: sums of what layers report.
        head: sums of the head's gradients.
        loss: sums of the loss and of what it reports.
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
    """Inputs and functions that all ticks share.

    Attributes:
        through: `(stage_params, x, ctx) -> (x, more, aux, kept)`, a chunk forward.
        back: `(stage_params, total, kept, ctx, d, repeat, works) -> (total with the gradients of layers, d)`.
        loss: `(head, x, ctx) -> (loss and stats, gradients of the head, d)`.
        stage_params: layers, and what else a stage is made of.
        head: parameters of the loss.
        x: inputs by microbatch.
        ctx: what else layers and loss read, by microbatch.
        plan: the pipeline.
    """

    through: Callable[..., Tree]
    back: Callable[..., Tree]
    loss: Callable[..., Tree]
    stage_params: tuple[Tree, ...]
    head: Tree
    x: Tree
    ctx: Tree
    plan: Plan


def one_f_one_b(
    stage: Callable[..., tuple[Tree, jax.Array, Tree]],
    loss: Callable[..., tuple[jax.Array, Tree]],
    layers: Tree,
    fixed: Tree,
    head: Tree,
    x: Tree,
    ctx: Tree,
    *,
    by_row: bool = False,
) -> tuple[tuple[jax.Array, Tree, Tree], tuple[Tree, Tree, Tree]]:
    """Computes the loss over a batch and its gradients, in the pipeline of the layout in use.

    Args:
        stage: `(layers, fixed, works, x, ctx) -> (x, more, aux)`, with a scalar `more` that adds to the loss.
        loss: `(head, x, ctx) -> (sum, stats)` of a microbatch that has left the last stage.
        layers: as in `pipelined`.
        fixed: what else layers are made of, with the same leading axis and no gradient.
        head: parameters of the loss.
        x: as in `pipelined`.
        ctx: arrays, all with a leading batch axis.
        by_row: all that stage and loss make of a row depends on that row only, and sums over rows; gradients are then
            summed over the data axes once.

    Returns:
        `(loss, stats, aux)`, sums over microbatches but for aux, their mean; and the gradients of `(layers, head, x)`.

    Raises:
        ValueError: for layers, rows and microbatches that do not fit the stages, and without a pipeline.
    """
    plan = planned(layers, x)
    plan = plan if by_row else plan._replace(parts=())
    x, ctx = (jax.tree.map(lambda a: split_microbatches(a, plan), tree) for tree in (x, ctx))
    stage_params = in_stages(layers, plan), in_stages(fixed, plan), idle(plan)
    calls = _through(stage, plan), _back(stage, plan), _loss_of(loss, plan)
    work = _Work(*calls, stage_params, head, x, ctx, plan)
    flow, lead, ticks = _empty(work), plan.schedule.lead, plan.schedule.ticks
    tick = functools.partial(_tick, work)
    # Forward only, until a microbatch has left the last chunk; then both; then backward only.
    flow, _ = lax.scan(functools.partial(tick, backward=False), flow, jnp.arange(lead))
    flow, _ = lax.scan(tick, flow, jnp.arange(lead, ticks))
    flow, _ = lax.scan(functools.partial(tick, forward=False), flow, jnp.arange(ticks, ticks + lead))
    value, stats = flow.loss
    aux = jax.tree.map(lambda a: a / plan.schedule.microbatches, flow.aux)
    grad_in = jax.tree.map(lambda a: merge_microbatches(a, plan), of_stage(flow.grad_in, 0))
    grads = in_order(_sum_parts(flow.layers, 1, plan), plan), _sum_parts(flow.head, 0, plan), grad_in
    return (value, stats, in_order(aux, plan)), grads


def _one(tree: Tree) -> Tree:
    """Gives a layer a leading axis of one."""
    return jax.tree.map(lambda a: a[None], tree)


def _through(stage, plan):
    """Makes the forward pass of a chunk, layer by layer."""

    def run(stage_params, x, ctx):
        def step(x, stage_params):
            new, more, aux = stage(*_one(stage_params), x, ctx)
            return new, (more, jax.tree.map(lambda a: a[0], aux), x)

        x, (more, aux, kept) = lax.scan(step, x, stage_params)
        return x, jnp.sum(more), aux, kept

    on_parts = each_part(run, plan, (None, 0, 0))

    def through(stage_params, x, ctx):
        x, more, aux, kept = on_parts(stage_params, x, ctx)
        return x, jnp.sum(more), aux, kept

    return through


def _back(stage, plan):
    """Makes the backward pass of a chunk, from its last layer to its first; gradients are added where `total` lies."""

    def run(stage_params, total, kept, ctx, d, at, works):
        def step(flow, layer):
            (total, d), ((layer, *others), x, i) = flow, layer
            # Forward once more for this layer alone: nothing but its input was kept.
            (_, more), pull = jax.vjp(lambda layer, x: stage(*_one((layer, *others)), x, ctx)[:2], layer, x)
            new, d = pull((d, jnp.ones_like(more)))
            add = lambda s, a: s.at[at, i].add(jnp.where(works, a, 0))
            return (jax.tree.map(add, total, new), d), None

        number = jnp.arange(plan.chunks.size)
        return lax.scan(step, (total, d), (stage_params, kept, number), reverse=True)[0]

    return each_part(run, plan, (None, 0, 0, 0, 0, None, None))


def _loss_of(loss, plan):
    def once(head, x, ctx):
        with in_a_stage():  # a microbatch has too few rows for the stages to share
            return loss(head, x, ctx)

    def run(head, x, ctx):
        value, pull, stats = jax.vjp(lambda head, x: once(head, x, ctx), head, x, has_aux=True)
        return (value, stats), *pull(jnp.ones_like(value))

    on_parts = each_part(run, plan, (None, 0, 0))

    def run_and_sum(head, x, ctx):
        new, head, d = on_parts(head, x, ctx)
        return _sum_parts(new, 0, plan), _placed_parts(head, 0, plan), d

    return run_and_sum


def _sum_parts(tree: Tree, axis: int, plan: Plan) -> Tree:
    return jax.tree.map(lambda a: jnp.sum(a, axis, dtype=a.dtype), tree) if plan.parts else tree


def _placed_parts(tree: Tree, axis: int, plan: Plan) -> Tree:
    """Keeps sums of gradients on the devices of each part."""
    if not plan.parts:
        return tree
    rest = P.UNCONSTRAINED
    put = lambda a: lax.with_sharding_constraint(a, P(*[rest] * axis, plan.parts, *[rest] * (a.ndim - axis - 1)))
    return jax.tree.map(put, tree)


def _tick(work, flow, t, *, forward=True, backward=True):
    if forward:
        flow = _forward(work, flow, t)
    if not backward:
        return flow, None
    grad_in = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), flow.passed)
    if forward:
        flow, grad_in = _loss(work, flow, t)
    return _backward(work, flow, grad_in, t), None


def _forward(work, flow, t):
    plan, schedule = work.plan, work.plan.schedule
    turn, first = schedule.forward(t, schedule.all), schedule.forward(t, 0).microbatch
    new = jax.tree.map(lambda a: a[first][None], work.x)
    entering = placed(stage_inputs(flow.passed, new, turn), plan)
    ctx = jax.tree.map(lambda a: a[turn.microbatch], work.ctx)
    passed, more, aux, kept = each_stage(work.through, plan)(work.stage_params, turn.repeat, entering, ctx)
    kept = jax.tree.map(lambda k, a: k.at[:, t % schedule.kept].set(a), flow.kept, placed(kept, plan))
    value, stats = flow.loss
    value = value + jnp.sum(jnp.where(turn.works, more, 0))
    return flow._replace(passed=placed(passed, plan), kept=kept, aux=add_up(flow.aux, aux, turn), loss=(value, stats))


def _loss(work, flow, t):
    """Computes the loss of what leaves the last stage in this tick for good, and its gradient."""
    schedule = work.plan.schedule
    turn = schedule.forward(t, schedule.stages - 1)
    left = of_stage(flow.passed, schedule.stages - 1)
    ctx = jax.tree.map(lambda a: a[turn.microbatch], work.ctx)
    run = lambda left: work.loss(work.head, left, ctx)
    if schedule.repeats == 1:
        new, head, grad_in = run(left)
    else:  # most of the time it goes around again
        none = lambda left: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(run, left))
        new, head, grad_in = lax.cond(turn.repeat == schedule.repeats - 1, run, none, left)
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    return flow._replace(head=add(flow.head, head), loss=add(flow.loss, new)), grad_in


def _backward(work, flow, grad_in, t):
    plan, schedule = work.plan, work.plan.schedule
    turn, first = schedule.backward(t, schedule.all), schedule.backward(t, 0).microbatch
    lost = (schedule.all == schedule.stages - 1) & (turn.repeat == schedule.repeats - 1)
    along = lambda a: lost.reshape(-1, *[1] * (a.ndim - 1))
    # Gradients go to the stage before; the last one takes that of the loss.
    join = lambda a, b: jnp.where(along(a), b[None], jnp.roll(a, -1, axis=0))
    grad_in = placed(jax.tree.map(join, flow.returned, grad_in), plan)
    kept = jax.vmap(lambda kept, at: jax.tree.map(lambda k: k[at], kept))(flow.kept, turn.entered % schedule.kept)
    ctx = jax.tree.map(lambda a: a[turn.microbatch], work.ctx)
    args = flow.layers, placed(kept, plan), ctx, grad_in, turn.repeat, turn.works
    total, returned = each_stage(work.back, plan)(work.stage_params, turn.repeat, *args)
    # Chunks are met from the last to the first, which overwrites what came before.
    grad_in = jax.tree.map(lambda c, a: c.at[:, first].set(a), flow.grad_in, returned)
    total = _placed_parts(placed(total, plan), 1, plan)
    return flow._replace(layers=total, returned=placed(returned, plan), grad_in=placed(grad_in, plan))


def _empty(work) -> _Flow:
    plan, schedule = work.plan, work.plan.schedule
    zeros = lambda tree, *lead: jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), tree)
    first = lambda tree: jax.tree.map(lambda a: a[0], tree)
    stages, (chunk, *ready) = (
        schedule.stages,
        jax.eval_shape(lambda: (jax.tree.map(lambda a: a[0, 0], work.stage_params), first(work.x), first(work.ctx))),
    )
    passed, _, aux, kept = jax.eval_shape(work.through, chunk, *ready)
    loss, head, _ = jax.eval_shape(work.loss, work.head, *ready)
    x, grad_in = zeros(passed, stages), zeros(passed, stages, schedule.microbatches)
    kept, lead = zeros(kept, stages, schedule.kept), (parts_in(plan.parts),) if plan.parts else ()
    layers = jax.tree.map(lambda a: jnp.zeros((stages, *lead, *a.shape[1:]), a.dtype), work.stage_params[0])
    x, kept, grad_in, layers = placed((x, kept, grad_in, layers), plan)
    layers, head = _placed_parts(layers, 1, plan), _placed_parts(zeros(head), 0, plan)
    return _Flow(x, kept, x, grad_in, layers, zeros(aux, stages, schedule.repeats), head, zeros(loss))
