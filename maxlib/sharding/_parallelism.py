"""Strategies that only change rules and placement: over the batch, tensor and expert parallelism, offloading."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import AxisRules, IfFree, mesh_axes_of
from maxlib.sharding._mesh import check_mesh_axes
from maxlib.sharding._rules import split_further
from maxlib.sharding._strategy import StepFacts, Strategy, Traffic


@dataclasses.dataclass(frozen=True)
class DataParallel(Strategy):
    """Data parallelism: rows of the batch are split over devices, each with a copy of all parameters.

    Args:
        axes: The mesh axes that split the rows.
    """

    kind: ClassVar[str] = "batch"
    axes: tuple[str, ...] = ("data", "fsdp")

    def apply(self, rules: AxisRules) -> AxisRules:
        return {**rules, "batch": self.axes}

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields the sums of gradients over devices with different tokens and the same part of a weight."""
        # Devices that split a sequence, and stages that split rows, have different tokens too.
        others = {*step.axes("batch"), *step.axes("seq"), *step.axes("layers")}
        for weight in step.weights:
            if weight.trained:
                yield "all-reduce", others - {*weight.split}, weight.size / step.parts(weight.gathered)


@dataclasses.dataclass(frozen=True)
class FullyShard(Strategy):
    """FSDP (ZeRO-3, arXiv:1910.02054): parameters are split over devices that also split the batch.

    A weight is all-gathered when it is used, and its gradient is reduce-scattered. Parameters are replicated over
    `replicate_axis`; if that axis has more than one device, this is hybrid sharding (HSDP).

    Args:
        shard_axis: The mesh axis that splits the batch, and parameters along the width of the residual stream.
        replicate_axis: The mesh axis that splits the batch only.
        by_expert: True splits the matrices of a mixture by expert instead of by width.
        gather_dtype: "float8_e4m3fn" or "float8_e5m2" rounds the matrices of `nn.Einsum` for the all-gathers, which
            then move half of the bytes of bfloat16. Devices round what they have, with a float32 scale for each index
            of the split dimension, and dequantize what they gathered; gradients do not change. Experts, embeddings and
            heads are gathered in the compute dtype, as everything is with None.

    Raises:
        ValueError: for another `gather_dtype`.
    """

    kind: ClassVar[str] = "fsdp"
    shard_axis: str = "fsdp"
    replicate_axis: str = "data"
    by_expert: bool = False
    gather_dtype: str | None = None

    def __post_init__(self):
        if self.gather_dtype not in (None, "float8_e4m3fn", "float8_e5m2"):
            raise ValueError(f"gather_dtype must be None, 'float8_e4m3fn' or 'float8_e5m2'; got {self.gather_dtype!r}")

    def apply(self, rules: AxisRules) -> AxisRules:
        # Nearly every matrix of a layer has one axis "embed", so one rule splits them all. MLA's up-projections have
        # "rank" instead, which uses the mesh axis only there.
        axis = self.shard_axis
        experts = {"expert" if self.by_expert else "expert_embed": axis}
        return {**rules, "batch": (self.replicate_axis, axis), "embed": axis, "rank": IfFree(axis), **experts}

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields the all-gathers of weights for the forward and backward passes, and the reduce-scatters of
        gradients.
        """
        for weight in step.weights:
            rounds = self.gather_dtype is not None and len(weight.axes) > 1 and not {"expert", "vocab"} & {*weight.axes}
            yield "all-gather", weight.gathered, 2 * weight.size * weight.uses / (step.width if rounds else 1)
            yield "reduce-scatter", weight.gathered, weight.size * weight.uses * weight.trained


@dataclasses.dataclass(frozen=True)
class ShardOptimizer(Strategy):
    """ZeRO-1 (arXiv:1910.02054): the optimizer's moments are split further than the parameters.

    The mesh axis splits the longest dimension that it divides.

    Args:
        axis: A mesh axis over which parameters are replicated.
    """

    kind: ClassVar[str] = "optimizer"
    axis: str = "data"

    def check(self, mesh: Any, others: tuple[Strategy, ...]) -> None:
        check_mesh_axes([self.axis], str(self), mesh.axis_names)

    def optimizer_spec(self, spec: P, shape: tuple[int, ...], mesh: Any) -> P:
        return split_further(spec, shape, (self.axis,), mesh)


# Of two consecutive matmuls, [D, F] then [F, D], the first is split by its outputs and the second by its inputs. There
# is no communication between them, and one sum over devices after them.
_SPLIT = ("vocab", "heads", "kv_heads", "mlp", "act_heads", "attn_heads", "act_mlp", "act_vocab")


@dataclasses.dataclass(frozen=True)
class TensorParallel(Strategy):
    """Tensor parallelism: heads, inner widths and the vocabulary are split, in parameters and activations.

    Args:
        axis: The mesh axis.
    """

    kind: ClassVar[str] = "tensor"
    axis: str = "tensor"

    def apply(self, rules: AxisRules) -> AxisRules:
        return {**rules, **dict.fromkeys(_SPLIT, self.axis)}

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields two all-reduces, of attention and of the MLP, for every pass of every layer."""
        yield "all-reduce", step.axes("act_heads"), 2 * step.passes * step.layers * step.hidden


