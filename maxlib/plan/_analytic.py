"""Analytic costs of a step from shapes and rules, to rank layouts before compiling a few of them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from maxlib import nn, sharding
from maxlib.kernels.grouped_matmul.megablox_tiles import Sizes, choose_tiles
from maxlib.kernels.vector_memory import vmem_of
from maxlib.observability import flops_by_dtype
from maxlib.plan._hlo import Collective, Costs
from maxlib.plan._memory import gradient, hashable, model_inputs, part_bytes
from maxlib.plan._program import Program, bytes_on_host, moes, schedule_of
from maxlib.plan._targets import parse_target
from maxlib.sharding.layers import mesh_axes_of
from maxlib.sharding.pipelining import Schedule, chunks
from maxlib.sharding.strategies import (
    DataParallel,
    ExpertLayer,
    ExpertParallel,
    FullyShard,
    ShardedWeight,
    StepFacts,
    Strategy,
    TensorParallel,
)

ASSUMES = (
    "what shapes and rules say, as nothing was compiled: weights gathered and gradients summed, tensor parallelism's sums, keys "
    "and values of a split sequence, tokens on their way to experts, a pipeline's idle ticks and what goes to the next stage",
    "nothing else, so not counted are rows on their way to embedding and head (whose weights count as gathered), into a "
    "pipeline and out of it, and weights of a pipeline that do not lie in order",
)


def analytic_costs(program: Program, model_flops: float, kept: float, offloaded: float) -> Costs:
    """Estimates arithmetic, memory traffic, collectives and host copies from shapes and rules.

    Against libtpu, for Mixtral-8x7B on expert 8 x context 2: tokens travel in the same bytes, the program's permutes
    around the ring are 1% more, gradients summed over `context` are 3% less, weights gathered 21% more. For Llama3.2-1B
    it computes 6% more with a ring of 4, and 5% less in a pipeline (pp:8 on 4 stages).

    Args:
        program: The training step.
        model_flops: The model's FLOPs of a step on all devices.
        kept: Bytes of activations that the backward pass reads from the device's memory.
        offloaded: Bytes of activations that the backward pass reads from the host.
    """
    step, schedule, (vocab, dim) = step_of(program), schedule_of(program.layout), program.head
    strategies = _strategies(step)
    sizes: dict[tuple[str, tuple[str, ...]], float] = {}
    for kind, axes, size in (traffic for strategy in strategies for traffic in strategy.traffic(step)):
        if axes and size:
            key = kind, tuple(axis for axis in program.mesh.axis_names if axis in axes)
            sizes[key] = sizes.get(key, 0.0) + size
    collectives = [Collective(*key, 0, 0, size) for key, size in sizes.items()]
    collectives.sort(key=lambda collective: -collective.bytes)
    # Weights are read in both passes; gathered weights are also written.
    weights = sum((4 if weight.gathered else 2) * weight.size * weight.uses for weight in step.weights)
    # Of 60 passes over a layer's input with full remat, two are for the input that is kept.
    traffic = weights + 8 * _local(program) + (20 * step.passes - 2) * step.layers * step.hidden + 2 * kept
    traffic += _expert_passes(step) / 3 * _expert_bytes(program, step)
    traffic += step.passes / 3 * _recurrent_bytes(program, step) + _grouped(program, step, _moved)
    # The head splits its rows over stages; only layers are idle in a pipeline. Remat repeats their forward pass.
    once = 2.0 * vocab * dim * program.rows * program.job.sequence
    head = once * (3 if program.job.lora is None else 2)
    layers = model_flops - head + (step.passes - 2) * (program.forward_flops - once)
    flops = (head + layers * _share(program, schedule) * schedule.stages) / program.mesh.size
    flops += (_expert_passes(step) - step.passes) * _gated_flops(program, step)
    copies = [strategy.host_copies(step) for strategy in strategies]
    to_host, from_host = offloaded + sum(there for there, _ in copies), offloaded + sum(back for _, back in copies)
    narrow = {kind: share * flops for kind, share in program.narrow_share.items()}
    repeated = _grouped(program, step, _beyond_rows) if step.platform == "tpu" else 0.0
    return Costs(
        flops, traffic, tuple(collectives), 0, to_host, from_host, assumes=ASSUMES, narrow=narrow, repeated=repeated
    )


# How often a step with full remat reads or writes an array outside of grouped matmuls, fitted to 35 of libtpu's
# programs: rows of the experts' width that stay on their device or travel, and their inner arrays, of which v5e and v6e
# keep a part in vector memory.
_STAYING, _TRAVELLING, _INNER, _INNER_PASSED_ON = 33, 72, 22, 66
_WITHOUT_ROOM = ("TPU v4", "TPU v5p")
# The same of a recurrence's values, counted in float32: in programs for v5p of Falcon-H1 0.5B and Granite 4.0 H 350M,
# of Qwen3.5 0.8B and of Kimi Linear. Those for v5e and v6e keep chunks in vector memory: on v6e seven models move 15 to
# 46 % of it.
_VALUES = {nn.Mamba2: 145, nn.GatedDeltaNet: 230, nn.KimiDeltaAttention: 400}
_KEPT_IN_VMEM = {"TPU v5e": 1 / 3, "TPU v6e": 1 / 3}


def _expert_bytes(program: Program, step: StepFacts) -> float:
    """Returns the memory traffic of rows that are sorted by expert, have passed its MLP and are sorted back."""
    share, total = _share(program, schedule_of(program.layout)), 0.0
    outer = _TRAVELLING if step.axes("act_expert") else _STAYING
    hidden = _INNER_PASSED_ON if parse_target(program.job.target).chip.kind in _WITHOUT_ROOM else _INNER
    for moe in moes(program.plain):
        size = _sizes(moe)
        wide = size["expert_embed"] * outer
        inner = size["mlp"] / step.parts(step.axes("mlp")) * (2 if moe.gate else 1) * hidden
        total += step.tokens * moe.router.top_k * step.width * (wide + inner) * _repeats(moe) * share
    return total


def _grouped(program: Program, step: StepFacts, cost: Callable[[Sizes], float]) -> float:
    """Sums a cost over the experts' matmuls on one device in a step, as JAX's kernels for TPUs compute them."""
    share = _share(program, schedule_of(program.layout))
    vmem = vmem_of(parse_target(program.job.target).chip.kind)
    return sum(
        _repeats(moe) * share * times * cost(matmul)
        for moe in moes(program.plain)
        for times, matmul in _grouped_matmuls(moe, step, vmem)
    )


def _grouped_matmuls(moe: nn.MoE, step: StepFacts, vmem: int) -> Iterator[tuple[float, Sizes]]:
    """Yields a layer's grouped matmuls on one device, and how often a step runs each: also both gradients."""
    size = _sizes(moe)
    inner, experts = size["mlp"] // step.parts(step.axes("mlp")), size["expert"] // step.parts(step.axes("act_expert"))
    rows, width = math.ceil(step.tokens * moe.router.top_k), step.width
    pairs = [(size["expert_embed"], inner)] * (2 if moe.gate else 1) + [(inner, size["expert_embed"])]
    for number, (summed, out) in enumerate(pairs, start=1):
        forward = Sizes(rows, summed, out, experts, width, width, transposed=False, vmem=vmem)
        # No gradient needs what down returns, so it is not computed again.
        yield _expert_passes(step) - 1 if number < len(pairs) else 1, forward
        yield 1, dataclasses.replace(forward, summed=out, out=summed)
        yield 1, dataclasses.replace(forward, transposed=True)


