"""Costs of a step without compiling it: what ranks layouts before the compiler sees them."""

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
    """What one device has to do in a step.

    tokens: its own of the batch. layers: how many of them it computes for these tokens, with a pipeline's idle ticks.
    passes: forward and backward, and one more if remat is full. schedule: a pipeline's, or that of a single stage.
    """

    program: Program
    tokens: float
    layers: float
    passes: int
    schedule: Any

    @property
    def width(self) -> int:
        return jnp.dtype(self.program.job.dtype).itemsize

    @property
    def hidden(self) -> float:
        """Bytes of what a layer makes of the tokens."""
        return self.tokens * self.program.head[1] * self.width

    @property
    def ticks(self) -> float:
        """Of a pipeline, for each microbatch; 1 without one."""
        return self.schedule.ticks / self.schedule.microbatches

    @property
    def share(self) -> float:
        """Of all layers, those that it computes."""
        return self.layers / sum(_stacks(self.program))

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes of more than one device that a rule names."""
        return self.program.layout.mesh_axes(name)

    def parts(self, axes: Any) -> int:
        return math.prod(self.program.mesh.shape[axis] for axis in axes)


def analytic_costs(program: Program, model_flops: float, offloaded: float) -> Costs:
    """Arithmetic, memory traffic, collectives and copies to the host that the rules make necessary. offloaded: bytes
    that the backward pass finds on the host.

    Against libtpu, for Mixtral-8x7B on expert 8 x context 2: tokens travel in the same bytes, the program's permutes
    around the ring are 1% more, gradients summed over `context` are 3% less, weights gathered 21% more. For Llama3.2-1B
    it computes 6% more with a ring of 4, and 5% less in a pipeline (pp:8 on 4 stages).
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
    # Stages share the head's work by rows; only layers wait for each other.
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
    again = job.remat == "full" or job.gradients is not None
    step = _Step(program, rows * job.sequence, sum(stacks) * share, 3 if again else 2, schedule)
    return step._replace(tokens=step.tokens / step.parts(_contexts(step)))


def _contexts(step: _Step) -> tuple[str, ...]:
    """The axes over which a sequence is split in attention too."""
    return tuple(axis for axis in step.axes("seq") if axis not in step.axes("act_heads"))


def _copies(program: Program) -> tuple[float, float]:
    """To the host and from it: moments both ways; weights come for both passes, for the optimizer and for what it
    changes in them, and their gradients leave and come back."""
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
    """Of each parameter the mesh axes that split it, those over which it is gathered to be used, the bytes that a
    device then has, and how often: in every tick of a pipeline. What is split like the batch is gathered, but not
    experts to which tokens travel."""
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
    """AllGatherArg for the forward and the backward pass; gradients are summed over all that have tokens of their
    own."""
    summed = {*step.axes("batch"), *step.axes("seq"), *step.axes("layers")}
    for used, moving, whole, turns in _weights(step):
        yield "all-gather", moving, 2 * whole * turns
        yield "reduce-scatter", moving, whole * turns
        yield "all-reduce", summed - used, whole / step.parts(moving)


def _of_strategies(step: _Step) -> Iterator[Traffic]:
    """Asks every strategy of the layout. Plain rules may make tensor parallelism without its strategy."""
    joined = step.program.layout.strategies
    alone = () if any(isinstance(one, TensorParallel) for one in joined) else (TensorParallel(),)
    for one in (*joined, *alone):
        yield from one.traffic(step)


def _of_sequences(step: _Step) -> Iterator[tuple[str, Any, float]]:
    """Asks every layer that mixes tokens what it moves because devices share a sequence."""
    if not (context := _contexts(step)):
        return
    split = _split(step, context)
    for mixer in nn.mixer.mixers(step.program.model):
        for kind, size in mixer.traffic(split).items():
            yield kind, context, size * _repeats(mixer) * step.share


def _split(step: _Step, context: tuple[str, ...]) -> nn.mixer.SplitSequence:
    """Describes to a layer the sequences that devices share."""
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
    """A copy of a token travels to each expert that it chooses, and comes back. Without a capacity, turns are always
    computed again; where pieces have one size, all their room travels."""
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
    """Counts the layers that a module stands for, by the layer axis of its weights."""
    axes, shapes = nn.tree.axes(layer), {path: v.get_value().shape for path, v in nn.variables(layer).items()}
    return max(
        (math.prod(shapes[path][: sharding.layers.num_layer_axes(names)]) for path, names in axes.items()), default=1
    )
