"""Builds the training step of a job over shapes; nothing is allocated."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from maxlib import nn, observability, sharding, training
from maxlib.hardware import CHIPS
from maxlib.observability import flops_by_dtype
from maxlib.plan._job import Job, by_name, check_names
from maxlib.plan._targets import (
    COMPILED_GPUS,
    INSTALL_GPU_COMPILER,
    INSTALL_TPU_COMPILER,
    absent_devices,
    devices_of,
    has_gpu_compiler,
    has_tpu_compiler,
    parse_target,
)
from maxlib.sharding.pipelining import Schedule
from maxlib.training.losses import check_remat_names

_EIGHT_BITS = {"fp8": "float8_", "int8": "int8"}  # what their dtypes have in their names


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter of the model as used in arithmetic, independent of its storage format.

    Args:
        shape: The shape, including the layer axis of stacked layers.
        axes: The names of its axes.
        trained: False if it is frozen.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    trained: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step with shapes and shardings for its arguments.

    Args:
        job: The job that it was made from.
        layout: The layout; on an abstract mesh if the devices cannot be described.
        model: The model as shapes.
        state: The training state as shapes.
        batch: The inputs as shapes.
        optimizer: The optimizer.
        rows: Rows of the global batch.
        named: The implementations that the model's layers name, by op: those of the program that is compiled. Counts
            from shapes assume a CPU, which may not have them.
    """

    job: Job
    layout: sharding.Layout  # on an abstract mesh if the devices cannot be described
    model: Any
    state: training.TrainState
    batch: dict[str, Any]
    optimizer: optax.GradientTransformation
    rows: int
    named: dict[str, str]

    @property
    def mesh(self) -> Any:
        return self.layout.mesh

    @property
    def is_1f1b(self) -> bool:
        """True if a 1F1B pipeline computes the gradient."""
        return self.layout.pipeline is not None and self.layout.pipeline.schedule == "1f1b"

    @functools.cached_property
    def head(self) -> tuple[int, int]:
        """The shape of the head's weight: vocabulary and width."""
        return jax.eval_shape(lambda model: model.head_weight(), self.model).shape

    def lower(self) -> jax.stages.Lowered:
        """Lowers the step for the layout's devices."""
        step = self.job.train_step(self.optimizer)
        state = self.state
        if self.named:
            state = dataclasses.replace(state, rest=_choosing(state.rest, self.named))
        # cuDNN cannot be compiled without a GPU.
        without_gpu = "offline" if parse_target(self.job.target).platform == "cuda" else None
        if (attention := self.job.attention or without_gpu) is not None:
            state = dataclasses.replace(state, rest=nn.with_attention(state.rest, attention))
        with sharding.use(self.layout):
            return training.jit_step(step).lower(state, self.batch)

    @functools.cached_property
    def plain(self) -> Any:
        """The model as shapes, without adapters and in full precision."""
        return self.model if self.job.lora is None else jax.eval_shape(self.job.plain)

    @functools.cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The parameters by path: those of the model without adapters, and the factors."""
        matrices, trained = {}, self.state.trainable
        for model, filter in ((self.plain, nn.tree.is_trainable), (self.model, nn.tree.default_filter(self.model))):
            names = nn.tree.axes(model)
            matrices |= {
                path: Matrix(x.shape, names[path], path in trained)
                for path, x in nn.partition(model, filter)[0].items()
            }
        return matrices

    @functools.cached_property
    def forward_flops(self) -> float:
        """The FLOPs of one step's forward pass on all devices."""
        return self.rows * observability.forward_flops(self._loss, self.model, self._row, jax.random.key(0))

    @property
    def model_flops(self) -> float:
        """The model's FLOPs of one step on all devices, without gradients of what is frozen."""
        if self.job.lora is None:
            return 3 * self.forward_flops
        trained = dict.fromkeys(self.state.trainable, True)
        flags = nn.combine(trained, jax.tree.map(lambda _: False, self.state.rest))
        return self.rows * observability.training_flops(self._loss, self.model, self._row, trained=flags)

    @property
    def _loss(self) -> Any:
        return functools.partial(self.job.loss_function, dtype=jnp.dtype(self.job.dtype))

    @property
    def _row(self) -> dict[str, Any]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.job.batch_shapes(1))

    @functools.cached_property
    def narrow_share(self) -> dict[str, float]:
        """The share of a step's FLOPs whose operands have eight bits on the target's devices, by "fp8" and "int8"."""
        if self.job.quantization is None:
            return {}
        loss = functools.partial(self._loss, remat=self.job.remat)
        batch, key = self.job.batch_shapes(1), jax.eval_shape(lambda: jax.random.key(0))
        # The trace needs the kind of device, because some kinds multiply narrow operands that others widen first.
        target = parse_target(self.job.target)
        device = AbstractDevice([*target.chip.prefixes, "cpu"][0], None, target.platform.replace("cuda", "gpu"))
        mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):

            def step(model, batch, key):
                return jax.vjp(lambda model: loss(model, batch, key)[0], model)[1](jnp.float32(1))

            by_dtype = flops_by_dtype(
                step, nn.with_attention(self.model, "chunked"), batch, key
            )  # cuDNN needs the device
        sums = {
            kind: sum(n for what, n in by_dtype.items() if what.count(name) == 2) for kind, name in _EIGHT_BITS.items()
        }
        return {kind: flops / sum(by_dtype.values()) for kind, flops in sums.items() if flops}


