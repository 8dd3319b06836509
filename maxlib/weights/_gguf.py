"""GGUF files of llama.cpp: reads their models with the package `gguf`, without torch.

Quantized tensors are dequantized by that package, in every type that it knows (Q4_0, Q8_0, Q4_K, Q6_K and others).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from maxlib import sharding
from maxlib.weights._family import family_for
from maxlib.weights._hf_config import HFConfig
from maxlib.weights._loading import load
from maxlib.weights.files import Stored
from maxlib.weights.mapping import resolve

ARCHITECTURES = ("llama", "qwen2", "qwen3")


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
                Path(path), tensor.data_offset, np.dtype(np.float32), shape, tensor, heads_of(name, config)
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
    if scaling := [name for name in values if name.startswith(f"{kind}.rope.scaling.")]:
        raise ValueError(f"{path} scales its rope ({', '.join(scaling)}), which from_gguf does not support")
    heads, dim = int(values[f"{kind}.attention.head_count"]), int(values[f"{kind}.embedding_length"])
    return {
        "model_type": kind,
        "vocab_size": int(raw["token_embd.weight"].shape[1]),
        "hidden_size": dim,
        "intermediate_size": int(values[f"{kind}.feed_forward_length"]),
        "num_hidden_layers": int(values[f"{kind}.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(values.get(f"{kind}.attention.head_count_kv", heads)),
        "head_dim": int(values.get(f"{kind}.attention.key_length", dim // heads)),
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


def heads_of(name: str, config: Mapping[str, Any]) -> int | None:
    """Returns the number of heads of a tensor whose rows llama.cpp reorders; None for others."""
    if config["model_type"] != "llama":
        return None
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else None