@dataclasses.dataclass(frozen=True)
class SequenceParallel(Strategy):
    """Sequence parallelism (Megatron, arXiv:2205.05198), for norms and the residual stream.

    Outside the matmuls that tensor parallelism splits, the same mesh axis splits activations by sequence.

    Args:
        axis: The mesh axis of `TensorParallel`.
    """

    kind: ClassVar[str] = "tensor_sequence"
    axis: str = "tensor"

    def apply(self, rules: AxisRules) -> AxisRules:
        # The all-reduce after a matmul becomes a reduce-scatter, and an all-gather before the next one: the same
        # traffic, but the residual stream takes 1 / n of the memory. If heads or the inner width use the axis, "seq" is
        # not split.
        return {**rules, "seq": IfFree(self.axis)}


_BEST_RAGGED = ("tpu",)  # platforms on which exchanges without padding are faster


@dataclasses.dataclass(frozen=True)
class ExpertParallel(Strategy):
    """Expert parallelism (GShard, arXiv:2006.16668): experts are split over a mesh axis of their own.

    The rest of the model uses that axis for more data parallelism, and for more FSDP if parameters are fully sharded.

    Args:
        axis: The mesh axis.
        exchange: "ragged" sends each device exactly its tokens (ragged all-to-all); "dense" pads all messages to one
            size; None chooses by device.

    Raises:
        ValueError: for another `exchange`.
    """

    kind: ClassVar[str] = "experts"
    room: ClassVar[int] = 2  # padded messages have room for this many times an even share
    even: ClassVar[float] = 1.25  # so many, where ragged messages are about equal
    axis: str = "expert"
    exchange: str | None = None

    def __post_init__(self):
        if self.exchange not in (None, "ragged", "dense"):
            raise ValueError(f"exchange must be 'ragged', 'dense', or None to choose by device; got {self.exchange!r}")

    def apply(self, rules: AxisRules) -> AxisRules:
        # Outside the experts every device of the axis has different rows, so no work is repeated.
        more = {"batch": (*mesh_axes_of(rules.get("batch")), self.axis)}
        if rules.get("embed") is not None:
            # "expert_embed" does not change: experts already use the axis, and an array can only use it once.
            axes = (*mesh_axes_of(rules["embed"]), self.axis)
            more |= {"embed": axes, "rank": IfFree(axes)}
        return {**rules, **more, "expert": self.axis, "act_expert": self.axis}

    def is_ragged(self, platform: str, *, pipelined: bool) -> bool:
        """Returns True if tokens are exchanged without padding.

        Args:
            platform: "tpu", "gpu", "cuda" or "cpu".
            pipelined: True inside the stages of a pipeline, where ragged exchanges are untested.
        """
        return self.exchange == "ragged" or (self.exchange is None and platform in _BEST_RAGGED and not pipelined)

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields the exchanges of tokens: a copy of each is sent to every chosen expert, and the result is
        sent back.
        """
        ragged = self.is_ragged(step.platform, pipelined=bool(step.axes("layers")))
        for moe in step.experts:
            # Messages of equal size include their padding. The exchange is always recomputed in the backward pass, but
            # not the way back, as no gradient needs the results: five passes.
            room, kind = (1, "ragged-all-to-all") if ragged else (self.room, "all-to-all")
            yield kind, step.axes("act_expert"), 5 * moe.top_k * room * step.hidden * moe.layers


HOST = "pinned_host"  # page-locked, so devices can copy from it at full speed


@dataclasses.dataclass(frozen=True)
class Offload(Strategy):
    """Offloading: arrays are stored in host memory between their uses. Combining two of them does both.

    Args:
        optimizer: True stores the optimizer's moments on the host; the update copies them to the device layer by layer.
        layers: True stores the matrices of scanned layers on the host; each pass copies them to the device layer by
            layer.
    """

    kind: ClassVar[str] = "offload"
    optimizer: bool = False
    layers: bool = False

    def merge(self, earlier: Strategy) -> Strategy:
        assert isinstance(earlier, Offload)
        return Offload(self.optimizer or earlier.optimizer, self.layers or earlier.layers)

    def host_copies(self, step: StepFacts) -> tuple[float, float]:
        """Returns the bytes of moments and weights that a step copies to the host and from the host."""
        # Moments are copied both ways. Weights are copied to the device four times (forward, backward, optimizer,
        # update) and their gradients once; new weights and gradients are copied to the host.
        moments, weights = step.moments_on_host, step.weights_on_host
        return moments + 2.0 * weights, moments + 5.0 * weights

    def check(self, mesh: Any, others: tuple[Strategy, ...]) -> None:
        if not (self.optimizer or self.layers):
            return
        if any(other.kind == "pipeline" for other in others):
            raise ValueError(
                f"{self}: arrays that are copied from the host layer by layer cannot also be split into pipeline stages"
            )
        if isinstance(mesh, Mesh):
            device: Any = next(iter(mesh.local_devices or mesh.devices.flat))
            kinds = sorted(memory.kind for memory in device.addressable_memories())
            if HOST not in kinds:
                raise ValueError(
                    f"{self} needs the memory {HOST!r}, but {device.device_kind} only has {kinds}: omit it"
                )
