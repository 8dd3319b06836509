"""Costs of a step from shapes and rules, without compiling, to rank layouts before a few of them are compiled."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from maxlib import nn, sharding
from maxlib.nn._expert_parallel import BEST_RAGGED, ROOM
from maxlib.nn._stack_layout import segments as segments_of
from maxlib.plan._hlo import Collective, Costs
from maxlib.plan._memory import part_bytes
from maxlib.plan._program import Program, bytes_on_host, schedule_of
from maxlib.plan._targets import parse_target
from maxlib.sharding._axes import mesh_axes_of
from maxlib.sharding.pipelining import chunks
from maxlib.sharding.strategies import TensorParallel, Traffic

ASSUMES = (
    "what shapes and rules say, as nothing was compiled: weights gathered and gradients summed, tensor parallelism's sums, keys "
    "and values of a split sequence, tokens on their way to experts, a pipeline's idle ticks and what goes to the next stage",
    "nothing else, so not counted are rows on their way to embedding and head (whose weights count as gathered), into a "
    "pipeline and out of it, weights of a pipeline that do not lie in order, and what remat other than 'full' computes again",
)


class _Step(NamedTuple):
    """One device's work in a step; see `sharding.strategies.Step`.

    Args:
      program: the training step.
      tokens: tokens of the batch on this device.
      layers: layers computed for these tokens, the idle ticks of a pipeline included.
      passes: 2 for forward and backward, 3 if remat is full.
      schedule: the pipeline's timetable, or that of a single stage.
    """

    program: Program
    tokens: float
    layers: float
    passes: int
    schedule: Any

    @property
    def width(self) -> int:
        """Bytes of an element in the compute dtype."""
        return jnp.dtype(self.program.job.dtype).itemsize

    @property
    def hidden(self) -> float:
        """Bytes of the residual stream of these tokens."""
        return self.tokens * self.program.head[1] * self.width

    @property
    def ticks(self) -> float:
        """Ticks of a pipeline divided by its microbatches; 1 without one."""
        return self.schedule.ticks / self.schedule.microbatches

    @property
    def share(self) -> float:
        """Layers computed for these tokens, as a share of all layers."""
        return self.layers / sum(_stacks(self.program))

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of more than one device that split the axis `name`."""
        return self.program.layout.mesh_axes(name)

    def parts(self, axes: Any) -> int:
        """Returns the number of devices along these mesh axes."""
        return math.prod(self.program.mesh.shape[axis] for axis in axes)


def analytic_costs(program: Program, model_flops: float, offloaded: float) -> Costs:
    """Estimates arithmetic, memory traffic, collectives and host copies that shapes and rules make necessary.

    Against libtpu, for Mixtral-8x7B on expert 8 x context 2: tokens travel in the same bytes, the program's permutes
    around the ring are 1% more, gradients summed over `context` are 3% less, weights gathered 21% more. For Llama3.2-1B
    it computes 6% more with a ring of 4, and 5% less in a pipeline (pp:8 on 4 stages).

    Args:
      program: the training step.
      model_flops: the model's FLOPs of a step on all devices.
      offloaded: bytes of activations that the backward pass reads from the host.
    """
    step, (vocab, dim) = _step(program), program.head
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for kind, axes, size in (*_of_weights(step), *_of_strategies(step), *_of_sequences(step), *_of_experts(step)):
        if axes and size:
            key = kind, tuple(axis for axis in program.mesh.axis_names if axis in axes)
            found[key] = found.get(key, 0.0) + size
    collectives = sorted((Collective(*key, 0, 0, size) for key, size in found.items()), key=lambda one: -one.bytes)
    weights = sum((4 if moving else 2) * whole * turns for _, moving, whole, turns in _weights(step))
    traffic = weights + 8 * _local(program) + 20 * step.passes * step.layers * step.hidden
    # The head splits its rows over stages; only layers idle in a pipeline. Forward is 1/3 of a layer's FLOPs, so
    # another forward pass adds 1/3.
    head = 6.0 * vocab * dim * program.rows * program.job.sequence
    layers = (model_flops - head) * step.share * step.schedule.stages
    flops = (head + layers * (1 + (step.passes - 2) / 3)) / program.mesh.size
    copies = [way + offloaded for way in _copies(program)]
    return Costs(flops, traffic, tuple(collectives), 0, *copies, assumes=ASSUMES)


