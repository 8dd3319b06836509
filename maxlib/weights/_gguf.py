"""GGUF files of llama.cpp, Ollama and LM Studio, read and written with the package `gguf`, without torch.

Quantized tensors are dequantized by that package, in every type that it knows (Q4_0, Q8_0, Q4_K, Q6_K and others).
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from maxlib import sharding
from maxlib._utils.files import read_json_object
from maxlib.tokenization import ChatTemplate, load_tokenizer
from maxlib.weights._family import family_for, read_model
from maxlib.weights._hf_config import HFConfig
from maxlib.weights._hub import model_directory
from maxlib.weights._loading import load
from maxlib.weights.files import Stored, find_tensors
from maxlib.weights.mapping import resolve

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Keys of an architecture that are read, or say nothing about what it computes.
KNOWN = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "tensor_data_layout"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "pooling_type"),
}
# llama.cpp's names of the rules that split a text into words, by their regular expression.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REGEXES = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}
# The names of `gguf.GGMLQuantizationType` and of `gguf.LlamaFileType`.
TYPES = {
    "float32": ("F32", "ALL_F32"),
    "float16": ("F16", "MOSTLY_F16"),
    "bfloat16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q5_1": ("Q5_1", "MOSTLY_Q5_1"),
    "q5_0": ("Q5_0", "MOSTLY_Q5_0"),
    "q4_1": ("Q4_1", "MOSTLY_Q4_1"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
}


@dataclass(frozen=True)
class _Tensor(Stored):
    """A tensor of a GGUF file, dequantized to float32."""

    as_stored: ClassVar[bool] = False
    raw: Any
    heads: int | None  # of queries or keys, whose rows llama.cpp reorders

    def view(self) -> np.ndarray:
        import gguf

        values = gguf.quants.dequantize(self.raw.data, self.raw.tensor_type).reshape(self.shape)
        if self.heads is None:
            return values
        # Pairs that rotate together are neighbours there; here they are half a head apart.
        pairs = values.reshape(self.heads, -1, 2, *self.shape[1:])
        return pairs.swapaxes(1, 2).reshape(self.shape)


def from_gguf(path: str | Path, *, layout: sharding.Layout | None = None, dtype: Any = None) -> Any:
    """Reads the model of a GGUF file; its tokenizer is not read.

    Args:
        path: The file, of a Llama, Qwen2 or Qwen3.
        layout: Placement over a mesh; None reads onto one device.
        dtype: The dtype of the weights; None is float32.

    Raises:
        ImportError: If the package `gguf` is not installed.
        ValueError: For another architecture, or tensors that are not those of the model.
    """
    gguf = import_gguf()
    reader = gguf.GGUFReader(path)
    raw = {tensor.name: tensor for tensor in reader.tensors}
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    config = _config(values, raw, path)
    family = family_for(config, Path(path))
    cfg = family.fields.read(HFConfig(config))
    table = family.table(cfg)

    def build() -> Any:
        return family.model(cfg, rngs=nnx.Rngs(0))

    names = gguf.get_tensor_name_map(_architecture(values, gguf), config["num_hidden_layers"])
    stored: dict[str, Stored] = {}
    for name in resolve(jax.eval_shape(build), table).tensors:
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs in raw:
            tensor = raw.pop(theirs)
            shape = tuple(int(size) for size in reversed(tensor.shape))
            stored[name] = _Tensor(
                Path(path), tensor.data_offset, np.dtype(np.float32), shape, tensor, heads_of(name, family.name, cfg)
            )
    if raw:
        raise ValueError(
            f"{path} has tensors that a {config['model_type']} does not read: {', '.join(sorted(raw))}. rope_freqs.weight is "
            "a rope scaling, which GGUF does not describe: convert such a model from its Hugging Face directory"
        )
    return load(build, table, stored, layout=layout, dtype=dtype)


def import_gguf() -> Any:
    """Imports the package; raises ImportError with what to install."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install maxlib[gguf]") from error
    return gguf


