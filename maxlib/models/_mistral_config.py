"""What config.json and the files of Mistral's models share: sharpened queries, and a text model beside an encoder."""

from collections.abc import Sequence
from typing import Any

from maxlib import nn
from maxlib.models import _pixtral_vision as vision
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import HFConfig, Ignore, Renamed, Table, Weight, names

VISION_TYPES = {  # whose text is in `text_config`
    vision.MERGING: "Mistral3ForConditionalGeneration",
    vision.PLAIN: "LlavaForConditionalGeneration",
}
_SHARPENED = "llama_4_scaling_beta"


def _of_rope(hf: HFConfig) -> list[HFConfig]:
    """Returns the objects that describe the rope."""
    return [hf.nested(name) for name in ("rope_parameters", "rope_scaling") if hf.take(name, None, kind=dict)]


def check_length(hf: HFConfig, length: int | None = None) -> None:
    """Requires the length that the rope states to be that of the config, or `length` if the config states none."""
    for parameters in _of_rope(hf):
        parameters.require("max_position_embeddings", hf.take("max_position_embeddings", length, kind=int))


def read_sharpening(hf: HFConfig) -> float:
    """Returns the weight of the logarithm by which queries are sharpened, which config.json keeps with the rope."""
    values = [parameters.take(_SHARPENED) for parameters in _of_rope(hf) if _SHARPENED in parameters]
    if not values or not all(isinstance(value, int | float) and value == values[0] for value in values):
        raise ValueError(
            f"{hf.where('rope_parameters')}.{_SHARPENED} must be one number, got {values or 'none'}: this model "
            "sharpens its queries by it."
        )
    return float(values[0])


def written_sharpening(value: float) -> dict[str, Any]:
    """Returns what `read_sharpening` reads."""
    # transformers 5 takes the older of the two places.
    return {f"{place}.{_SHARPENED}": value for place in ("rope_parameters", "rope_scaling")}


def check_sharpened(rope: Rope, model_type: str) -> None:
    """Raises ValueError for a rope without the length in whose steps queries are sharpened."""
    if not isinstance(rope.scaling, YarnScaling):
        raise ValueError(
            f"a {model_type} sharpens its queries in steps of a YarnScaling's length (rope_parameters), got a rope with "
            f"scaling {rope.scaling}"
        )


def temperature(rope: Rope, sharpening: float) -> nn.TemperatureTuning | None:
    """Returns the factor on late queries: `1 + sharpening * log(1 + floor(index / length))`."""
    if not (sharpening and isinstance(rope.scaling, YarnScaling)):
        return None
    return nn.TemperatureTuning(rope.scaling.original_length, sharpening, offset=0)


def table(layer: Sequence[Weight], vision_config: vision.Vision | None) -> Table:
    """Returns the table of a model whose layers have the entries `layer`."""
    if vision_config is not None:
        # transformers puts the prefix elsewhere.
        renamed = [Renamed("lm_head.", "language_model.lm_head.")]
        renamed += [Renamed("model.language_model.", "language_model.model.")]
        return [*names.decoder_table(layer, prefix="language_model."), *vision.table(), *renamed]
    # A text model is also read from the files of one that sees, under both names that it may have.
    renamed = [Renamed("model.language_model.", "language_model.model."), Renamed("language_model.", "")]
    images = [
        Ignore(f"{prefix}{part}.*") for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
    ]
    return [*names.decoder_table(layer), *renamed, *images]
