"""The pipeline in which backward passes begin before the forward passes have ended (1F1B, arXiv:1806.03377).

In every tick each stage computes a chunk of its layers for one microbatch forward and, for an earlier one, backward.
In between it keeps what entered, for at most `2 S V - 1` pairs of microbatch and chunk (`S` stages, `V` repeats)
however many there are. No stage goes backward in the first `S V - 1` ticks nor forward in the last, so these are loops
of their own, and all of it takes the time of two passes of `pipelined`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxlib.sharding.pipeline import (
    Plan,
    Tree,
    add_up,
    deal,
    each_stage,
    enter,
    gather_in,
    idle,
    in_order,
    in_stages,
    of_stage,
    placed,
    planned,
)
from maxlib.sharding.rules import in_a_stage


class _Flow(NamedTuple):
    """What goes from tick to tick; the leading axis of all but the last two is that of the stages.

    passed: what each stage made last. kept: inputs by tick, modulo their number. returned: gradients of the inputs, and
    came: the last of them by microbatch. layers: sums of the layers' gradients, aux: of what they report. head, loss:
    sums of what the loss gave.
    """

    passed: Tree
    kept: Tree
    returned: Tree
    came: Tree
    layers: Tree
    aux: Tree
    head: Tree
    loss: Tree


class _Parts(NamedTuple):
    """What all ticks share. stage: `(held, x, ctx) -> (x, more, aux)`. held: layers, and what else a stage is made
    of."""

    stage: Callable[..., tuple[Tree, jax.Array, Tree]]
    loss: Callable[..., tuple[jax.Array, Tree]]
    held: tuple[Tree, ...]
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
) -> tuple[tuple[jax.Array, Tree, Tree], tuple[Tree, Tree, Tree]]:
    """The loss over a batch and its gradients, in the pipeline of the rules in use.

    stage: `(layers, fixed, works, x, ctx) -> (x, more, aux)`, with a scalar `more` that adds to the loss. loss: `(head,
    x, ctx) -> (sum, stats)` of a microbatch that has left the last stage. layers, works, x and ctx: as in `pipelined`;
    every array of ctx has a leading batch axis. fixed: what else layers are made of, with the same leading axis and no
    gradient. Returns `(loss, stats, aux)`, sums over microbatches but for aux, their mean; and the gradients of
    `(layers, head, x)`. Raises ValueError for layers, rows and microbatches that do not fit the stages, and without a
    pipeline.
    """
    plan = planned(layers, x)
    x, ctx = (jax.tree.map(lambda a: deal(a, plan.schedule.microbatches), tree) for tree in (x, ctx))
    held = in_stages(layers, plan), in_stages(fixed, plan), idle(plan)
    parts = _Parts(lambda held, x, ctx: stage(*held, x, ctx), _on_all_stages(loss), held, head, x, ctx, plan)
    flow, lead, ticks = _empty(parts), plan.schedule.lead, plan.schedule.ticks
    tick = functools.partial(_tick, parts)
    flow, _ = lax.scan(functools.partial(tick, backward=False), flow, jnp.arange(lead))
    flow, _ = lax.scan(tick, flow, jnp.arange(lead, ticks))
    flow, _ = lax.scan(functools.partial(tick, forward=False), flow, jnp.arange(ticks, ticks + lead))
    value, stats = flow.loss
    aux = jax.tree.map(lambda a: a / plan.schedule.microbatches, flow.aux)
    came = jax.tree.map(gather_in, of_stage(flow.came, 0))
    return (value, stats, in_order(aux, plan)), (in_order(flow.layers, plan), flow.head, came)


def _on_all_stages(loss):
    """A microbatch has too few rows for the stages to share."""

    def run(*args):
        with in_a_stage():
            return loss(*args)

    return run


def _tick(parts, flow, t, *, forward=True, backward=True):
    if forward:
        flow = _forward(parts, flow, t)
    if not backward:
        return flow, None
    came = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), flow.passed)
    if forward:
        flow, came = _loss(parts, flow, t)
    return _backward(parts, flow, came, t), None


def _forward(parts, flow, t):
    plan, schedule = parts.plan, parts.plan.schedule
    turn, first = schedule.forward(t, schedule.all), schedule.forward(t, 0).microbatch
    new = jax.tree.map(lambda a: a[first][None], parts.x)
    entering = placed(enter(flow.passed, new, turn), plan.axis)
    kept = jax.tree.map(lambda k, a: k.at[:, t % schedule.kept].set(a), flow.kept, entering)
    ctx = jax.tree.map(lambda a: a[turn.microbatch], parts.ctx)
    passed, more, aux = each_stage(parts.stage, plan)(parts.held, turn.repeat, entering, ctx)
    value, stats = flow.loss
    value = value + jnp.sum(jnp.where(turn.works, more, 0))
    return flow._replace(
        passed=placed(passed, plan.axis), kept=kept, aux=add_up(flow.aux, aux, turn), loss=(value, stats)
    )


def _loss(parts, flow, t):
    """The loss of what leaves the last stage in this tick for good, and its gradient."""
    schedule = parts.plan.schedule
    turn = schedule.forward(t, schedule.stages - 1)
    left = of_stage(flow.passed, schedule.stages - 1)
    ctx = jax.tree.map(lambda a: a[turn.microbatch], parts.ctx)

    def run(left):
        value, pull, stats = jax.vjp(lambda head, x: parts.loss(head, x, ctx), parts.head, left, has_aux=True)
        return (value, stats), *pull(jnp.ones_like(value))

    if schedule.repeats == 1:
        new, head, came = run(left)
    else:  # most of the time it goes around again
        none = lambda left: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(run, left))
        new, head, came = lax.cond(turn.repeat == schedule.repeats - 1, run, none, left)
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    return flow._replace(head=add(flow.head, head), loss=add(flow.loss, new)), came


def _backward(parts, flow, came, t):
    plan, schedule = parts.plan, parts.plan.schedule
    turn, first = schedule.backward(t, schedule.all), schedule.backward(t, 0).microbatch
    lost = (schedule.all == schedule.stages - 1) & (turn.repeat == schedule.repeats - 1)
    along = lambda a: lost.reshape(-1, *[1] * (a.ndim - 1))
    join = lambda a, b: jnp.where(along(a), b[None], jnp.roll(a, -1, axis=0))
    came = placed(jax.tree.map(join, flow.returned, came), plan.axis)
    entered = jax.vmap(lambda kept, at: jax.tree.map(lambda k: k[at], kept))(flow.kept, turn.entered % schedule.kept)
    ctx = jax.tree.map(lambda a: a[turn.microbatch], parts.ctx)

    def pull(held, x, ctx, d):
        (_, more), pull = jax.vjp(lambda layers, x: parts.stage((layers, *held[1:]), x, ctx)[:2], held[0], x)
        return pull((d, jnp.ones_like(more)))

    layers, returned = each_stage(pull, plan)(parts.held, turn.repeat, placed(entered, plan.axis), ctx, came)
    # Chunks are met from the last to the first, which overwrites what came before.
    came = jax.tree.map(lambda c, a: c.at[:, first].set(a), flow.came, returned)
    total = placed(add_up(flow.layers, layers, turn), plan.axis)
    return flow._replace(layers=total, returned=placed(returned, plan.axis), came=placed(came, plan.axis))


def _empty(parts) -> _Flow:
    schedule = parts.plan.schedule
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    some = lambda tree, *lead: jax.tree.map(lambda a: jnp.zeros((schedule.stages, *lead, *a.shape[1:]), a.dtype), tree)
    first = lambda tree: jax.tree.map(lambda a: a[0], tree)
    run, repeat = each_stage(parts.stage, parts.plan), jnp.zeros(schedule.stages, int)
    _, _, aux = jax.eval_shape(run, parts.held, repeat, some(parts.x), some(parts.ctx))
    value = zeros(jax.eval_shape(parts.loss, parts.head, first(parts.x), first(parts.ctx)))
    new = some(parts.x), some(parts.x, schedule.kept), some(parts.x, schedule.microbatches), zeros(parts.held[0])
    x, kept, came, layers = placed(new, parts.plan.axis)
    return _Flow(x, kept, x, came, layers, some(aux, schedule.repeats), zeros(parts.head), value)
