"""The special tokens of a Hugging Face directory, which several files may state."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlib._utils.files import read_json_object

STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Tokens = dict[str, str | None]


def special_tokens(directory: str | os.PathLike) -> Tokens:
    """Reads the special tokens of a Hugging Face directory by name, such as `{"eos_token": "</s>"}`.

    They are those of `transformers.AutoTokenizer`: of several files that state one, the same file decides.

    Args:
        directory: A directory with a tokenizer.

    Returns:
        The text of each token; None for one that the files say does not exist.

    Raises:
        ValueError: when a file is damaged, or states a token that is not text.
    """
    directory = Path(directory)
    path, map_path = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    config = _read(path)
    # transformers reads the map only for tokenizers that do not list their added tokens in the configuration.
    stated = {} if "added_tokens_decoder" in config else _read(map_path)
    named, named_in_map = _tokens(path, config), _tokens(map_path, stated)
    return {  # the last one decides
        **_class_defaults(directory, config),
        **named_in_map,
        **named,
        **{name: named_in_map[name] for name in STANDARD if name in named_in_map},
        **_extra(path, config, "model_specific_special_tokens"),
        **_extra(path, config, "extra_special_tokens"),
        **_extra(map_path, stated, "extra_special_tokens"),
    }


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _tokens(path: Path, fields: Mapping[str, Any]) -> Tokens:
    """Returns the fields that are tokens; others, such as `add_bos_token`, may hold options."""
    tokens = {name: _text(value) for name, value in fields.items() if name.endswith("_token")}
    if wrong := [name for name in STANDARD if tokens.get(name, "") is _OTHER]:
        raise ValueError(
            f"{path}: {wrong[0]} must be text, null, or an object with content, got {fields[wrong[0]]!r:.100}"
        )
    return {name: token for name, token in tokens.items() if token is not _OTHER}


def _extra(path: Path, fields: Mapping[str, Any], name: str) -> Tokens:
    """Returns tokens that are stored in an object of their own; a list has tokens without names."""
    extra = fields.get(name)
    if not isinstance(extra, dict):
        return {}
    tokens = {key: _text(value) for key, value in extra.items()}
    if wrong := [key for key, token in tokens.items() if not isinstance(token, str)]:
        raise ValueError(f"{path}: {name} must give the text of each token, got {extra[wrong[0]]!r:.100}")
    return tokens


_OTHER: Any = object()


def _text(token: Any) -> Any:
    """Returns a token's text, which may be stored within an object; None for null, and `_OTHER` for anything else."""
    token = token.get("content", _OTHER) if isinstance(token, dict) else token
    return token if token is None or isinstance(token, str) else _OTHER


def _class_defaults(directory: Path, config: Mapping[str, Any]) -> Tokens:
    """Returns the tokens that the directory's class in transformers has unless a file states others."""
    model = _read(directory / "config.json")
    kind = str(model.get("model_type"))
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    if kind in _GENERIC:
        return {}
    if declared is None or kind in _IGNORE_DECLARED:
        declared = next((name for name, kinds in _CLASSES.items() if kind in kinds), None)
    name = str(declared).removesuffix("Fast")
    if name == "LlamaTokenizer" and _is_byte_level(directory / "tokenizer.json"):
        return {}
    return dict(_DEFAULTS.get(name, {}))


def _is_byte_level(path: Path) -> bool:
    return path.exists() and '"ByteLevel"' in path.read_text(encoding="utf-8", errors="replace")


_END = "<|endoftext|>"
_QWEN: Tokens = {"bos_token": None, "eos_token": _END, "unk_token": _END, "pad_token": _END}
_ROBERTA: Tokens = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_DEFAULTS: dict[str, Tokens] = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": None},
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "BertTokenizer": {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    "RobertaTokenizer": _ROBERTA,
    "XLMRobertaTokenizer": _ROBERTA,
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "sep_token": "<SEP>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "mask_token": "<MASK_TOKEN>",
    },
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
# The class of a model whose files declare none.
_CLASSES: dict[str, tuple[str, ...]] = {
    "GPT2Tokenizer": ("gpt2", "gptj", "opt", "phi", "starcoder2", "whisper"),
    "GPTNeoXTokenizer": ("gpt_neox", "mamba2", "mpt", "olmo", "olmoe"),
    "BertTokenizer": ("bert",),
    "RobertaTokenizer": ("roberta",),
    "XLMRobertaTokenizer": ("xlm-roberta",),
    "T5Tokenizer": ("t5",),
    "CohereTokenizer": ("cohere", "cohere2"),
    "GemmaTokenizer": ("gemma", "gemma2", "gemma3", "gemma3_text", "t5gemma"),
    "Qwen2Tokenizer": (
        *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"),
        *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"),
    ),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp"),
}
# Models whose declared class transformers ignores: it uses the one above, or the generic class, which has no defaults.
_IGNORE_DECLARED = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"}
_GENERIC = {
    *("ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "granite"),
    *("granitemoehybrid", "kimi_k25", "kimi_linear"),
    *("llava", "mimo_v2_flash", "minimax_m2", "ministral3", "mistral", "mistral3", "mixtral", "modernbert", "nemotron"),
    *("olmo2", "olmo3", "olmo_hybrid", "phi3", "stablelm"),
}