def moes(model: Any) -> list[nn.MoE]:
    """Lists the mixtures of experts."""
    return [moe for _, moe in nnx.iter_modules(model) if isinstance(moe, nn.MoE)]


def make_program(job: Job) -> Program:
    """Builds the training step of a job.

    Args:
        job: The training step and its target.

    Raises:
        ValueError: when layout, batch or remat do not fit the model or the devices.
    """
    check_names(job)
    layout = _layout(job)
    rows = _rows(job, layout)
    model = jax.eval_shape(job.build)
    chosen = {mixer.op: getattr(mixer, "implementation", None) for mixer in nn.mixer.mixers(model)}
    named = {op: name for op, name in chosen.items() if op is not None and name is not None}
    model = _choosing(model, dict.fromkeys(named, None))
    places = sharding.shardings(model, layout)
    optimizer = _optimizer(job, model)
    model = jax.tree.map(lambda x, place: _at(x, place), model, places)
    state, batch = training.abstract_state(model, optimizer, layout=layout), _batch(job, layout, rows)
    program = Program(job, layout, model, state, batch, optimizer, rows, named)
    row = {"tokens": jax.ShapeDtypeStruct((1, job.sequence), jnp.int32)}
    check_remat_names(job.remat, state.trainable, state.rest, row)
    return program


def _choosing(model: Any, named: Mapping[str, Any]) -> Any:
    """Chooses the implementations of ops in all layers of a model, by op."""
    for op, implementation in named.items():
        model = nn.mixer.with_implementation(model, implementation, op=op)
    return model


def refused(job: Job) -> str | None:
    """Returns the reason why a job can only be estimated, or None."""
    target = parse_target(job.target)
    if target.platform == "tpu":
        return None if has_tpu_compiler() else f"libtpu is not installed; install it: {INSTALL_TPU_COMPILER}"
    if target.platform == "cpu":
        return None
    if target.chip not in [CHIPS[name] for name in COMPILED_GPUS]:
        return f"XLA's compiler needs a description of a GPU that is not there, and has none of the {target.chip.kind}"
    if not has_gpu_compiler():
        return f"jax's plugin for CUDA is not installed; install it: {INSTALL_GPU_COMPILER}"
    if job.offloads:
        return "GPUs are described without the host's memory, to which this job sends arrays"
    return None


def mesh_of(job: Job) -> jax.sharding.Mesh:
    """Returns the mesh of the target's devices, or of their places if nothing can be compiled for them."""
    target = parse_target(job.target)
    if job.dcn and target.slices == 1 and target.platform == "tpu":
        raise ValueError(f"dcn={job.dcn} is for several slices, such as {target.name}x2; {target.name} is one")
    return job.layout.mesh.make(absent_devices(target) if refused(job) else devices_of(target))


def _layout(job: Job) -> sharding.Layout:
    """Returns the job's layout over the devices of its target, or over as many that cannot be described."""
    mesh = mesh_of(job)
    if refused(job):
        mesh = AbstractMesh(mesh.devices.shape, mesh.axis_names, axis_types=mesh.axis_types)
    return sharding.Layout(mesh, job.layout.strategy)