def _expert_passes(step: StepFacts) -> float:
    """Returns the passes of experts: where tokens travel to them, the backward pass always computes them again."""
    return 3 if step.axes("act_expert") else step.passes


def _gated_flops(program: Program, step: StepFacts) -> float:
    """Returns the FLOPs of one device's gates and ups in one pass."""
    total = 0.0
    for moe in moes(program.plain):
        size = _sizes(moe)
        inner = size["mlp"] / step.parts(step.axes("mlp")) * (2 if moe.gate else 1)
        total += 2 * step.tokens * moe.router.top_k * size["expert_embed"] * inner * _repeats(moe)
    return total * _share(program, schedule_of(program.layout))


def _sizes(moe: nn.MoE) -> dict[str, int]:
    """Returns the sizes of the matrix that goes up, by the names of its axes."""
    return dict(zip(moe.up.w.get_metadata()["axes"], moe.up.w.get_value().shape, strict=True))


def _beyond_rows(of: Sizes) -> float:
    """Returns the FLOPs of tiles with rows of two experts beyond those of their rows."""
    return choose_tiles(of).computed(of) - 2.0 * of.rows * of.summed * of.out


def _moved(of: Sizes) -> float:
    """Returns the bytes that a grouped matmul moves beyond reading its matrices, which are counted with all weights."""
    matrices = 0 if of.transposed else of.width * of.experts * of.summed * of.out
    return choose_tiles(of).moved(of) - matrices


def _recurrent_bytes(program: Program, step: StepFacts) -> float:
    """Returns the memory traffic of what chunks of recurrences hand on."""
    values = 0.0
    for mixer, layers in step.mixers:
        times = next((times for kind, times in _VALUES.items() if isinstance(mixer, kind)), 0)
        if times:
            head_dim = mixer.value_dim if isinstance(mixer, nn.GatedDeltaNet) else mixer.head_dim
            values += times * mixer.num_heads * head_dim * layers
    share = _KEPT_IN_VMEM.get(parse_target(program.job.target).chip.kind, 1.0)
    return share * 4 * step.tokens * values / step.parts(step.axes("act_heads"))


def _strategies(step: StepFacts) -> list[Strategy]:
    """Lists the strategies that contribute costs: those of the layout, and those equivalent to its plain rules."""
    joined = step.layout.strategies
    # A default of one device along its axes costs nothing. One gives way to a strategy in its kind that states costs.
    known = {strategy.kind for strategy in joined if type(strategy).traffic is not Strategy.traffic}
    defaults = [DataParallel(), FullyShard(), TensorParallel(), ExpertParallel()]
    if (sequence := step.layout.sequence) is not None:
        defaults.append(sequence)
    return [*joined, *(strategy for strategy in defaults if strategy.kind not in known)]


