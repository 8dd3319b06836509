"""An analytic memory model of a training step, from shapes alone, in about a second."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlib import nn, sharding
from maxlib.plan._program import Program, bytes_on_device, moes
from maxlib.plan._targets import parse_target
from maxlib.sharding.layers import mesh_axes_of, num_layer_axes


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a training step, in bytes on one device.

    Args:
        parameters: The parameters, trained or not.
        optimizer: The optimizer's state.
        batch: The inputs of a step.
        gradients: Gradients of all trained parameters.
        away: Gradients that are on the host during the backward pass, like their parameters. They are copied back while
            its last layer runs.
        clipped: Clipping's copy of the largest gradient that was on the host.
        activations: Activations that the backward pass keeps.
        layer: Temporary memory of the running layer.
        loss: Temporary memory of the loss, when there are no gradients yet.
        offloaded: Activations on the host; part of no other number.
    """

    parameters: float
    optimizer: float
    batch: float
    gradients: float
    away: float
    clipped: float
    activations: float
    layer: float
    loss: float
    offloaded: float

    @property
    def arguments(self) -> float:
        """Bytes of the step's arguments."""
        return self.parameters + self.optimizer + self.batch

    @property
    def temporaries(self) -> float:
        """Peak bytes of temporary arrays in the step."""
        # Either the update (all gradients are back), or, with all activations kept, the largest of: a layer's backward
        # pass, the loss, and the return of the gradients.
        back = self.gradients + self.clipped
        return max(back, self.activations + max(self.gradients - self.away + self.layer, self.loss, back))

    @property
    def total(self) -> float:
        """The peak: arguments and temporaries."""
        return self.arguments + self.temporaries


def estimate_memory(program: Program) -> Memory:
    """Estimates the memory of a program without compiling it; docs/results.md compares it with the compiler."""
    state, layout = program.state, program.layout
    parameters = bytes_on_device((state.trainable, state.rest))
    optimizer = bytes_on_device((state.opt_state, state.step, state.key))
    names = nn.tree.axes(state.rest)
    specs = {path: layout.optimizer_spec(names[path], x.shape, path=path) for path, x in state.trainable.items()}

    def size(path):
        return part_bytes((x := state.trainable[path]).shape, x.dtype.itemsize, specs[path], layout.mesh)

    gradients = sum(map(size, specs))
    away = [size(path) for path in specs if sharding.memory.is_on_host(state.trainable[path])]
    rows = max(1, program.rows // program.job.microbatches // layout.axis_size("batch"))
    at_once, held, ends = _in_pipeline(program, rows)
    kept, transient, offloaded = _residuals(program, at_once)
    layer = _layer_weights(program) + transient + _whole_sequences(program, at_once) + _travelling(program, at_once)
    loss = _loss(program, rows if not program.is_1f1b else at_once)
    return Memory(
        parameters,
        optimizer,
        bytes_on_device(program.batch),
        gradients,
        away=sum(away),
        clipped=max(away, default=0.0),
        activations=kept * held + ends,
        layer=layer,
        loss=loss,
        offloaded=offloaded * held,
    )


def _in_pipeline(program: Program, rows: int) -> tuple[int, float, float]:
    """Returns rows of a microbatch, copies of all layers' residuals that a stage keeps, and bytes of in- and outputs.

    Without a pipeline this is all rows, once, and 0.
    """
    job, pipeline = program.job, program.layout.pipeline
    if pipeline is None:
        return rows, 1.0, 0.0
    stages = program.mesh.shape[pipeline.axis]
    chunks = stages * pipeline.repeats
    # GPipe keeps residuals of every tick, 1F1B of 2 S V - 1; a tick has 1 / (S V) of the layers.
    ticks = pipeline.microbatches * pipeline.repeats + stages - 1 if not program.is_1f1b else 2 * chunks - 1
    hidden = rows * job.sequence * program.head[1] * jnp.dtype(job.dtype).itemsize
    return max(1, rows // pipeline.microbatches), ticks / chunks, 3.0 * hidden


def part_bytes(shape: tuple[int, ...], width: int, spec: Any, mesh: Any) -> float:
    """Returns the bytes of one device's part of an array of `width` bytes per element."""
    return math.prod(shape) * width / math.prod(mesh.shape[axis] for place in spec for axis in mesh_axes_of(place))


# Layers of a period that a compiler recomputes at once, at most, where none waits for the gradients of another. On TPUs
# they wait (`_xla_workarounds.after`): one runs, and the compiler gathers the weights of the next.
_AT_ONCE = 6
_GATHERED = {"tpu": 2}


def _residuals(program: Program, rows: int) -> tuple[float, float, float]:
    """Returns bytes kept on the device for the backward pass, made when a layer is recomputed, and kept on the host."""
    job = program.job
    weights = {x.shape for x in jax.tree.leaves((program.state.trainable, program.state.rest))}

    def kept(remat: nn.remat.Policy) -> list[Any]:
        backward = functools.partial(_backward, dtype=job.dtype, remat=hashable(remat))

        def residuals(rows):
            return jax.eval_shape(backward, *model_inputs(program, rows))

        # Of one row: the batches of a search share the trace.
        return _activations(residuals, 1, job.sequence, weights)

    def count(leaves):
        return rows * sum(_kept_bytes(x, program) for x in leaves)

    remat = job.remat if not program.is_1f1b else "full"  # 1F1B keeps the layers' inputs
    saved, all_ = count(kept(nn.remat.kept_on_device(remat))), count(kept(None))
    offloaded = count(kept(remat)) - saved
    # For the layer that runs backward, the compiler keeps about half of autodiff's residuals and fuses the rest.
    layers, period = max(map(_layers_and_period, nn.tree.stacks(program.state.rest).values()), default=(1, 1))
    at_once = 1 if parse_target(job.target).platform == "tpu" else min(period, _AT_ONCE)
    again = 0.0 if remat is None else 0.5 * all_ * at_once / layers
    return saved, again, offloaded


def _layers_and_period(stack: nn.Stack) -> tuple[int, int]:
    """Returns the number of a stack's layers, and the period of its largest repeated group."""
    return len(stack), 1 if stack.staged is None else stack.layer_groups[stack.staged].period


def model_inputs(program: Program, rows: int) -> tuple[Any, Any, Any]:
    """Returns the trained parameters, the rest of the model and `rows` rows of tokens, as shapes without devices."""
    state, shape = program.state, (rows, program.job.sequence)
    params, rest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.trainable, state.rest))
    return params, rest, jax.ShapeDtypeStruct(shape, jnp.int32)


