"""Optimizers with common settings for language models; any optax optimizer works as well.

All of them take `{path: array}` and identify weights by the names of their axes, so layers in a stack are treated
separately.
"""

import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlib import nn, sharding
from maxlib.training._matrix_optimizers import Dimensions, Normalize, scale_by_dion, scale_by_muon, scale_by_soap
from maxlib.training._moments import bfloat16_moments, eight_bit_moments, in_float32
from maxlib.training._offload import offload_by_layer

Mask = Callable[[dict[str, Any]], dict[str, bool]]
# Names of parameters that never decay, like those that end in "_bias". `magnitude` is DoRA's.
BIASES = ("b", "bias", "magnitude")
# Names of parameters that are vectors in every layer.
VECTORS = (*BIASES, "scale", "sinks", "a_log", "d", "alpha_p", "alpha_n")


def decay_by_name(params: Mapping[str, Any], stacked: Collection[str] | None = None) -> dict[str, bool]:
    """Selects the parameters that decay by path and shape: matrices, embeddings and both factors of adapters, but not
    biases, norm scales, sinks and the magnitudes of DoRA.

    Args:
        params: Arrays by path.
        stacked: Paths of arrays that store several layers, as `make_train_step` passes them. Without them, norm scales
            and other common vectors are recognized by name, and any other vector in a stack counts as a matrix.
    """
    names, layers = (VECTORS, ()) if stacked is None else (BIASES, stacked)

    def decays(path: str, x: Any) -> bool:
        is_vector = _is_named(path, names, params) or path.endswith("_bias")
        return len(getattr(x, "shape", ())) - (path in layers) >= 2 and not is_vector

    return {path: decays(path, x) for path, x in params.items()}


def _decay_by_name(rate: float) -> optax.GradientTransformationExtraArgs:
    """Adds weight decay to the parameters that `decay_by_name` selects, by the shapes of single layers in a training
    step.
    """

    def update(updates, state, params=None, *, stacked=None, **extra):
        assert params is not None  # the step gives them
        decays = decay_by_name(params, stacked)
        return {path: u + rate * params[path] if decays[path] else u for path, u in updates.items()}, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _is_named(path: str, names: tuple[str, ...], known: Collection[str]) -> bool:
    """Returns True if a path ends in one of these names. A "b" next to an "a" is an adapter's factor and not a bias."""
    parent, _, name = path.rpartition(".")
    return name in names and not (name == "b" and f"{parent}.a" in known)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    mask: Mask | dict[str, bool] | None = decay_by_name,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip: float | None = 1.0,
    moments: Any = jnp.float32,
) -> optax.GradientTransformation:
    """Returns AdamW (arXiv:1711.05101) after clipping the gradient's global norm to `clip`.

        optimizer = training.adamw(training.warmup_cosine(3e-4, steps=10_000, warmup=500))

    Args:
        learning_rate: A number, or a schedule from step to number.
        mask: Selects the parameters that decay. The default takes matrices and embeddings, in a training step by the
            shapes of single layers, elsewhere by their names; `decay_mask(model)` selects them by their axes; None
            decays everything.
        weight_decay: Weights shrink by `learning_rate * weight_decay` at each step.
        b1: Decay of the mean gradient.
        b2: Decay of the mean squared gradient.
        eps: Added to the root of the mean squared gradient.
        clip: Maximum global norm of the gradient; None disables clipping.
        moments: Dtype of the moments for any dtype of the parameters: float32, bfloat16 (see `bfloat16_moments`) or
            float8_e4m3fn (see `eight_bit_moments`).
    """
    if not callable(learning_rate) and not isinstance(learning_rate, numbers.Real | np.ndarray | jax.Array):
        raise TypeError(f"learning_rate must be a number or a schedule from step to number, got {learning_rate!r}")
    if mask is not None and not callable(mask) and not isinstance(mask, Mapping):
        raise TypeError(f"mask must be None, a dictionary or a function from parameters to one, got {mask!r}")
    by_name = mask is decay_by_name
    decay = _decay_by_name(weight_decay) if by_name else optax.add_decayed_weights(weight_decay, mask)
    rates = optax.scale_by_learning_rate(learning_rate)
    adam = optax.chain(optax.scale_by_adam(b1=b1, b2=b2, eps=eps), decay, rates)
    return _clipped(_held_in(moments, adam), clip)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    model: Any,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: float = 0.1,
    beta: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip: float | None = 1.0,
    moments: Any = jnp.float32,
    split_heads: bool = False,
    normalize: Normalize | None = None,
    nesterov: bool = True,
) -> optax.GradientTransformation:
    """Returns Muon (arXiv:2502.16982) for the matrices inside layers, and AdamW for embeddings, head, routers, norms,
    biases.

    The update of each layer's and each expert's matrix is orthogonalized as an inputs x outputs matrix. It is scaled to
    the size of Adam's updates, so `learning_rate` and `weight_decay` have the same meaning. Under a layout each device
    orthogonalizes some of the matrices, so that none gathers all of them.

        optimizer = training.muon(1e-3, model=model)

    Args:
        learning_rate: A number, or a schedule from step to number.
        model: Determines the axes; `jax.eval_shape` of a model is enough.
        adam_learning_rate: Learning rate of AdamW; None means the same rate.
        weight_decay: As in `adamw`.
        beta: Decay of Muon's momentum.
        b1: As in `adamw`.
        b2: As in `adamw`.
        eps: As in `adamw`.
        clip: As in `adamw`.
        moments: As in `adamw`.
        split_heads: True orthogonalizes the projections to queries, keys and values head by head, False all heads
            together.
        normalize: "rows" divides updates by the root mean square of each output (NorMuon, arXiv:2510.05491),
            "elements" of each element (AdaMuon, arXiv:2507.11005, usually with `nesterov=False`); None does neither.
        nesterov: True looks one step of the momentum ahead.
    """
    dims = muon_dimensions(model, split_heads=split_heads)
    orthogonal = scale_by_muon(
        dims, nn.tree.axes(model), beta=beta, nesterov=nesterov, normalize=normalize, beta2=b2, eps=eps
    )
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    adam = optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask(model))
    return _clipped(_held_in(moments, _beside(adam, orthogonal, dims, learning_rate, weight_decay)), clip)


