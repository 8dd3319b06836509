"""Names of Gemma 4's weights: text, with what only some sizes have, and both kinds of encoders of images and sound."""

from typing import Any

from maxlib.models._gemma4_audio import Audio, UnifiedAudio
from maxlib.models._gemma4_vision import UnifiedVision, Vision
from maxlib.weights import Ignore, Renamed, Table, Weight, names

SEES, HEARS = ("vision_tower", "embed_vision", "vision_embedder"), ("audio_tower", "embed_audio")
PATCH = "E (a b C) -> E a b C"  # rows and columns of a patch's pixels, and colors


def table(cfg: Any) -> Table:
    """Maps the tensor names of the releases to parameters; `cfg` is a `gemma4.Config`."""
    fused = (("gate", 0), ("up", cfg.expert_dim or 0))  # in one tensor, first all rows of the gates
    layer = [
        *names.SANDWICH_NORMS,
        *names.ATTENTION,
        *names.MLP,
        Weight("layer_scalar", "factor"),
        Weight("router.proj.weight", "moe.router.gate.w"),
        Weight("router.scale", "moe.router.norm.scale"),
        Weight("router.per_expert_scale", "moe.router.expert_scale"),
        *(Weight("experts.gate_up_proj", f"moe.{part}.w", "E F D -> E F D", at={"F": row}) for part, row in fused),
        Weight("experts.down_proj", "moe.down.w"),
        Weight("pre_feedforward_layernorm_2.weight", "moe_norm.scale"),
        Weight("post_feedforward_layernorm_1.weight", "mlp_own_norm.scale"),
        Weight("post_feedforward_layernorm_2.weight", "moe_post_norm.scale"),
        Weight("per_layer_input_gate.weight", "per_layer.gate.w"),
        Weight("per_layer_projection.weight", "per_layer.proj.w"),
        Weight("post_per_layer_input_norm.weight", "per_layer.norm.scale"),
    ]
    text = "model.language_model" if cfg.encoders else "model"
    per_layer = [
        Weight(f"{text}.embed_tokens_per_layer.weight", "per_layer.embed.w"),
        Weight(f"{text}.per_layer_model_projection.weight", "per_layer.proj.w"),
        Weight(f"{text}.per_layer_projection_norm.weight", "per_layer.norm.scale"),
    ]
    # Releases have keys and values also of layers that take others'.
    takers = [i for i, (_, role) in enumerate(cfg.kinds) if role == "takes"]
    ignored: list[Any] = [Ignore(f"{text}.layers.{i}.self_attn.{part}_*") for i in takers for part in "kv"]
    # A model is also read without the encoders that its checkpoint has.
    unread = (() if cfg.vision else SEES) + (() if cfg.audio else HEARS)
    ignored += [Ignore(f"model.{name}.*") for name in unread]
    if not cfg.encoders:
        return [*names.decoder_table(layer), *per_layer, Renamed("model.language_model.", "model."), *ignored]
    read = [*(_images(cfg.vision) if cfg.vision else ()), *(_audio(cfg.audio) if cfg.audio else ())]
    return [*names.decoder_table(layer, model=text), *per_layer, *read, *ignored]


def _audio(cfg: Audio | UnifiedAudio) -> list[Weight]:
    """Lists the tensors of the encoder of sound."""
    projector = Weight("model.embed_audio.embedding_projection.weight", "audio_tower.projector.proj.w")
    if isinstance(cfg, UnifiedAudio):
        return [projector]
    hf_prefix = "model.audio_tower"
    inner = f"{hf_prefix}.subsample_conv_projection"
    table = [Weight(f"{inner}.input_proj_linear.weight", "audio_tower.enter.w", "E (m c) -> E m c"), projector]
    for n, part in enumerate(("first", "second")):
        table += [Weight(f"{inner}.layer{n}.conv.weight", f"audio_tower.{part}.w")]
        table += [Weight(f"{inner}.layer{n}.norm.weight", f"audio_tower.{part}.norm.scale")]
    table += [Weight(f"{hf_prefix}.output_proj.{name}", f"audio_tower.leave.{name[0]}") for name in ("weight", "bias")]
    return [*table, *names.under(_audio_layer(cfg), f"{hf_prefix}.layers.{{i}}", "audio_tower.layers.{i}")]