def _config(values: Mapping[str, Any], raw: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """Returns the fields of config.json that GGUF's keys stand for."""
    kind = values.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{path} must have an architecture among {', '.join(ARCHITECTURES)}, got {kind!r}")
    if (parts := values.get("split.count", 1)) > 1:
        raise ValueError(
            f"{path} must hold the whole model, but is one of {parts} parts: merge them with llama.cpp's `llama-gguf-split --merge`"
        )
    unread = [name for name in values if name.startswith(f"{kind}.") and name.removeprefix(f"{kind}.") not in KNOWN]
    if unread:
        raise ValueError(
            f"{path} has keys that from_gguf does not read, so the model may compute something else, got "
            f"{', '.join(f'{name} = {values[name]}' for name in unread)}"
        )
    heads, dim = int(values[f"{kind}.attention.head_count"]), int(values[f"{kind}.embedding_length"])
    head_dim = int(values.get(f"{kind}.attention.key_length", dim // heads))
    if (turned := values.get(f"{kind}.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"{path} must turn whole heads of {head_dim} dimensions, got rope.dimension_count = {turned}")
    return {
        "model_type": kind,
        "vocab_size": int(raw["token_embd.weight"].shape[1]),
        "hidden_size": dim,
        "intermediate_size": int(values[f"{kind}.feed_forward_length"]),
        "num_hidden_layers": int(values[f"{kind}.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(values.get(f"{kind}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(values[f"{kind}.context_length"]),
        "rms_norm_eps": _decimal(values[f"{kind}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _decimal(values.get(f"{kind}.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in raw,
        "hidden_act": "silu",
    }


def _decimal(value: float) -> float:
    """Returns the short decimal number that a float32 stands for, such as 1e-5."""
    return float(str(np.float32(value)))


def _architecture(values: Mapping[str, Any], gguf: Any) -> Any:
    """Returns the package's number of an architecture."""
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == values["general.architecture"])


def heads_of(name: str, kind: str, cfg: Any) -> int | None:
    """Returns the number of heads of a tensor whose rows llama.cpp reorders; None for others."""
    if kind != "llama":
        return None
    if ".q_proj." in name:
        return cfg.num_heads
    return cfg.num_kv_heads if ".k_proj." in name else None


def save_gguf(directory: str | Path, path: str | Path, *, dtype: str = "float16", overwrite: bool = False) -> None:
    """Writes the model and the tokenizer of a Hugging Face directory as one GGUF file.

    Vectors stay in float32, and matrices whose rows blocks do not divide in float16. For K-quants run llama.cpp's
    `llama-quantize` on a file in float16.

    Args:
        directory: A directory of a Llama, Qwen2 or Qwen3, as `save_pretrained` writes it, or a name on the hub.
            Its tokenizer.json must be a byte-level BPE that splits words as GPT-2, SmolLM, Llama 3 or Qwen2 do; without
            one the file has no tokenizer.
        path: The file to write.
        dtype: Of matrices: "float32", "float16", "bfloat16", "q8_0", "q5_1", "q5_0", "q4_1" or "q4_0".
        overwrite: True replaces a file that exists.

    Raises:
        FileExistsError: If the file exists.
        ImportError: If the package `gguf` is not installed.
        ValueError: For another type, architecture, rope or tokenizer, and for quantized weights.
    """
    gguf, directory, path = import_gguf(), model_directory(directory), Path(path)
    if dtype not in TYPES:
        raise ValueError(f"dtype must be one of {', '.join(TYPES)}, got {dtype!r}")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; overwrite=True replaces it")
    family, cfg = _described(directory)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], cfg.num_layers)
    kind = gguf.GGMLQuantizationType[TYPES[dtype][0]]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, family, use_temp_file=True)
    writer.add_file_type(gguf.LlamaFileType[TYPES[dtype][1]])
    _add_config(writer, cfg)
    _add_tokenizer(writer, directory, cfg.vocab, gguf)
    for name, tensor in find_tensors(directory).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"GGUF has no name for {name} of a {family}")
        if name == "lm_head.weight" and cfg.tied:
            continue
        array = _interleaved(np.asarray(tensor.view(), np.float32), heads_of(name, family, cfg))
        of_array = kind if array.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16
        if array.ndim == 1:
            writer.add_tensor(target, array)
        else:
            writer.add_tensor(target, gguf.quants.quantize(array, of_array), raw_dtype=of_array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def _described(directory: Path) -> tuple[str, Any]:
    """Reads the family's name and the configuration; raises ValueError for a model that the file could not describe."""
    data = read_json_object(directory / "config.json")
    kind = data.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{directory} must have a model_type among {', '.join(ARCHITECTURES)}, got {kind!r}")
    if method := (data.get("quantization_config") or {}).get("quant_method"):
        raise ValueError(
            f"{directory} must have plain weights, got those of {method}: write the dequantized model first"
        )
    _, cfg = read_model(directory)
    if cfg.rope.scaling is not None:
        raise ValueError(
            f"{directory} must have a rope without scaling, got {cfg.rope}: llama.cpp's converter writes it"
        )
    if getattr(cfg, "window", None) is not None:
        raise ValueError(f"{directory} must have no sliding window, which llama.cpp does not compute for a {kind}")
    return kind, cfg


def _add_config(writer: Any, cfg: Any) -> None:
    writer.add_vocab_size(cfg.vocab)
    writer.add_context_length(cfg.rope.max_length)
    writer.add_embedding_length(cfg.dim)
    writer.add_block_count(cfg.num_layers)
    writer.add_feed_forward_length(cfg.mlp_dim)
    writer.add_head_count(cfg.num_heads)
    writer.add_head_count_kv(cfg.num_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_rope_freq_base(cfg.rope.theta)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)


def _add_tokenizer(writer: Any, directory: Path, vocab: int, gguf: Any) -> None:
    """Adds tokenizer.json, the ids that begin and end a text, and the chat template, if the directory has them."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(tokenizer, path))
    words, kinds = _words(tokenizer, vocab, gguf)
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    begins, ends = (_ids(directory, name) for name in ("bos_token_id", "eos_token_id"))
    # The second id that ends a text is that of a turn; llama.cpp finds others by their names.
    for token, add in zip(ends, (writer.add_eos_token_id, writer.add_eot_token_id), strict=False):
        add(token)
    # What a text without words is encoded to.
    around = load_tokenizer(directory).encode("").ids
    begins = begins or around[:1]
    if begins:
        writer.add_bos_token_id(begins[0])
    if around not in ([], begins[:1]):
        raise ValueError(f"{path} must add no token to a text, or a BOS before it, got {around}")
    writer.add_add_bos_token(bool(around))
    with contextlib.suppress(FileNotFoundError):  # it has none
        writer.add_chat_template(ChatTemplate.from_directory(directory).source)


def _words(tokenizer: Mapping[str, Any], vocab: int, gguf: Any) -> tuple[list[str], list[Any]]:
    """Returns the text and the kind of each id."""
    kinds, added = gguf.TokenType, {token["id"]: token for token in tokenizer["added_tokens"]}
    words = {i: word for word, i in tokenizer["model"]["vocab"].items()}
    words |= {i: token["content"] for i, token in added.items()}

    def kind(i: int) -> Any:
        if i in added:  # also those that are not special are found as a whole in a text
            return kinds.CONTROL if added[i]["special"] else kinds.USER_DEFINED
        return kinds.NORMAL if i in words else kinds.UNUSED

    return [words.get(i, f"[unused{i}]") for i in range(vocab)], [kind(i) for i in range(vocab)]


def _ids(directory: Path, name: str) -> list[int]:
    """Returns the ids of a field of generation_config.json, or else of config.json."""
    for path in (directory / "generation_config.json", directory / "config.json"):
        ids = read_json_object(path).get(name) if path.exists() else None
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def _pre_tokenizer(tokenizer: Mapping[str, Any], path: Path) -> str:
    """Returns llama.cpp's name of the rule that splits a text into words; raises ValueError for one that it lacks."""
    stored = tokenizer["pre_tokenizer"] or {}
    *steps, last = stored.get("pretokenizers", [stored])
    rule = None
    if tokenizer["model"].get("type") == "BPE" and last.get("type") == "ByteLevel" and not last["add_prefix_space"]:
        if not last.get("use_regex", True):
            rule = REGEXES.get(steps[0].get("pattern", {}).get("Regex")) if len(steps) == 1 else None
        elif [(step["type"], step.get("individual_digits")) for step in steps] == [("Digits", True)]:
            rule = "smollm"
        elif not steps:
            rule = "gpt-2"
    normalizer = tokenizer.get("normalizer") or {"type": "NFC"}
    if rule is None or normalizer["type"] != "NFC":  # NFC changes only texts that are not in it
        raise ValueError(
            f"{path} must be a byte-level BPE without add_prefix_space and normalizer that splits words as GPT-2, SmolLM, "
            f"Llama 3 or Qwen2 do, got {stored} and {tokenizer.get('normalizer')}: llama.cpp's converter knows others"
        )
    return rule


def _interleaved(array: np.ndarray, heads: int | None) -> np.ndarray:
    """Reorders the rows of a head from (first half, second half), which rotate together, to pairs of neighbours."""
    if heads is None:
        return array
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
