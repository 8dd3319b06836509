"""Quantizes a model: changes how its matmuls are computed, or how their weights are stored."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from maxlib import nn
from maxlib.nn import sites
from maxlib.nn.sites import Where
from maxlib.quantization._formats import FOUR_BIT_FLOATS, INFERENCE, TRAINING, Format, Rule, Rules, as_rules
from maxlib.quantization._matmul import Quantized

Model = TypeVar("Model")
Change = Callable[[Any, Format, str], Any]


def for_training(model: Model, rules: Rules) -> Model:
    """Returns a model whose matmuls round their operands; parameters, their paths and dtypes do not change.

    A stack whose layers are treated differently gets other groups, so that equal layers are still scanned. Works on
    `jax.eval_shape` of a model and inside `jit`, so that the function given to the Trainer may end with it. Matrices in
    layers of unknown types stay in full precision, with a warning.

        low = quantization.for_training(model, "fp8")

    Args:
        model: A model in full precision.
        rules: "int8" (weights and activations), "int8_gradients", "fp8" (e4m3 forward, e5m2 backward), "fp8_block"
            (e4m3 in blocks of 128, as DeepSeek-V3), "nvfp4" (4 bits, the last 15 % of a stack's layers in full
            precision); quantization-aware training, which rounds to what inference stores
            and multiplies in full precision: "int4_qat", "nvfp4_qat", "mxfp4_qat" (weights) and "int4_w4a8_qat"
            (activations in int8 too); a `Format`, or `Rule`s. The first matching rule applies; matmuls without a match
            stay in full precision.

    Raises:
        ValueError: when a rule matches nothing, or a layer cannot be quantized.
    """
    return _apply(model, as_rules(rules, TRAINING), _round_operands)


def for_inference(model: Model, rules: Rules) -> Model:
    """Returns a model with quantized weights, which are no longer trainable.

    A format given by name leaves matrices in full precision whose last dimension no group divides, with a warning that
    names them; patches of image encoders, and heads of 72, are such. A `Format` or a `Rule` refuses them.

        small = quantization.for_inference(model, "int8")
        print(quantization.report(small))

    Args:
        model: A model in full precision.
        rules: As for `for_training`, with these names. Weights only: "int8", "fp8", "int4" (groups of 32),
            "int4_asymmetric" (the same with zero points), "nf4" (groups of 64). Weights and activations: "int8_w8a8",
            "fp8_w8a8".

    Raises:
        ValueError: as for `for_training`, and when the groups of a named format divide no matrix.
    """
    if isinstance(rules, str):
        return _apply(model, rules_that_divide(model, rules), store)
    return _apply(model, as_rules(rules, INFERENCE), store)


def full_precision(model: Model) -> Model:
    """Returns a model with plain matmuls and with dequantized weights as parameters, in their original dtype.

    Args:
        model: A model from `for_training` or `for_inference`.
    """
    return sites.map_sites(model, lambda path, site: _restored(site))


def _apply(model: Any, rules: Sequence[Rule], change: Change) -> Any:
    """Applies `change` to each matmul with its format by the rules, and checks the rules."""
    decide = sites.Decisions(rules, lambda rule: rule.format)

    def made(site, format, path, _):
        return nn.stack.map_layers(lambda layer: change(layer, format, path), site)

    new = sites.change_sites(model, decide, made)
    _look_at_unknown(model, rules, decide)
    decide.check()
    return new


def _look_at_unknown(model: Any, rules: Sequence[Rule], decide: sites.Decide) -> None:
    """Warns about matrices in unknown layers that no rule excludes; raises ValueError if a rule quantizes one."""
    short = nn.tree.pattern_paths(model)
    matrices = [Where(path, "unknown") for path in dict.fromkeys(short[path] for path in sites.unknown(model))]
    if wrong := [where.path for where in matrices if decide(where) is not None]:
        raise ValueError(f"{wrong} do not belong to layers that can be quantized; use nn.Einsum or nn.ExpertLinear")
    if left := [where.path for where in matrices if sites.decide(rules, where) is None]:
        warnings.warn(
            f"these matrices stay in full precision, because their layer types are unknown: {left}. Use nn.Einsum or "
            'nn.ExpertLinear, or exclude them by a rule, Rule(None, match="...", kinds=("unknown",))',
            stacklevel=4,
        )


def rules_that_divide(model: Any, name: str) -> list[Rule]:
    """Returns the rules of a preset and, before them, one for each matrix that its groups do not divide."""
    (rule,) = as_rules(name, INFERENCE)
    format, short = rule.format, nn.tree.pattern_paths(model)
    assert format is not None
    divided = {
        short.get(f"{path}.w", path).removesuffix(".w"): divides(format, site.w)
        for path, site in sites.find(model, sites.SITES)
        if sites.kind_of(site) in rule.kinds
    }
    left = [path for path, is_divided in divided.items() if not is_divided]
    if left and len(left) == len(divided):
        raise ValueError(
            f"groups must divide the last dimension of a matrix; got {format}, which fits none of {left}: pass a smaller group"
        )
    if left:
        warnings.warn(
            f"these matrices stay in full precision, because their last dimension is not a multiple of the group of "
            f"{format}: {left}",
            stacklevel=3,
        )
    return [*(Rule(None, path) for path in left), rule]


def _round_operands(site: Any, format: Format, path: str) -> Any:
    """Makes a layer round its operands in training."""
    if isinstance(site, nn.Embed):
        raise ValueError(
            f"{path}: embeddings and heads have no matmul to quantize in training; exclude it from the rules"
        )
    if format.is_emulated and not divides(format, site.w):
        raise ValueError(
            f"{path}: the last dimension of its weight {site.w.shape} must be a multiple of the group; got {format}. Exclude "
            "it by a rule, or pass a Format with a smaller group"
        )
    check_plain(site, path)
    return sites.replace(site, matmul=Quantized(format))


def check_plain(site: Any, path: str) -> None:
    """Raises ValueError if a layer has an adapter, which a new matmul would drop."""
    if isinstance(getattr(site, "matmul", None), nn.matmul.LowRank):
        raise ValueError(f"{path} has an adapter: change the model's precision first, then add adapters to it")


def store(site: Any, format: Format, path: str) -> Any:
    """Returns a layer with its weight in `format`; `path` names it in errors."""
    if isinstance(site, nn.Embed) and format.activations is not None:
        raise ValueError(f"{path}: for embeddings and heads only weights can be quantized; got {format}")
    if format.block is not None or format.weights in FOUR_BIT_FLOATS or (format.activations and format.is_emulated):
        raise ValueError(
            f"{path}: blocks, nvfp4 and mxfp4 are for training; with rounded activations, stored weights must be of 8 bits "
            f"without groups. Got {format}"
        )
    check_plain(site, path)
    if isinstance(site.w, nn.quantized.QuantizedWeight):
        raise ValueError(f"{path} is already quantized; start from the model in full precision")
    w = site.w[...]
    if not divides(format, w):
        raise ValueError(
            f"{path}: the last dimension of its weight {w.shape} must be a multiple of the group; got {format}"
        )
    stored = nn.quantized.QuantizedWeight(
        w,
        qtype=format.weights,
        outputs=sites.outputs(site),
        group=format.group,
        axes=sites.axes_of(site),
        summed=site.w.get_metadata().get("summed"),
        symmetric=format.symmetric,
    )
    if isinstance(site, nn.Embed):
        return sites.replace(site, w=stored)
    matmul = nn.matmul.PlainMatmul() if format.activations is None else Quantized(format)
    return sites.replace(site, w=stored, matmul=matmul)


def divides(format: Format, w: Any) -> bool:
    """Returns True if groups of the format, or pairs of four-bit values, divide the last dimension of a matrix."""
    pair = 2 if format.weights in nn.quantized.FOUR_BITS else 1
    return w.shape[-1] % math.lcm(pair, format.group or 1) == 0


def _restored(site: Any) -> Any:
    """Returns a layer with a plain weight and a plain matmul."""
    check_plain(site, "the layer")
    if isinstance(site.w, nn.quantized.QuantizedWeight):
        site = sites.replace(site, w=site.w.restored())
    return site if isinstance(site, nn.Embed) else sites.replace(site, matmul=nn.matmul.PlainMatmul())
