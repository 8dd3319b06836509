"""What config.json and the files of Mistral's models share: sharpened queries, and a text model beside an encoder."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from maxlib import nn
from maxlib.models import _pixtral_vision as vision
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import HFConfig, Ignore, Renamed, Table, Weight, names

VISION_TYPES = (vision.MERGING, vision.PLAIN)  # model types, whose text is in `text_config`
_SHARPENED = "llama_4_scaling_beta"


def _of_rope(fields: HFConfig) -> list[HFConfig]:
    """Returns the objects that describe the rope."""
    return [fields.nested(name) for name in ("rope_parameters", "rope_scaling") if fields.take(name, None, kind=dict)]


def check_length(fields: HFConfig, length: int | None = None) -> None:
    """Requires the length that the rope states to be that of the config, or `length` if the config states none."""
    for parameters in _of_rope(fields):
        parameters.require("max_position_embeddings", fields.take("max_position_embeddings", length, kind=int))


def read_sharpening(fields: HFConfig) -> float:
    """Returns the weight of the logarithm by which queries are sharpened, which config.json keeps with the rope."""
    found = [parameters.take(_SHARPENED) for parameters in _of_rope(fields) if _SHARPENED in parameters]
    if not found or not all(isinstance(value, int | float) and value == found[0] for value in found):
        raise ValueError(
            f"{fields.where('rope_parameters')}.{_SHARPENED} must be one number, got {found or 'none'}: this model "
            "sharpens its queries by it."
        )
    return float(found[0])


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


def read_seeing(fields: HFConfig, read_text: Callable[[HFConfig], Any]) -> Any:
    """Returns the configuration of a model that sees; `read_text` gives that of its text."""
    text = read_text(fields.nested("text_config"))
    return replace(text, tied=fields.take("tie_word_embeddings", text.tied), vision=vision.Vision.read(fields))


def written_seeing(text: dict[str, Any], sees: vision.Vision | None) -> dict[str, Any]:
    """Returns config.json of a model that sees, given that of its text; that of the text if it does not see."""
    if sees is None:
        return text
    name = "Mistral3" if sees.kind == vision.MERGING else "Llava"
    own = {"architectures": [f"{name}ForConditionalGeneration"], "tie_word_embeddings": text["tie_word_embeddings"]}
    return own | {"text_config": {k: v for k, v in text.items() if k != "architectures"}} | sees.written()


def table(layer: Sequence[Weight], sees: vision.Vision | None) -> Table:
    """Returns the table of a model whose layers have the entries `layer`."""
    if sees is not None:
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