def soap(
    learning_rate: optax.ScalarOrSchedule,
    *,
    model: Any,
    weight_decay: float = 0.1,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    precondition_every: int = 10,
    max_size: int = 8192,
    clip: float | None = 1.0,
) -> optax.GradientTransformation:
    """Returns SOAP (arXiv:2409.11321) for the matrices inside layers, and AdamW for everything else.

    Each layer's and each expert's matrix has preconditioners of its own, of inputs x inputs and outputs x outputs, on
    every device. The first step only begins them.

    Args:
        learning_rate: A number, or a schedule from step to number.
        model: Determines the axes; `jax.eval_shape` of a model is enough.
        weight_decay: As in `adamw`.
        b1: Decay of the mean gradient.
        b2: Decay of the mean squared gradient, and of the preconditioners.
        eps: As in `adamw`.
        precondition_every: Steps between new eigenbases.
        max_size: A side of a matrix that is longer is not preconditioned.
        clip: As in `adamw`.
    """
    dims = muon_dimensions(model)
    preconditioned = scale_by_soap(
        dims,
        nn.tree.axes(model),
        b1=b1,
        b2=b2,
        eps=eps,
        precondition_every=precondition_every,
        max_size=max_size,
    )
    adam = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask(model))
    return _clipped(in_float32(_beside(adam, preconditioned, dims, learning_rate, weight_decay)), clip)