def _step(program: Program) -> _Step:
    job, schedule = program.job, schedule_of(program.layout)
    rows = max(1, program.rows // program.layout.axis_size("batch"))
    stacks = _stacks(program)
    size = chunks(max(stacks), schedule.stages, schedule.repeats).size
    share = schedule.ticks * size / (schedule.microbatches * max(stacks))
    again = job.remat == "full" or job.is_1f1b
    step = _Step(program, rows * job.sequence, sum(stacks) * share, 3 if again else 2, schedule)
    return step._replace(tokens=step.tokens / step.parts(_contexts(step)))


def _contexts(step: _Step) -> tuple[str, ...]:
    """Returns the mesh axes over which a sequence stays split in attention."""
    return tuple(axis for axis in step.axes("seq") if axis not in step.axes("act_heads"))


def _copies(program: Program) -> tuple[float, float]:
    """Returns the bytes copied to the host and from it, activations aside."""
    # Moments are copied both ways. Offloaded weights come four times (forward, backward, optimizer, update) and their
    # gradients once; the new weights and the gradients go.
    moments, weights = bytes_on_host(program.state.opt_state), bytes_on_host(program.state.trainable)
    return moments + 2.0 * weights, moments + 5.0 * weights


def _local(program: Program) -> float:
    names = nn.tree.axes(program.state.rest)
    spec = lambda path, x: program.layout.parameter_spec(names[path], x.shape, path=path)
    return sum(part_bytes(x.shape, 4, spec(path, x), program.mesh) for path, x in program.state.trainable.items())


def _stacks(program: Program) -> list[int]:
    """Returns how often stacks repeat each layer of their periods; once where there is no stack."""
    segments = [
        one for layout in nn.tree.layouts(program.state.rest).values() for one in segments_of(**layout).values()
    ]
    return [one.repeats for one in segments if one.repeats for _ in range(one.slots)] or [1]


def _weights(step: _Step) -> Iterator[tuple[set[str], set[str], float, float]]:
    """Yields for each parameter the mesh axes that split it, those that gather it, bytes then, and how often."""
    # Weights are gathered over the axes that also split the batch, in every tick of a pipeline. Experts to which tokens
    # travel are not gathered.
    program = step.program
    mesh, names = program.mesh, nn.tree.axes(program.state.rest)
    for path, x in program.state.trainable.items():
        places = program.layout.parameter_spec(names[path], x.shape, path=path)
        used = {axis for place in places for axis in mesh_axes_of(place) if mesh.shape[axis] > 1}
        stay = step.axes("act_expert") if "expert" in names[path] else ()
        moving = (used & {*step.axes("batch")}) - {*stay}
        turns = step.schedule.ticks / step.schedule.repeats if sharding.layers.is_stacked(names[path]) else 1.0
        whole = math.prod(x.shape) * step.width / step.parts(used - moving)
        yield used, moving, whole, turns * program.job.accumulate


def _of_weights(step: _Step) -> Iterator[tuple[str, Any, float]]:
    """Yields the gathers of weights and the sums of their gradients."""
    # Weights are gathered for the forward and for the backward pass. Gradients are summed over all axes whose devices
    # have different tokens.
    summed = {*step.axes("batch"), *step.axes("seq"), *step.axes("layers")}
    for used, moving, whole, turns in _weights(step):
        yield "all-gather", moving, 2 * whole * turns
        yield "reduce-scatter", moving, whole * turns
        yield "all-reduce", summed - used, whole / step.parts(moving)


def _of_strategies(step: _Step) -> Iterator[Traffic]:
    """Yields the traffic of every strategy; plain rules may amount to tensor parallelism without its strategy."""
    joined = step.program.layout.strategies
    alone = () if any(isinstance(one, TensorParallel) for one in joined) else (TensorParallel(),)
    for one in (*joined, *alone):
        yield from one.traffic(step)


def _of_sequences(step: _Step) -> Iterator[tuple[str, Any, float]]:
    """Yields the traffic of every layer that mixes tokens, where a sequence is split over devices."""
    if not (context := _contexts(step)):
        return
    split = _split(step, context)
    for mixer in nn.mixer.mixers(step.program.model):
        for kind, size in mixer.traffic(split).items():
            yield kind, context, size * _repeats(mixer) * step.share


def _split(step: _Step, context: tuple[str, ...]) -> nn.mixer.SplitSequence:
    """Describes split sequences to a layer."""
    ulysses, ring = not set(context) & set(step.axes("q_seq")), set(context) & set(step.axes("kv_seq"))
    return nn.mixer.SplitSequence(
        strategy="ulysses" if ulysses else "ring" if ring else "gather",
        parts=step.parts(context),
        heads=step.parts(set(step.axes("attn_heads")) - set(context)),
        rows=step.tokens * step.parts(context) / step.program.job.sequence,
        tokens=step.tokens,
        width=step.width,
        passes=step.passes,
    )


def _of_experts(step: _Step) -> Iterator[tuple[str, Any, float]]:
    """Yields the traffic of experts: a copy of each token goes to every expert that it chooses, and comes back."""
    # Without a capacity the exchange is always recomputed in the backward pass. Messages of one size are sent with all
    # their padding.
    job, experts = step.program.job, step.program.layout.experts
    ragged = parse_target(job.target).platform in BEST_RAGGED and step.schedule.stages == 1
    ragged = experts.how == "ragged" if experts is not None and experts.how is not None else ragged
    for _, m in nnx.iter_modules(step.program.model):
        if isinstance(m, nn.MoE):
            room = m.capacity_factor or (1 if ragged else ROOM)
            passes = step.passes if m.capacity_factor else 3
            copies = m.router.top_k * room * step.hidden * _repeats(m) * step.share
            kind = "ragged-all-to-all" if ragged and not m.capacity_factor else "all-to-all"
            yield kind, step.axes("act_expert"), 2 * passes * copies


def _repeats(layer: Any) -> int:
    """Counts the layers that a stacked module represents, by the layer axes of its weights."""
    axes, shapes = nn.tree.axes(layer), {path: v.get_value().shape for path, v in nn.variables(layer).items()}
    return max(
        (math.prod(shapes[path][: sharding.layers.num_layer_axes(names)]) for path, names in axes.items()), default=1
    )
