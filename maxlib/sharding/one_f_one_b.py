"""The pipeline in which backward passes begin before the forward passes have ended (1F1B, arXiv:1806.03377).

In every tick each stage computes one microbatch forward and, of an earlier one, backward. Stage `s` of `S` meets
microbatch `m` forward in tick `m + s` and backward in tick `m + 2 S - 2 - s`; in between it keeps what entered, for at
most `2 S - 1` microbatches however many there are. No stage goes backward in the first `S - 1` ticks nor forward in
the last, so these are loops of their own, and all of it takes the time of GPipe.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxlib.sharding.pipeline import Tree, check_pipeline, cut, deal, gather_in, placed, required


class _Sizes(NamedTuple):
    stages: int
    microbatches: int

    @property
    def kept(self) -> int:
        """Of how many microbatches a stage keeps the input."""
        return 2 * self.stages - 1


class _Flow(NamedTuple):
    """What goes from tick to tick; the leading axis of the first four is that of the stages.

    passed: what each stage made last. kept: inputs by tick, modulo their number. returned: gradients of the inputs.
    layers: sums of the layers' gradients, aux: of what they report. head, loss: sums of what the loss gave.
    """

    passed: Tree
    kept: Tree
    returned: Tree
    layers: Tree
    aux: Tree
    head: Tree
    loss: Tree


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

    stage: `(layers, fixed, x, ctx) -> (x, more, aux)`, with a scalar `more` that adds to the loss. loss: `(head, x,
    ctx) -> (sum, stats)` of a microbatch that has left the last stage. layers, x and ctx: as in `pipelined`; every
    array of ctx has a leading batch axis. fixed: what else layers are made of, with the same leading axis and no
    gradient. Returns `(loss, stats, aux)`, sums over microbatches but for aux, their mean; and the gradients of
    `(layers, head, x)`. Raises ValueError for layers that the stages, or rows that the microbatches do not divide, and
    without a pipeline.
    """
    pipeline, num_stages = required()
    rows, sizes = jax.tree.leaves(x)[0].shape[0], _Sizes(num_stages, pipeline.microbatches)
    check_pipeline(layers, rows, pipeline, num_stages)
    x, ctx = (jax.tree.map(lambda a: deal(a, sizes.microbatches), tree) for tree in (x, ctx))
    held, fixed = (placed(jax.tree.map(lambda a: cut(a, num_stages), tree), pipeline) for tree in (layers, fixed))
    given, stage = stage, lambda layers_fixed, x, ctx: given(*layers_fixed, x, ctx)
    tick = functools.partial(_tick, stage, loss, (held, fixed), head, x, ctx, sizes, pipeline)
    flow = _empty(stage, loss, (held, fixed), head, x, ctx, sizes)
    flow = flow._replace(**{n: placed(getattr(flow, n), pipeline) for n in ("passed", "kept", "returned", "layers")})
    first, last = num_stages - 1, num_stages - 1 + sizes.microbatches
    flow, _ = lax.scan(functools.partial(tick, backward=False), flow, jnp.arange(first))
    flow, early = lax.scan(tick, flow, jnp.arange(first, last))
    flow, late = lax.scan(functools.partial(tick, forward=False), flow, jnp.arange(last, last + num_stages - 1))
    # The gradient of a microbatch's input comes out of stage 0 in tick m + 2 S - 2.
    join = lambda a, b: gather_in(jnp.concatenate([a[num_stages - 1 :], b]))
    whole = lambda a: a.reshape(-1, *a.shape[2:])
    value, stats = flow.loss
    aux = jax.tree.map(lambda a: whole(a) / sizes.microbatches, flow.aux)
    return (value, stats, aux), (jax.tree.map(whole, flow.layers), flow.head, jax.tree.map(join, early, late))


