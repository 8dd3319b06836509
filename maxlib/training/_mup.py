"""muP: learning rates and initial values with which a rate suits models of every width and depth."""

import math
from typing import Any, Literal, TypeVar

from maxlib import nn, sharding
from maxlib.training._optimizers import muon_dimensions

Model = TypeVar("Model")


def mup_lr_factors(
    model: Any, base: Any, *, optimizer: Literal["adam", "muon"] = "adam", depth_exponent: float | None = None
) -> dict[str, float]:
    """Computes the factor on the learning rate of each weight in a wider or deeper model (muP, arXiv:2203.03466).

    A learning rate tuned on `base` then transfers to `model`, if the model is initialised with `mup_init` and its
    heads are as wide as those of `base`. Weights that sum over their inputs (matrices of layers, and an untied head)
    get the factor base inputs / inputs; embeddings, norms and biases keep their rate. A head tied to the embeddings has
    no factor, and its logits grow with the width.

    Updates of `muon` have the root mean square 0.2 and so a spectral norm of 0.2 √max(inputs, outputs), which must be
    in proportion to √(outputs / inputs) (arXiv:2310.17813): the factor of layers' matrices is that of
    √(outputs / inputs) / √max(inputs, outputs).

    With `depth_exponent` α, layers' outputs count as divided by `depth ** α`, so that a rate also transfers to a deeper
    model: matrices that write into the residual stream, whose initial values `mup_init` divides, get their factor
    divided by the ratio of depths to the power α, and all layers' matrices by its power 1 - α (CompleteP,
    arXiv:2505.01618, has α = 1; depth-muP, arXiv:2310.02244, 1/2).

    Args:
        model: The wider or deeper model; `jax.eval_shape` of it is enough.
        base: The same model in the size that was tuned.
        optimizer: "adam", or "muon" for the matrices inside layers.
        depth_exponent: α, or None for a model of the same depth.

    Returns:
        Factors by path, for `scale_by_path`.
    """
    wide, narrow = _fans(model), _fans(base)
    if wide.keys() != narrow.keys():
        raise ValueError(f"both must have the same weights; only one has {sorted(wide.keys() ^ narrow.keys())}")
    factors = {path: narrow[path][0] / wide[path][0] for path in wide}
    short = nn.tree.pattern_paths(model)
    matrices = {short[path] for path in muon_dimensions(model)}
    if optimizer == "muon":
        factors |= {path: _muon_size(*wide[path]) / _muon_size(*narrow[path]) for path in matrices}
    if depth_exponent is None:
        return factors
    deeper, writers = _depth(model) / _depth(base), _residual_writers(model)
    for path in matrices:
        factors[path] *= deeper ** (depth_exponent - 1)
        factors[path] *= deeper**-depth_exponent if path in writers else 1
    return factors


def _muon_size(inputs: int, outputs: int) -> float:
    """Returns the factor that gives an update of Muon the spectral norm √(outputs / inputs)."""
    return math.sqrt(outputs / inputs / max(inputs, outputs))


def _depth(model: Any) -> int:
    """Counts the layers of all stacks."""
    return sum(period * repeats for groups in nn.tree.groupings(model).values() for period, repeats in groups)


def _residual_writers(model: Any) -> set[str]:
    """Returns the pattern paths of layers' matrices whose outputs are the residual stream."""
    names, short = nn.tree.axes(model), nn.tree.pattern_paths(model)
    return {
        short[path]
        for path, (_, outputs) in muon_dimensions(model).items()
        if [names[path][d] for d in outputs] == ["embed"]
    }


def mup_init(model: Model, base: Any, *, depth_exponent: float | None = None) -> Model:
    """Scales the initial values of a fresh `model` for muP: an untied head is multiplied by base inputs / inputs.

    With `depth_exponent`, matrices that write into the residual stream are divided by the ratio of depths to its power.

    All other default initial values already have the right scale: 1 / sqrt(inputs) for matrices, and independent of the
    width for embeddings. See `mup_lr_factors`.

    Args:
        model: The wider model, freshly initialised.
        base: The same model in the size that was tuned; `jax.eval_shape` of it is enough.
        depth_exponent: As for `mup_lr_factors`.
    """
    heads = {path: factor for path, factor in mup_lr_factors(model, base).items() if path == "head.w"}
    if depth_exponent is not None:
        shrunk = (_depth(model) / _depth(base)) ** -depth_exponent
        heads |= dict.fromkeys(_residual_writers(model), shrunk)
    params, rest = nn.partition(model)
    short = nn.tree.pattern_paths(model)
    scaled = {path: heads[short[path]] for path in params if short[path] in heads}
    return nn.combine(
        params | {path: (params[path] * f).astype(params[path].dtype) for path, f in scaled.items()}, rest
    )


def _fans(model: Any) -> dict[str, tuple[int, int]]:
    """Counts the inputs that each matrix sums over, and its outputs, by pattern path."""
    sizes, short = {}, nn.tree.pattern_paths(model)
    summed = nn.tree.summed_axes(model) | {path: ("embed",) for path in short if short[path] == "head.w"}
    for path, variable in nn.variables(model).items():
        if path in summed:
            names, shape = variable.get_metadata()["axes"], variable.get_value().shape
            count = sharding.layers.num_layer_axes(names)
            named = [(name, n) for name, n in zip(names[count:], shape[count:], strict=True) if name != "expert"]
            inputs = math.prod(n for name, n in named if name in summed[path])
            sizes[short[path]] = inputs, math.prod(n for _, n in named) // inputs
    return sizes
