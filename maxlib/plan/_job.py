"""The `Job` to plan, and its JSON serialization for another process."""

import dataclasses
import inspect
import json
import pkgutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlib import adapters, nn, quantization, sharding, training, weights
from maxlib.ops import attention_implementations
from maxlib.plan._targets import parse_target
from maxlib.sharding import MeshShape

FSDP_EVERYWHERE = sharding.Layout({"fsdp": -1}, sharding.FSDP)


@dataclasses.dataclass(frozen=True)
class Job:
    """A training step and the hardware to plan it for. Functions must be importable from a module.

        layout = sharding.Layout({"fsdp": -1, "tensor": 4}, sharding.FSDP_TP)
        job = plan.Job("llama3.1-8b", "v5p-128", layout=layout, sequence=8192)

    Args:
        model: The name of a preset, a `Config` of a known family, a function without arguments that builds a model or
            returns a `Config`, or the name "module:name" of either.
        target: The hardware, a name for `parse_target`.
        layout: The layout: degrees and a strategy, `Layout({"fsdp": -1, "tensor": 4}, FSDP_TP)`, with `"dcn"` among the
            degrees for several slices or hosts; or the layout of a mesh of as many devices. By default `FSDP` over all
            of them.
        per_device_batch_size: Sequences per device in one step; a fraction where several devices share a sequence.
        sequence: Tokens of a sequence.
        remat: The `remat` argument of the model.
        attention: The implementation of `ops.attention` in all layers; None for the best that can run.
        optimizer: "adamw", "muon", "sgd", or a function `optimizer(model) -> optax.GradientTransformation`, or its name
            "module:name".
        dtype: Dtype of activations and of weights in matmuls.
        loss: A `training.Loss`, or a function with the options `dtype` and `remat`, or the name "module:name" of
            either.
        microbatches: Parts of a batch whose gradients are computed one after the other, as in
            `training.make_train_step`.
        batch: A function `batch(rows, sequence) -> {name: jax.ShapeDtypeStruct}`, or its name, for inputs of the loss
            other than int32 `tokens` and `targets`.
        lora: An `adapters.LoRA`, or `adapters.Rule`s, to train adapters of a frozen base; None trains the model itself.
        base: Storage format of the frozen base: a dtype, by default `dtype`, or a format of
            `quantization.for_inference`, such as "int8" or "nf4" (QLoRA).
        quantization: Rules of `quantization.for_training`, such as "fp8_block".
        options: XLA compiler options, by name.
    """

    model: Any
    target: str
    _: dataclasses.KW_ONLY
    layout: sharding.Layout = FSDP_EVERYWHERE
    per_device_batch_size: float = 1
    sequence: int = 2048
    remat: Any = "full"
    attention: str | None = None
    optimizer: Any = "adamw"
    dtype: str = "bfloat16"
    loss: Any = dataclasses.field(default_factory=training.NextToken)
    microbatches: int = 1
    batch: Any = None
    lora: Any = None
    base: str | None = None
    quantization: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.layout, sharding.Layout):
            raise TypeError(
                f"layout must be a sharding.Layout, such as Layout({{'fsdp': -1}}, FSDP), got {self.layout!r:.80}"
            )
        if self.base is not None and self.lora is None:
            raise ValueError(f"base={self.base!r} stores a frozen base, which only adapters have: give lora, too")
        if self.quantization is not None and self.lora is not None:
            raise ValueError(
                "quantization applies to training all weights: with lora, set base to the format of the frozen ones"
            )
        if not isinstance(mesh := self.layout.mesh, MeshShape):  # only its sizes go to other devices
            object.__setattr__(self, "layout", sharding.Layout(dict(mesh.shape), self.layout.strategy))

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of the mesh, within a slice or host if `dcn` has some."""
        return dict(self.layout.mesh.degrees)

    @property
    def dcn(self) -> dict[str, int]:
        """The degrees of the mesh across slices or hosts."""
        return dict(self.layout.mesh.dcn)

    def build(self) -> Any:
        """Builds the model that is trained, with its adapters; call it under `jax.eval_shape`.

        Raises:
            ValueError: for an unknown preset, `Config` or `base`, and for rules that fit nothing.
        """
        model = self.plain()
        if self.quantization is not None:
            model = quantization.for_training(model, self.quantization)
        if self.lora is None:
            return model
        return adapters.add(_stored(model, self.base or self.dtype, self.dtype), self.lora, rngs=nnx.Rngs(0))

    def plain(self) -> Any:
        """Builds the model without adapters, in full precision; call it under `jax.eval_shape`."""
        if isinstance(self.model, str) and ":" not in self.model:
            known = weights.presets()
            if self.model not in known:
                raise ValueError(f"{known.unknown(self.model)} A function of your own is named module:function.")
            return _from_config(known[self.model])
        model = by_name(self.model, "model")
        if callable(model):
            try:
                inspect.signature(model).bind()
            except TypeError as error:
                raise ValueError(
                    f"a plan builds a model by calling a function without arguments, which {model!r} does not allow "
                    f"({error}): give them in a function of your own, def build(): return Model(cfg, rngs=nnx.Rngs(0))"
                ) from error
            model = model()
        return model if isinstance(model, nnx.Module) else _from_config(model)

    @property
    def loss_function(self) -> Any:
        """The loss; found by its name if it is one, and made with its defaults if that names a class."""
        loss = by_name(self.loss, "loss")
        return loss() if isinstance(loss, type) else loss

    def train_step(self, optimizer: optax.GradientTransformation) -> Any:
        """Returns the training step.

        Raises:
            ValueError: when the loss does not take `dtype` and `remat`, or for less than one microbatch.
        """
        try:
            return training.make_train_step(
                self.loss_function,
                optimizer,
                dtype=jnp.dtype(self.dtype),
                remat=self.remat,
                microbatches=self.microbatches,
            )
        except TypeError as error:
            raise ValueError(str(error)) from error

    def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a batch of `rows`, by name."""
        ids = jax.ShapeDtypeStruct((rows, self.sequence), jnp.int32)
        more = {} if self.batch is None else by_name(self.batch, "batch")(rows, self.sequence)
        return {"tokens": ids, "targets": ids} | more

    @property
    def offloads(self) -> bool:
        """Returns True if the job offloads activations, moments or layers to host memory."""
        remat = nn.remat.POLICIES.get(self.remat) if isinstance(self.remat, str) else self.remat
        away = isinstance(remat, Mapping) and "offload" in remat.values()
        return away or any(isinstance(strategy, sharding.strategies.Offload) for strategy in self.layout.strategies)

    @property
    def title(self) -> str:
        """The model's name, for reports."""
        if isinstance(self.model, str):
            return self.model
        return getattr(self.model, "__qualname__", type(self.model).__module__)