def _audio_layer(cfg: Audio) -> list[Weight]:
    """Lists the tensors of a layer of the encoder of sound."""
    linear = [("self_attn.post", "attn.o", "D (N H) -> D N H")]
    linear += [(f"self_attn.{part}_proj", f"attn.{part}", "(N H) D -> N H D") for part in "qkv"]
    linear += [(f"lconv1d.linear_{end}", f"conv.{name}", None) for end, name in (("start", "enter"), ("end", "leave"))]
    norms = [("lconv1d.pre_layer_norm", "conv.norm"), ("lconv1d.conv_norm", "conv.filter_norm")]
    norms += [("norm_pre_attn", "attn_norm"), ("norm_post_attn", "attn_post_norm"), ("norm_out", "norm")]
    for n, mlp in ((1, "first_mlp"), (2, "second_mlp")):
        inner = f"feed_forward{n}"
        linear += [(f"{inner}.ffw_layer_{k}", f"{mlp}.{part}", None) for k, part in ((1, "up"), (2, "down"))]
        norms += [(f"{inner}.pre_layer_norm", f"{mlp}.norm"), (f"{inner}.post_layer_norm", f"{mlp}.post_norm")]
    return [
        *(Weight(f"{hf_name}.weight", f"{path}.scale") for hf_name, path in norms),
        *(entry for projection in linear for entry in _linear(*projection, clipped=cfg.clipped)),
        Weight("self_attn.relative_k_proj.weight", "attn.distance.w", "(N H) D -> N H D"),
        Weight("self_attn.per_dim_scale", "attn.scale"),
        Weight("lconv1d.depthwise_conv1d.weight", "conv.filter", "D one W -> D W", at={"one": 0}),
    ]


def _linear(hf_name: str, path: str, pattern: str | None, *, clipped: bool) -> list[Weight]:
    """Lists the tensors of a linear layer, which is one level deeper in files, and here where it has bounds."""
    bounds = [f"{side}_{end}" for side in ("input", "output") for end in ("min", "max")] if clipped else []
    return [
        Weight(f"{hf_name}.linear.weight", f"{path}.linear.w" if clipped else f"{path}.w", pattern),
        *(Weight(f"{hf_name}.{bound}", f"{path}.{bound}") for bound in bounds),
    ]


def _images(cfg: Vision | UnifiedVision) -> list[Weight]:
    """Lists the tensors of the encoder."""
    projector = Weight("model.embed_vision.embedding_projection.weight", "tower.projector.proj.w")
    if isinstance(cfg, UnifiedVision):
        hf_prefix = "model.vision_embedder"
        return [
            *names.layer_norm(f"{hf_prefix}.patch_ln1", "tower.patch_norm"),
            Weight(f"{hf_prefix}.patch_dense.weight", "tower.patches.w", PATCH),
            Weight(f"{hf_prefix}.patch_dense.bias", "tower.patches.b"),
            *names.layer_norm(f"{hf_prefix}.patch_ln2", "tower.embed_norm"),
            *_positions(f"{hf_prefix}.pos_embedding", "P two E -> P E"),
            *names.layer_norm(f"{hf_prefix}.pos_norm", "tower.position_norm"),
            projector,
        ]
    hf_prefix = "model.vision_tower"
    return [
        Weight(f"{hf_prefix}.patch_embedder.input_proj.weight", "tower.patches.w", PATCH),
        *_positions(f"{hf_prefix}.patch_embedder.position_embedding_table", "two P E -> P E"),
        *names.under(_encoder_layer(cfg), f"{hf_prefix}.encoder.layers.{{i}}", "tower.layers.{i}"),
        Weight(f"{hf_prefix}.std_bias", "tower.bias"),
        Weight(f"{hf_prefix}.std_scale", "tower.scale"),
        projector,
    ]


def _positions(hf_name: str, pattern: str) -> list[Weight]:
    """Lists both tables of positions, which files have in one."""
    return [
        Weight(hf_name, f"tower.positions.{part}", pattern, {"two": n}) for n, part in enumerate(("columns", "rows"))
    ]


def _encoder_layer(cfg: Vision) -> list[Weight]:
    """Lists the tensors of a layer of the image encoder."""
    table: list[Weight] = list(names.SANDWICH_NORMS)
    for entry in (*names.ATTENTION, *names.MLP):
        stem, _, last = entry.hf_name.rpartition(".")
        if "_norm" in stem:
            table.append(entry)
        elif last == "weight":
            table += _linear(stem, entry.path.removesuffix(".w"), entry.pattern, clipped=cfg.clipped)
    return table