def _tick(stage, loss, held, head, x, ctx, sizes, pipeline, flow, t, *, forward=True, backward=True):
    number = jnp.arange(sizes.stages)
    at = lambda tree, m: jax.tree.map(lambda a: a[jnp.clip(m, 0, sizes.microbatches - 1)], tree)
    if forward:
        flow = _forward(stage, held, at(x, t), at(ctx, t - number), sizes, pipeline, flow, t)
    if not backward:
        return flow, None
    came = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), flow.passed)
    if forward:
        flow, came = _loss(loss, head, at(ctx, t - sizes.stages + 1), flow)
    m = t - (2 * sizes.stages - 2 - number)
    flow = _backward(stage, held, at(ctx, m), came, m, sizes, pipeline, flow)
    return flow, jax.tree.map(lambda a: a[0], flow.returned)


def _forward(stage, held, entering, ctx, sizes, pipeline, flow, t):
    entering = jax.tree.map(lambda a, b: jnp.roll(a, 1, axis=0).at[0].set(b), flow.passed, entering)
    kept = jax.tree.map(lambda k, a: k.at[:, t % sizes.kept].set(a), flow.kept, entering)
    passed, more, aux = jax.vmap(stage, spmd_axis_name=pipeline.axis)(held, placed(entering, pipeline), ctx)
    m = t - jnp.arange(sizes.stages)
    works = (m >= 0) & (m < sizes.microbatches)
    value, stats = flow.loss
    total = jax.tree.map(lambda s, a: s + _where(works, a), flow.aux, aux)
    return flow._replace(
        passed=placed(passed, pipeline), kept=kept, aux=total, loss=(value + jnp.sum(_where(works, more)), stats)
    )


def _loss(loss, head, ctx, flow):
    """The loss of what leaves the last stage in this tick, and its gradient."""
    left = jax.tree.map(lambda a: a[-1], flow.passed)
    value, pull, stats = jax.vjp(lambda head, x: loss(head, x, ctx), head, left, has_aux=True)
    d_head, came = pull(jnp.ones_like(value))
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    return flow._replace(head=add(flow.head, d_head), loss=add(flow.loss, (value, stats))), came


def _backward(stage, held, ctx, came, m, sizes, pipeline, flow):
    number = jnp.arange(sizes.stages)
    came = jax.tree.map(lambda a, b: jnp.roll(a, -1, axis=0).at[-1].set(b), flow.returned, came)
    entered = jax.tree.map(lambda k: k[number, (m + number) % sizes.kept], flow.kept)

    def pull(layers, fixed, x, ctx, d):
        (_, more), pull = jax.vjp(lambda layers, x: stage((layers, fixed), x, ctx)[:2], layers, x)
        return pull((d, jnp.ones_like(more)))

    run = jax.vmap(pull, spmd_axis_name=pipeline.axis)
    d_layers, returned = run(held[0], held[1], placed(entered, pipeline), ctx, placed(came, pipeline))
    works = (m >= 0) & (m < sizes.microbatches)
    total = jax.tree.map(lambda s, g: s + _where(works, g), flow.layers, d_layers)
    return flow._replace(layers=placed(total, pipeline), returned=placed(returned, pipeline))


def _where(works, a):
    return jnp.where(works.reshape(-1, *[1] * (a.ndim - 1)), a, 0)


def _empty(stage, loss, held, head, x, ctx, sizes) -> _Flow:
    first = lambda tree: jax.tree.map(lambda a: a[0], tree)
    some = lambda tree: jax.tree.map(lambda a: jnp.zeros((sizes.stages, *a.shape[1:]), a.dtype), tree)
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    _, _, aux = jax.eval_shape(jax.vmap(stage), held, some(x), some(ctx))
    value = jax.eval_shape(loss, head, first(x), first(ctx))
    keep = lambda a: jnp.zeros((sizes.stages, sizes.kept, *a.shape[1:]), a.dtype)
    return _Flow(some(x), jax.tree.map(keep, x), some(x), zeros(held[0]), zeros(aux), zeros(head), zeros(value))