def hashable(remat: nn.remat.Policy) -> Any:
    """Returns a policy that `jit` can compare: names and their choices as a tuple."""
    named = nn.remat.POLICIES.get(remat, remat) if isinstance(remat, str) else remat
    if named is None or callable(named):
        return named
    return tuple(sorted((named if isinstance(named, Mapping) else dict.fromkeys(named, "keep")).items()))


# `jit` remembers what it traced: the layouts of a search share it.
@functools.partial(jax.jit, static_argnames=("dtype", "remat"))
def _backward(params: Any, rest: Any, tokens: Any, *, dtype: str, remat: Any) -> list[Any]:
    """Returns what the backward pass of the model needs from the forward pass."""
    return jax.tree.leaves(gradient(params, rest, tokens, dtype, remat)[1])


def gradient(params: Any, rest: Any, tokens: Any, dtype: str, remat: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the model's hidden states, and the function that maps their gradient to that of `params`.

    Args:
        params: The trained parameters.
        rest: The rest of the model.
        tokens: Rows of tokens.
        dtype: Dtype of activations.
        remat: A policy, as `hashable` returns it.
    """
    policy = dict(remat) if isinstance(remat, tuple) else remat

    def hidden(params):
        return nn.combine(params, rest)(tokens, dtype=jnp.dtype(dtype), remat=policy).hidden

    return jax.vjp(hidden, params)


def _activations(
    residuals: Callable[[int], list[Any]], rows: int, sequence: int, weights: set[tuple[int, ...]]
) -> list[Any]:
    """Returns the residuals that are not weights.

    An activation may have the shape of a weight by chance: two rows of 4096 tokens in a model of width 8192. Then only
    a trace with another number of rows tells them apart.

    Args:
        residuals: Returns the residuals of a number of rows, always in the same order.
        rows: Number of rows.
        sequence: Tokens of a row.
        weights: The shapes of all weights.
    """
    saved = residuals(rows)

    def by_rows(shape):
        return rows * sequence in shape or {rows, sequence} <= set(shape)

    ambiguous = any(x.shape in weights and by_rows(x.shape) for x in saved)
    others = residuals(rows + 1) if ambiguous else saved
    return [
        x
        for x, other in zip(saved, others, strict=True)
        if x.shape not in weights or (ambiguous and x.shape != other.shape)
    ]


def _kept_bytes(x: Any, program: Program) -> float:
    """Returns one device's bytes of a residual: "seq" splits hidden states, "act_heads" the rest."""
    split = "seq" if x.ndim and x.shape[-1] == program.head[1] else "act_heads"
    return x.size * x.dtype.itemsize / program.layout.axis_size(split)


def _layer_weights(program: Program) -> float:
    """Returns bytes of a layer's gathered weights in the compute dtype, and of gradients before they are scattered."""
    # Experts to which tokens travel are not gathered. Between slices, a layer's gradients are exchanged while the next
    # layer runs, so all of them wait. XLA for GPUs scatters a layer's gradients together, others one at a time.
    width = jnp.dtype(program.job.dtype).itemsize
    rules = {"embed": None, "expert_embed": None, "rank": None, "expert": program.layout.rules.get("act_expert")}
    gathered = program.layout | rules
    layers: dict[str, list[_Gathered]] = {}
    layouts = nn.tree.groupings(program.plain) | nn.tree.groupings(program.state.rest)
    for path, x in program.matrices.items():
        if (place := nn.stack.group_at(path, layouts)) is None or place[1].repeats == 1 or len(x.axes) < 3:
            continue
        stacked = num_layer_axes(x.axes)
        spec = gathered.spec(*x.axes[stacked:])
        size = part_bytes(x.shape[1:], width, spec, program.mesh)  # of one layer
        slot = path.removeprefix(f"{place[0]}.").partition(".")[0]
        layers.setdefault(place[0], []).append(_Gathered(size, x.trained, slot, "expert" in x.axes))
    target = parse_target(program.job.target)
    most = _GATHERED.get(target.platform, _AT_ONCE)
    turns = 2 if target.slices > 1 else 1
    last = sum if target.platform == "cuda" else max  # of the gradients that are being scattered
    return max(
        (
            turns * _at_once(layer, most) + last([weight.size for weight in layer if weight.trained] or [0.0])
            for layer in layers.values()
        ),
        default=0,
    )


class _Gathered(NamedTuple):
    """A weight of a layer of the running period: its bytes, whether it is trained, its slot, whether it is experts'."""

    size: float
    trained: bool
    slot: str
    experts: bool


def _at_once(weights: list[_Gathered], most: int) -> float:
    """Returns the gathered bytes of a period: the largest `most` layers, of whose experts only one layer's.

    A layer gathers its experts' weights where it multiplies them; the compiler gathers the others ahead.
    """
    sums: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for weight in weights:
        sums[weight.experts][weight.slot] = sums[weight.experts].get(weight.slot, 0.0) + weight.size
    return max(sums[True].values(), default=0.0) + sum(sorted(sums[False].values())[-most:])


def _whole_sequences(program: Program, rows: int) -> float:
    """Returns bytes of whole sequences in matmuls, where sequences are split only between matmuls (TP with SP)."""
    # Four copies: the layer's input, the gradients of its output and its input, and a transposed one for the weights'
    # gradients.
    job, mesh, seq = program.job, program.mesh, program.layout.mesh_axes("seq")
    gathered = [axis for axis in seq if axis in program.layout.mesh_axes("act_heads")]
    parts = math.prod(mesh.shape[axis] for axis in seq if axis not in gathered)
    gathered_bytes = rows * job.sequence / parts * program.head[1] * jnp.dtype(job.dtype).itemsize
    return 4 * gathered_bytes if gathered else 0.0


def _travelling(program: Program, rows: int) -> float:
    """Returns bytes of tokens sent to experts on other devices: a copy per chosen expert, at both ends."""
    job, experts = program.job, moes(program.plain)
    if program.layout.axis_size("act_expert") == 1:
        return 0.0
    copies = rows * job.sequence * max((m.router.top_k for m in experts), default=0)
    return 2 * copies * program.head[1] * jnp.dtype(job.dtype).itemsize


def _loss(program: Program, rows: int) -> float:
    """Returns bytes of the loss: the head's weight, its gradient unless it is frozen, a chunk's logits and their
    gradient."""
    # The gradient is there twice: in float32, and cast to be summed over devices; on GPUs both are float32. Plus the
    # rows, where they travel to parts of the head. On GPUs the weight is freed before its gradient is transposed.
    job, mesh, (vocab, dim) = program.job, program.mesh, program.head
    width = jnp.dtype(job.dtype).itemsize
    hidden = jax.ShapeDtypeStruct((program.rows // job.microbatches, job.sequence, dim), jnp.dtype(job.dtype))
    with sharding.use(program.layout):
        split = nn.head_split(hidden, (vocab, dim))
    parts = math.prod(mesh.shape[a] for a in split.vocab + split.gathered)
    travel = math.prod(mesh.shape[a] for a in split.gathered)
    tokens = rows * job.sequence * travel
    logits = min(nn.ROWS_AT_ONCE * travel, tokens) * (vocab / parts) * 4
    weight = 0 if parse_target(job.target).platform == "cuda" else width
    gradient = 4 + (weight or 4) if job.lora is None else 0
    return (
        (vocab / parts) * dim * (weight + gradient) + 2 * logits + (2 * tokens * dim * width if split.gathered else 0)
    )
