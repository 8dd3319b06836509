"""Writes a Llama and its tokenizer as a GGUF file, for llama.cpp, Ollama and LM Studio.

It reads the file back with transformers, and checks that the logits equal maxlib's. `maxlib convert DIR model.gguf
--quantize q8_0` writes the same file. For the K-quants run llama.cpp's `llama-quantize` on a file in float16. Needs the
extra `gguf`.
"""

import argparse
import tempfile
from pathlib import Path

import gguf
import numpy as np

from maxlib import weights


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
        weights.save_gguf(directory, target, dtype=dtype, overwrite=True)
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
    parser.add_argument("--dtype", default="float16", help="(%(default)s)")
    main(**vars(parser.parse_args()))
