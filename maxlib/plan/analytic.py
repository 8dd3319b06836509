"""Costs of a step without compiling it: what ranks layouts before the compiler sees them."""

import math

import jax.numpy as jnp

from maxlib import nn, sharding
from maxlib.plan.hlo import Collective, Costs
from maxlib.plan.memory import part_bytes
from maxlib.plan.program import Program, axes_of, bytes_on_host, parts_of


def analytic_costs(program: Program, model_flops: float, offloaded: float) -> Costs:
    """Arithmetic, memory traffic, collectives and copies to the host that the rules make necessary; attention over a
    split sequence is left out. offloaded: bytes that the backward pass finds on the host."""
    job, mesh = program.job, program.mesh
    again = 1 if job.remat == "full" else 0  # forward passes that the backward pass repeats
    width = jnp.dtype(job.dtype).itemsize
    rows = max(1, program.rows // parts_of(program.job.table.get("batch"), mesh))
    hidden = rows * job.sequence * program.head[1] * width
    collectives = _of_weights(program, width, again) + _of_activations(program, hidden, again)
    weights = sum(one.bytes for one in collectives if one.kind == "all-gather") or _local(program) / 2
    traffic = 2 * weights + 8 * _local(program) + 20 * (2 + again) * _layers(program) * hidden
    flops = model_flops / mesh.size * (1 + again / 3)
    return Costs(flops, traffic, tuple(collectives), 0, *(way + offloaded for way in _copies(program)))


def _copies(program: Program) -> tuple[float, float]:
    """To the host and from it: moments both ways; weights come for both passes, for the optimizer and for what it
    changes in them, and their gradients leave and come back."""
    moments, weights = bytes_on_host(program.state.opt_state), bytes_on_host(program.state.trainable)
    return moments + 2.0 * weights, moments + 5.0 * weights


def _local(program: Program) -> float:
    names, rules = nn.axes(program.state.rest), program.job.table
    spec = lambda path, x: sharding.parameter_spec(names[path], x.shape, rules, program.mesh)
    return sum(part_bytes(x.shape, 4, spec(path, x), program.mesh) for path, x in program.state.trainable.items())


def _layers(program: Program) -> int:
    stacked = [
        x.shape[0] for path, x in program.state.trainable.items() if ".body." in path and path.endswith("norm.scale")
    ]
    return max(stacked, default=1)


def _of_weights(program: Program, width: int, again: int) -> list[Collective]:
    """Weights that are split like the batch are gathered for every pass; their gradients are summed."""
    mesh, rules, names = program.mesh, program.job.table, nn.axes(program.state.rest)
    batch = {axis for axis in axes_of(rules.get("batch")) if mesh.shape[axis] > 1}
    totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(kind: str, axes: set[str], size: float) -> None:
        if axes:
            key = kind, tuple(axis for axis in mesh.axis_names if axis in axes)
            totals[key] = totals.get(key, 0.0) + size

    for path, x in program.state.trainable.items():
        used = {axis for place in sharding.parameter_spec(names[path], x.shape, rules, mesh) for axis in axes_of(place)}
        others = math.prod(mesh.shape[axis] for axis in used - batch)
        whole = math.prod(x.shape) * width / others
        add("all-gather", used & batch, whole * (2 + again - 1 if again else 2))
        add("reduce-scatter", used & batch, whole)
        parts = math.prod(mesh.shape[axis] for axis in used & batch)
        add("all-reduce", batch - used, whole / parts)
    return [Collective(kind, axes, 0, 0, size) for (kind, axes), size in totals.items()]


def _of_activations(program: Program, hidden: float, again: int) -> list[Collective]:
    """Tensor parallelism sums each layer's two results over its parts, forward and backward."""
    rules, mesh = program.job.table, program.mesh
    axes = tuple(axis for axis in axes_of(rules.get("act_heads")) if mesh.shape[axis] > 1)
    passes = 2 * (2 + again) * _layers(program)
    return [Collective("all-reduce", axes, 0, passes, passes * hidden)] if axes else []