def dion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    model: Any,
    rank: int = 128,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: float = 0.01,
    beta: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip: float | None = None,
) -> optax.GradientTransformation:
    """Returns Dion (arXiv:2504.05295) for the matrices inside layers, and AdamW for everything else.

    Updates have orthogonal factors of a low rank, so they cost less than those of `muon` for wide matrices. As in the
    paper, an update's spectral norm is `learning_rate` times √(outputs / inputs), so rates are about ten times those of
    Adam.

    Args:
        learning_rate: A number, or a schedule from step to number.
        model: Determines the axes; `jax.eval_shape` of a model is enough.
        rank: Rank of an update.
        adam_learning_rate: Learning rate of AdamW; None means the same rate.
        weight_decay: As in `adamw`.
        beta: Decay of Dion's momentum.
        b1: As in `adamw`.
        b2: As in `adamw`.
        eps: As in `adamw`.
        clip: As in `adamw`.
    """
    dims = muon_dimensions(model)
    low_rank = scale_by_dion(dims, nn.tree.axes(model), rank=rank, beta=beta, eps=eps)
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    adam = optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask(model))
    return _clipped(in_float32(_beside(adam, low_rank, dims, learning_rate, weight_decay)), clip)


def _beside(
    adam: optax.GradientTransformation,
    scale: optax.GradientTransformation,
    dims: Mapping[str, Any],
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
) -> optax.GradientTransformation:
    """Returns an optimizer that updates the paths of `dims` with `scale`, decayed, and all others with `adam`."""
    rate = optax.scale_by_learning_rate(learning_rate)
    matrices = optax.chain(scale, optax.add_decayed_weights(weight_decay), rate)

    def kinds(params: dict[str, Any]) -> dict[str, str]:
        return {path: "matrix" if path in dims else "rest" for path in params}

    return optax.partition({"matrix": matrices, "rest": adam}, kinds)


def _held_in(moments: Any, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    match jnp.dtype(moments).name:
        case "float32":
            return offload_by_layer(in_float32(optimizer))
        case "bfloat16":
            return bfloat16_moments(optimizer)
        case "float8_e4m3fn":
            return eight_bit_moments(optimizer)
    raise ValueError(f"moments must be float32, bfloat16 or float8_e4m3fn, got {jnp.dtype(moments).name}")


def _clipped(optimizer: optax.GradientTransformation, clip: float | None) -> optax.GradientTransformation:
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be positive, or None for no clipping, got {clip}")
    return optimizer if clip is None else optax.chain(clip_by_global_norm(clip), optimizer)


def muon_dimensions(model: Any, *, split_heads: bool = False) -> dict[str, Dimensions]:
    """Finds the input and output dimensions of each matrix in layers by path; other dimensions number the matrices.

    Args:
        model: Determines the axes.
        split_heads: True makes a matrix of each head that a projection computes.
    """
    dimensions = {}
    for path, summed in nn.tree.summed_axes(model).items():
        variable = nn.variables(model)[path]
        names = variable.get_metadata()["axes"]
        axes = range(sharding.layers.num_layer_axes(names), len(names))  # without a stack's layer axis
        inputs = tuple(d for d in axes if names[d] in summed)
        apart = {"expert", "heads", "kv_heads"} if split_heads and "head_dim" in names else {"expert"}
        outputs = tuple(d for d in axes if names[d] not in summed and names[d] not in apart)
        if inputs and outputs and not {"router", "head"} & {*path.split(".")}:  # such as a head of scores
            dimensions[path] = inputs, outputs
    return dimensions


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Returns a transformation that scales all gradients so that their common norm is at most `limit`.

    It multiplies by one factor, which XLA fuses into the update. optax's version selects between arrays, which on a CPU
    keeps a second copy of all gradients and makes AdamW 2.5 times as slow.

    Args:
        limit: Maximum norm.
    """

    def update(updates, state, params=None):
        scale = jnp.minimum(1.0, limit / optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), updates)))
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decay_mask(model: Any) -> Mask:
    """Selects the weights for weight decay: those with two or more axes, including embeddings and both factors of
    adapters, but no norm scales, biases, sinks or magnitudes of DoRA.

    Axes are counted by their names (`nn.tree.own_axes`), so a norm scale that a stack stores as a matrix is still a
    vector.

    Args:
        model: A model, or `jax.eval_shape` of one.
    """
    names = nn.tree.axes(model)
    decays = {
        path: len(nn.tree.own_axes(axes)) >= 2 and not _is_named(path, ("b", "bias", "magnitude"), names)
        for path, axes in names.items()
    }
    return lambda params: {path: decays[path] for path in params}
