"""Names of Gemma 4's weights: text, with what only some sizes have, and both kinds of image encoder."""

from typing import Any

from maxlib.models._gemma4_vision import UnifiedVision, Vision
from maxlib.weights import Ignore, Renamed, Table, Weight, names

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
    text = "model" if cfg.vision is None else "model.language_model"
    own = [
        Weight(f"{text}.embed_tokens_per_layer.weight", "per_layer.embed.w"),
        Weight(f"{text}.per_layer_model_projection.weight", "per_layer.proj.w"),
        Weight(f"{text}.per_layer_projection_norm.weight", "per_layer.norm.scale"),
    ]
    # Releases have keys and values also of layers that take others', and encoders of sound.
    takers = [i for i, (_, role) in enumerate(cfg.kinds) if role == "takes"]
    ignored = [Ignore(f"{text}.layers.{i}.self_attn.{part}_*") for i in takers for part in "kv"]
    ignored += [Ignore(f"model.{name}*") for name in ("audio_tower.", "embed_audio.")]
    if cfg.vision is not None:
        return [*names.decoder_table(layer, model=text), *own, *_images(cfg.vision), *ignored]
    # A text model is also read from a checkpoint that sees.
    ignored += [Ignore(f"model.{name}*") for name in ("vision_tower.", "embed_vision.", "vision_embedder.")]
    return [*names.decoder_table(layer), *own, Renamed("model.language_model.", "model."), *ignored]


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
    """Lists the tensors of a layer. Linear layers are one level deeper in files, and here where they have bounds."""
    found: list[Weight] = list(names.SANDWICH_NORMS)
    for entry in (*names.ATTENTION, *names.MLP):
        stem, _, last = entry.hf_name.rpartition(".")
        path = entry.path.removesuffix(".w")
        if "_norm" in stem:
            found.append(entry)
        elif last == "weight":
            weight = f"{path}.linear.w" if cfg.clipped else entry.path
            found.append(Weight(f"{stem}.linear.weight", weight, entry.pattern))
            bounds = [f"{side}_{end}" for side in ("input", "output") for end in ("min", "max")]
            found += [Weight(f"{stem}.{bound}", f"{path}.{bound}") for bound in bounds if cfg.clipped]
    return found