def _stored(model: Any, base: str, dtype: str) -> Any:
    """Returns the model with its matrices in the dtype or format `base`, and all other weights in `dtype`."""
    if base in quantization.INFERENCE:
        return quantization.for_inference(nn.tree.cast(model, jnp.dtype(dtype)), base)
    if base not in ("float32", "bfloat16", "float16"):
        known = ", ".join(("float32", "bfloat16", *sorted(quantization.INFERENCE)))
        raise ValueError(f"base must be one of {known}; got {base!r}")
    return nn.tree.cast(model, jnp.dtype(base))


def _from_config(cfg: Any) -> Any:
    family = next((f for f in weights.families() if type(cfg) is f.config), None)
    if family is None:
        raise ValueError(
            f"{type(cfg).__name__} is not a Config of a known family; pass a function that builds the model"
        )
    return family.model(cfg, rngs=nnx.Rngs(0))


def by_name(thing: Any, what: str) -> Any:
    """Finds `"module:name"`; returns anything but a string as it is. Raises ValueError for what cannot be found."""
    if not isinstance(thing, str):
        return thing
    try:
        if ":" not in thing:
            raise ValueError("no colon separates module and name")
        return pkgutil.resolve_name(thing)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what} must be named module:name, of a module that can be imported; got {thing!r}: {error}"
        ) from error


def to_json(job: Job) -> str:
    """Writes a job as JSON, with functions and classes by name. Raises ValueError for those not found in a module."""
    return json.dumps(_encode(job))


def from_json(text: str) -> Job:
    """Reads a job that `to_json` wrote."""
    return _decode(json.loads(text))


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {"tuple": [_encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"new": _name(type(value)), "fields": fields}
    return {"name": _name(value)}


def _name(thing: Any) -> str:
    name = f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__qualname__', '?')}"
    try:
        named = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        named = None
    if named is not thing or name.startswith("__main__:"):
        raise ValueError(
            f"{thing!r} cannot be found by name in another process; put it into a module of its own"
            " (plan.estimated stays in this process)"
        )
    return name


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_decode(item) for item in value["tuple"])
    if "dict" in value:
        return {_decode(key): _decode(item) for key, item in value["dict"]}
    if "new" in value:
        return pkgutil.resolve_name(value["new"])(**{name: _decode(item) for name, item in value["fields"].items()})
    return pkgutil.resolve_name(value["name"])


# Prefixes of options that the compilers of other platforms do not know.
_TPU = ("xla_tpu_", "xla_sc_")
_FOREIGN = {"tpu": ("xla_gpu_",), "cuda": _TPU, "cpu": _TPU}


def check_names(job: Job) -> None:
    """Raises ValueError for a remat policy, attention, loss or option that the target does not support."""
    nn.remat.remat_policy(job.remat)
    job.train_step(optax.identity())
    platform = parse_target(job.target).platform
    where = platform.replace("cuda", "gpu")
    known = [k.name for k in attention_implementations() if k.platforms is None or where in k.platforms]
    if job.attention is not None and job.attention not in known:
        raise ValueError(f"attention on {job.target} must be one of {', '.join(known)}; got {job.attention!r}")
    if wrong := sorted(name for name in job.options if name.startswith(_FOREIGN[platform])):
        raise ValueError(
            f"the compiler for {job.target} has no option {wrong[0]}, which is another platform's: leave it out, or take --flags "
            "for this one (python -m maxlib.distributed.xla_flags shows them)"
        )
