"""Hugging Face `config.json`, read field by field; unknown fields raise an error.

A model's reader takes each field that it uses, requires the value of fields that it only supports with one value, and
calls `done()`: a remaining field that may change the computation is an error, so no wrong model is built silently.
"""

import json
import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from maxlib._utils.files import read_json_object
from maxlib.weights._packed import unreadable

logger = logging.getLogger(__name__)

REQUIRED: Any = object()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that never change the forward pass.
BOOKKEEPING = _names(
    """
    architectures auto_map dtype torch_dtype transformers_version _name_or_path _model_name_or_path _commit_hash
    name_or_path _attn_implementation _attn_implementation_autoset attn_implementation _flash_attn_2_enabled use_flash_attn
    cache_implementation use_cache use_bfloat16 torchscript return_dict use_return_dict output_attentions
    output_hidden_states output_router_logits keys_to_ignore_at_inference gradient_checkpointing is_decoder
    id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    tf_legacy_loss internal_version transformers.js_config is_llama_config ep_size unsloth_fixed unsloth_version
    is_composition output_past reorder_and_upcast_attn slow_but_exact masked_softmax_fusion bias_dropout_fusion
    attention_softmax_in_fp32 deterministic_flash_attn reference_compile repad_logits_with_grad flash_attention
    use_mamba_kernels mamba_chunk_size num_logits_to_keep init_device tokenizer_name verbose
    enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine use_grouped_mm use_parallel_embedding
    """
)
TOKEN_IDS = _names(
    """
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id
    """
)
# Initialisation, dropout and auxiliary losses, which do not affect the forward pass of a loaded checkpoint.
TRAINING = _names(
    """
    initializer_range initializer_factor attention_dropout attn_pdrop classifier_dropout dropout embd_pdrop
    embedding_dropout ffn_dropout hidden_dropout resid_pdrop residual_dropout projector_dropout
    summary_first_dropout router_aux_loss_coef router_jitter_noise router_z_loss_coef aux_loss_alpha seq_aux
    summary_type summary_use_proj summary_activation summary_proj_to_labels dropout_rate classifier_dropout_rate
    hidden_dropout_prob attention_probs_dropout_prob activation_dropout mlp_dropout emb_pdrop layerdrop
    encoder_layerdrop decoder_layerdrop init_std init_fn init_cutoff_factor initializer_cutoff_factor init_method
    rescale_prenorm_residual time_step_floor z_loss_coefficient apply_spec_augment mask_time_prob mask_time_length
    mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks
    """
)
# Sampling settings, which old versions of transformers wrote into every config.
GENERATION = _names(
    """
    bad_words_ids begin_suppress_tokens suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate temperature top_k top_p typical_p
    """
)
HARMLESS = BOOKKEEPING | TOKEN_IDS | TRAINING | GENERATION
# Sizes that must be positive.
POSITIVE = _names(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings n_embd n_layer n_head n_positions
    """
)
MOST = {"num_hidden_layers": 1 << 16, "n_layer": 1 << 16}
# Only harmless with this value; maxlib does not support other values.
HARMLESS_VALUES = {
    "pretraining_tp": 1,
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "attn_logit_softcapping": False,
    "final_logit_softcapping": False,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Only harmless if another field has the same value: an older name of it.
HARMLESS_COPIES = {"max_sequence_length": "max_position_embeddings"}


class HFConfig:
    """The fields of one config; records which fields were read until `done`."""

    def __init__(self, data: Mapping[str, Any], *, path: str = ""):
        self._data, self._path = data, path
        self._taken: set[str] = set()
        self._children: dict[str, HFConfig] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def where(self, name: str) -> str:
        """Names a field for an error message: its file and its dotted path."""
        return f"config.json: {self._path + '.' if self._path else ''}{name}"

    def take(self, name: str, default: Any = REQUIRED, *, kind: type | None = None, nullable: bool = False) -> Any:
        """Takes the value of a field.

        Args:
            name: Name of the field.
            default: Value of a field that is absent or null. Without it the field is required.
            kind: bool, int, float, str, list or dict, by default that of `default`; an int is accepted as a float.
            nullable: True returns None for null.

        Raises:
            ValueError: For a missing field without default, and for a value of another kind.
        """
        self._taken.add(name)
        value = self._data.get(name)
        if name in self._data and value is None and nullable:
            return None
        if value is not None:
            kind = kind or (type(default) if isinstance(default, bool | int | float | str) else None)
            value = value if kind is None else _checked(value, kind, self.where(name))
            if name in POSITIVE and isinstance(value, int) and value < 1:
                raise ValueError(f"{self.where(name)} must be at least 1, got {value}.")
            if isinstance(value, int) and value > MOST.get(
                name, 1 << 63
            ):  # from a damaged file: lists of this length would fill memory
                raise ValueError(f"{self.where(name)} must be at most {MOST.get(name, 1 << 63)}, got {_short(value)}.")
            return value
        if default is REQUIRED:
            state = "is null" if name in self._data else "is missing"
            raise ValueError(f"{self.where(name)} must be given, but it {state}. Is this the config of another model?")
        return default

    def require(self, name: str, *allowed: Any) -> Any:
        """Takes a field whose value must be among `allowed`; absent or null counts as the first of them."""
        value = self.take(name, allowed[0], kind=object)
        if value not in allowed:
            raise ValueError(
                f"{self.where(name)} must be {' or '.join(map(repr, allowed))}, got {value!r}: this architecture "
                "computes nothing else. Such a checkpoint needs a model that does."
            )
        return value

    def ignore(self, *names: str) -> None:
        """Marks fields as harmless for this architecture; say why in a comment."""
        self._taken.update(names)

    def nested(self, name: str) -> "HFConfig":
        """Returns the fields of a nested object (`text_config`); `done` checks it too."""
        if name not in self._children:
            self._children[name] = HFConfig(self.take(name, kind=dict), path=self.where(name).partition(": ")[2])
        return self._children[name]

    def layer_types(self, num_layers: int, *known: str) -> tuple[str, ...] | None:
        """Takes `layer_types`, one of `known` for each layer; None if the config omits it.

        Raises:
            ValueError: For any other value.
        """
        types = self.take("layer_types", None, kind=list)
        if types is not None and (len(types) != num_layers or not set(types) <= set(known)):
            raise ValueError(
                f"{self.where('layer_types')} must give one of {', '.join(known)} for each of the {num_layers} layers "
                f"(num_hidden_layers), got {_short(types)} ({len(types)} entries)."
            )
        return None if types is None else tuple(types)

    def unread(self) -> dict[str, Any]:
        """Returns unread fields that may matter, by dotted path; null means off and counts as read."""
        left = {
            name: value
            for name, value in self._data.items()
            if name not in self._taken | HARMLESS
            and value is not None
            and not (name in HARMLESS_VALUES and value == HARMLESS_VALUES[name])
            and not (name in HARMLESS_COPIES and value == self._data.get(HARMLESS_COPIES[name]))
            and not (name == "quantization_config" and not unreadable(value))  # read as plain weights
        }
        nested = {f"{name}.{field}": v for name, child in self._children.items() for field, v in child.unread().items()}
        return left | nested

    def done(self, ignore_fields: Collection[str] = ()) -> None:
        """Raises ValueError if an unread field may change the computation.

        Args:
            ignore_fields: Unread fields that change nothing, by dotted path. Fields that are read cannot be ignored.
        """
        unread = self.unread()
        if read := sorted(set(ignore_fields) - unread.keys()):
            raise ValueError(
                f"ignore_fields names fields of config.json that nobody reads, got {', '.join(read)}, which this "
                f"architecture reads, or which the config lacks; unread are: {', '.join(unread) or 'none'}."
            )
        if unread := {name: value for name, value in unread.items() if name not in ignore_fields}:
            listed = "\n".join(f"  {name} = {_short(value)}{_why(name, value)}" for name, value in unread.items())
            raise ValueError(
                f"config.json{': ' + self._path if self._path else ''} has fields this architecture does not know, so "
                f"it cannot be sure to compute the same:\n{listed}\nIf they change nothing, pass "
                f"ignore_fields={[*unread]} to from_pretrained, or remove them; else use a model that knows them."
            )


def _why(name: str, value: Any) -> str:
    """Explains why an unread field cannot be read, where that is known."""
    return f" ({unreadable(value)})" if name.endswith("quantization_config") else ""


def _checked(value: Any, kind: type, where: str) -> Any:
    good = isinstance(value, int | float if kind is float else kind)
    if isinstance(value, bool) and kind in (int, float):
        good = False
    if not good or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{where} must be of type {kind.__name__}, got {_short(value)}.")
    return float(value) if kind is float else value


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 100 else text[:97] + "..."


def read_config(directory: str | Path) -> dict[str, Any]:
    """Reads `directory/config.json`. Code that it refers to (`auto_map`) is never run.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a JSON object in UTF-8, or names a field twice.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        hint = "There is no such directory. If a run should have written it, has that run finished? "
        hint += 'Write a name on the hub as "org/name".'
        if path.parent.exists():
            hint = "The directory has none." if path.parent.is_dir() else f"{directory} is a file: name its directory."
        if (path.parent / "adapter_config.json").exists():
            hint = "This is a PEFT adapter: load its base model, then `maxlib.adapters.load(model, directory)`."
        raise FileNotFoundError(
            f"{path} must exist: a Hugging Face model directory has a config.json beside its safetensors. {hint}"
        )
    data = read_json_object(path)
    if "auto_map" in data:
        logger.warning("%s refers to custom code (auto_map); maxlib never runs it and only reads the fields.", path)
    return data