def _at(x: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def _rows(job: Job, layout: sharding.Layout) -> int:
    """Returns the rows of the global batch. Raises ValueError unless the mesh divides rows and sequence."""
    mesh, schedule = layout.mesh, schedule_of(layout)
    _check_sizes(job)
    _check_pipeline(job, schedule)
    if job.sequence % (cut := layout.axis_size("seq")):
        raise ValueError(
            f"a sequence of {job.sequence} tokens does not divide into the {cut} parts that the strategy and the mesh "
            f"{dict(mesh.shape)} cut it into; change the sequence or the mesh"
        )
    rows = job.per_device_batch_size * mesh.size
    parts = layout.axis_size("batch")
    if rows != int(rows) or rows < 1 or rows % (parts * job.microbatches):
        raise ValueError(
            f"{job.per_device_batch_size} sequences per chip are {rows:g} in all, which must be a multiple of the {parts} parts that the "
            f"mesh cuts a batch into, times microbatches={job.microbatches}; change per_device_batch_size or the mesh {dict(mesh.shape)}"
        )
    if int(rows) // job.microbatches % (microbatches := schedule.microbatches):
        raise ValueError(
            f"{rows:g} sequences, by microbatches={job.microbatches}, cannot be split into the pipeline's {microbatches} microbatches; "
            f"change their number, as in --strategy fsdp+pp:8 --mesh stage={schedule.stages}, or per_device_batch_size"
        )
    return int(rows)


def schedule_of(layout: sharding.Layout) -> Schedule:
    """Returns the schedule of the layout's pipeline; that of a single stage without a pipeline."""
    if (pipeline := layout.pipeline) is None:
        return Schedule(1, 1, 1)
    return Schedule(layout.mesh.shape[pipeline.axis], pipeline.microbatches, pipeline.repeats)


def _check_pipeline(job: Job, schedule: Schedule) -> None:
    """Raises ValueError when 1F1B cannot take the loss, or microbatches are not a multiple of the stages."""
    stages, microbatches, repeats = schedule
    is_1f1b = any(getattr(strategy, "schedule", "gpipe") == "1f1b" for strategy in job.layout.strategies)
    if is_1f1b and not isinstance(job.loss_function, training.Loss):
        raise ValueError(
            f"a 1F1B pipeline needs a loss that is a subclass of training.Loss, got {job.loss!r}: take one, or --strategy "
            "fsdp+pp:8"
        )
    if is_1f1b and job.microbatches > 1:
        raise ValueError(
            f"microbatches={job.microbatches} cannot be combined with a 1F1B pipeline, which has its own: leave it out"
        )
    if repeats > 1 and microbatches % stages:
        raise ValueError(
            f"{microbatches} microbatches go around {repeats} times in groups of {stages} stages, of which they must be a multiple; "
            f"change the strategy, such as --strategy fsdp+pp:{2 * stages}x{repeats}, or the stages, --mesh stage={microbatches}"
        )


def _check_sizes(job: Job) -> None:
    sizes = {"sequence": job.sequence, "per_device_batch_size": job.per_device_batch_size}
    if wrong := {name: size for name, size in sizes.items() if not 0 < size < math.inf}:
        raise ValueError(f"sequence and per_device_batch_size must be positive; got {wrong}")


def _optimizer(job: Job, model: Any) -> Any:
    if job.optimizer == "adamw":
        return training.adamw(1e-4, mask=training.decay_mask(model))  # factors are matrices
    if job.optimizer == "muon":
        return training.muon(1e-4, model=model)
    if job.optimizer == "sgd":
        return optax.sgd(1e-4)
    if callable(job.optimizer) or ":" in str(job.optimizer):
        return by_name(job.optimizer, "optimizer")(model)
    raise ValueError(f"optimizer must be 'adamw', 'muon', 'sgd' or a function of a module; got {job.optimizer!r}")


def _batch(job: Job, layout: sharding.Layout, rows: int) -> dict[str, Any]:
    def place(x):
        return NamedSharding(layout.mesh, layout.spec(*training.batch_axes(x), what="batch"))

    return jax.tree.map(lambda x: _at(x, place(x)), job.batch_shapes(rows))


def bytes_on_device(tree: Any) -> int:
    """Returns the bytes of one device's shards in its own memory."""
    return sum(_bytes(x) for x in jax.tree.leaves(tree) if not sharding.memory.is_on_host(x))


def bytes_on_host(tree: Any) -> int:
    """Returns the bytes of one device's shards in the host's memory."""
    return sum(_bytes(x) for x in jax.tree.leaves(tree) if sharding.memory.is_on_host(x))


def _bytes(x: Any) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    width = 4 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
    return math.prod(shape) * width
