"""Exports a Llama and its tokenizer as a GGUF file, for llama.cpp, Ollama and LM Studio.

It writes float16, or 8 or 4 bits, with the `gguf` package, reads the file back with transformers, and checks that the
logits equal maxlib's. For the K-quants run llama.cpp's `llama-quantize` on the file. Needs the extra `gguf`. Other
families have other names and keys: `gguf.MODEL_TENSORS` lists them.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

# Hugging Face's names -> those of GGUF; {} is the number of the layer.
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}

FILE_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def export(directory: Path, target: Path, dtype: str = "float16") -> None:
    """Writes the Llama of a Hugging Face directory, such as `maxlib.save_pretrained` makes, as one GGUF file.

    Args:
      directory: with safetensors, config.json, generation_config.json and tokenizer.json.
      target: the file to write.
      dtype: of the matrices, one of `FILE_TYPES`.

    Raises:
      ValueError: when the model is no plain Llama.
    """
    config = json.loads((directory / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"{directory} must hold a Llama with plain rotary positions, got {config['model_type']}, {rope}"
        )
    writer = gguf.GGUFWriter(target, "llama")
    kind, file_type = FILE_TYPES[dtype]
    writer.add_file_type(file_type)
    add_config(writer, config, rope.get("rope_theta") or config.get("rope_theta", 10_000.0))
    add_tokenizer(writer, directory, config["vocab_size"])
    for name, array in tensors(directory, config):
        if array.ndim == 1:  # vectors stay float32
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any], theta: float) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, vocab_size: int) -> None:
    """Adds a byte-level BPE of tokenizer.json, as `tokenization.train_bpe` makes it."""
    found = json.loads((directory / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in found["added_tokens"] if token["special"]}
    words = {i: word for word, i in found["model"]["vocab"].items()} | special
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    kinds = [control if i in special else normal if i in words else unused for i in range(vocab_size)]
    merges = found["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(i, f"[unused{i}]") for i in range(vocab_size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    generation = json.loads((directory / "generation_config.json").read_text())
    writer.add_bos_token_id(generation["bos_token_id"])
    writer.add_eos_token_id(generation["eos_token_id"])
    writer.add_add_bos_token(True)


def tensors(directory: Path, config: dict[str, Any]):
    """Yields GGUF's names and arrays."""
    files = sorted(directory.glob("*.safetensors"))
    arrays = {name: array for file in files for name, array in load_file(file).items()}
    for theirs, name in NAMES.items():
        layers = range(config["num_hidden_layers"]) if "{}" in theirs else [0]
        for i in layers:
            if theirs == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            array = np.asarray(arrays.pop(theirs.format(i)), np.float32)
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
            for part in (part for part in heads if part in theirs):
                array = interleaved(array, config[heads[part]])
            yield name.format(i), array
    if arrays:
        raise ValueError(f"no GGUF name is known for {', '.join(sorted(arrays))}")


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a head from (first half, second half), which rotate together, to pairs of neighbours."""
    rows, columns = w.shape
    return w.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def main(directory: Path | None = None, target: Path | None = None, dtype: str = "float16") -> tuple[float, bool]:
    """Exports a directory, or without one a small random Llama, and compares logits with what transformers reads."""
    import jax.numpy as jnp
    import torch
    import transformers

    import maxlib

    with tempfile.TemporaryDirectory() as folder:
        if directory is None:
            from open_in_transformers import write

            write(directory := Path(folder) / "model")
        target = target or Path(folder) / "model.gguf"
        export(directory, target, dtype)
        reader = gguf.GGUFReader(target)
        print(f"{target.name}: {len(reader.tensors)} tensors, {target.stat().st_size / 1e6:.2f} MB")
        read = {"pretrained_model_name_or_path": str(target.parent), "gguf_file": target.name}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**read)
        ours = maxlib.from_pretrained(directory, dtype=jnp.float32)
        plain = transformers.AutoTokenizer.from_pretrained(directory)

    text = "A house is built of bricks: one, two, 3!"
    ids = tokenizer(text)["input_ids"]
    same = ids == plain(text)["input_ids"]
    print(f"the tokenizer is the same: {same}")
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits.numpy()
    logits = np.asarray(ours.logits(ours(jnp.array([ids]), dtype=jnp.float32).hidden))
    worst = float(np.abs(logits - wanted).max() / np.abs(wanted).max())
    print(f"logits differ by {worst:.1e} of the largest in {dtype}")
    return worst, same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, help="a Hugging Face directory with a Llama")
    parser.add_argument("target", nargs="?", type=Path, help="the .gguf file to write")
    parser.add_argument("--dtype", choices=FILE_TYPES, default="float16", help="(%(default)s)")
    main(**vars(parser.parse_args()))