def step_of(program: Program) -> StepFacts:
    """Returns the facts about one device's part of a step, for strategies and layers."""
    job, layout, schedule = program.job, program.layout, schedule_of(program.layout)
    rows, stacks = max(1, program.rows // layout.axis_size("batch")), _stacks(program)
    share, width = _share(program, schedule), jnp.dtype(job.dtype).itemsize
    step = StepFacts(
        layout=layout,
        platform=parse_target(job.target).platform,
        sequence=job.sequence,
        tokens=rows * job.sequence,
        width=width,
        hidden=0.0,
        layers=sum(stacks) * share,
        passes=3 if program.is_1f1b else 2 + _recomputed(program),
        ticks=schedule.ticks / schedule.microbatches,
        weights=tuple(_weights(program, schedule)),
        mixers=tuple((mixer, _repeats(mixer) * share) for mixer in nn.mixer.mixers(program.model)),
        experts=tuple(ExpertLayer(moe.router.top_k, _repeats(moe) * share) for moe in moes(program.plain)),
        moments_on_host=bytes_on_host(program.state.opt_state),
        weights_on_host=bytes_on_host(program.state.trainable),
    )
    tokens = step.tokens / step.parts(step.sequence_axes)
    return dataclasses.replace(step, tokens=tokens, hidden=tokens * program.head[1] * width)


def _recomputed(program: Program) -> float:
    """Returns the share of the layers' arithmetic that the backward pass computes again, 1 with full remat."""
    remat = program.job.remat
    if remat in (None, "full"):
        return 1.0 if remat == "full" else 0.0
    inputs, dtype = model_inputs(program, 1), program.job.dtype
    again, once = (
        _flops(functools.partial(_backward, dtype=dtype, remat=hashable(keep)), inputs) for keep in (remat, None)
    )
    return (again - once) / _flops(functools.partial(_forward, dtype=dtype), inputs)


def _flops(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    return sum(flops_by_dtype(fn, *inputs).values())


# `jit` remembers what it traced: the layouts of a search share it.
@functools.partial(jax.jit, static_argnames=("dtype", "remat"))
def _backward(params: Any, rest: Any, tokens: Any, *, dtype: str, remat: Any) -> Any:
    """Returns the hidden states, and as if these were their own gradient, that of the parameters."""
    hidden, backward = gradient(params, rest, tokens, dtype, remat)
    return hidden, backward(hidden)


@functools.partial(jax.jit, static_argnames="dtype")
def _forward(params: Any, rest: Any, tokens: Any, *, dtype: str) -> Any:
    return nn.combine(params, rest)(tokens, dtype=jnp.dtype(dtype)).hidden


def _share(program: Program, schedule: Schedule) -> float:
    """Returns the share of layers computed for a device's tokens, including idle ticks of a pipeline."""
    most = max(_stacks(program))
    return schedule.ticks * chunks(most, schedule.stages, schedule.repeats).size / (schedule.microbatches * most)


def _local(program: Program) -> float:
    names = nn.tree.axes(program.state.rest)

    def spec(path, x):
        return program.layout.parameter_spec(names[path], x.shape, path=path)

    return sum(part_bytes(x.shape, 4, spec(path, x), program.mesh) for path, x in program.state.trainable.items())


def _stacks(program: Program) -> list[int]:
    """Returns how often stacks repeat each layer of their periods; 1 outside of stacks."""
    groups = [group for grouping in nn.tree.groupings(program.state.rest).values() for group in grouping]
    return [repeats for period, repeats in groups if repeats > 1 for _ in range(period)] or [1]


def _weights(program: Program, schedule: Schedule) -> Iterator[ShardedWeight]:
    """Yields the parameters and how they are gathered."""
    # Weights are gathered over the axes that also split the batch, in every tick of a pipeline. Experts that receive
    # tokens are not gathered.
    layout, mesh, width = program.layout, program.mesh, jnp.dtype(program.job.dtype).itemsize
    for path, x in program.matrices.items():
        places = layout.parameter_spec(x.axes, x.shape, path=path)
        split = {axis for place in places for axis in mesh_axes_of(place) if mesh.shape[axis] > 1}
        stay = layout.mesh_axes("act_expert") if "expert" in x.axes else ()
        gathered = (split & {*layout.mesh_axes("batch")}) - {*stay}
        size = math.prod(x.shape) * width / math.prod(mesh.shape[axis] for axis in split - gathered)
        turns = schedule.ticks / schedule.repeats if sharding.layers.is_stacked(x.axes) else 1.0
        uses = turns * program.job.microbatches
        yield ShardedWeight(split, gathered, size, uses, x.trained, sharding.layers.own_axes(x.axes))


def _repeats(layer: Any) -> int:
    """Counts the layers that a stacked module represents, by the layer axes of its weights."""
    axes, shapes = nn.tree.axes(layer), {path: v.get_value().shape for path, v in nn.variables(layer).items()}
    return max(
        (math.prod(shapes[path][: sharding.layers.num_layer_axes(names)]) for path, names in axes.items()), default=1
    )
