"""Saves a maxlib model with its tokenizer, opens it in transformers, and compares logits and text.

All programs that read Hugging Face directories (vLLM, TRL, PEFT, llama.cpp's converter) can read this one.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

import maxlib
from maxlib import inference, ops, tokenization
from maxlib.models import llama

TEXTS = ["A house is built of bricks, and a model of layers."] * 3


def write(directory: Path) -> llama.Llama:
    """Writes weights, config, tokenizer and what generation needs to know."""
    tokenizer = tokenization.train_bpe(TEXTS, vocab_size=280)
    cfg = llama.Config(
        vocab=tokenizer.get_vocab_size(), num_layers=3, dim=64, mlp_dim=160, num_heads=4, num_kv_heads=2, head_dim=16,
        rope=ops.Rope(16, max_length=128),
    )  # fmt: skip
    model = llama.Llama(cfg, rngs=nnx.Rngs(0))
    maxlib.save_pretrained(model, directory, generation={"bos_token_id": 0, "eos_token_id": 1})
    tokenization.save_tokenizer(tokenizer, directory, bos_token="<bos>", eos_token="<eos>", max_length=128)
    return model


def main() -> tuple[float, bool]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        model = write(directory)
        print("written:", ", ".join(sorted(path.name for path in directory.iterdir())))
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    ids = tokenizer("A model is built of")["input_ids"]
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits.numpy()
        text = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    logits = model.logits(model(jnp.array([ids]), dtype=jnp.float32).hidden)
    worst = float(np.abs(np.asarray(logits) - wanted).max() / np.abs(wanted).max())
    print(f"{type(theirs).__name__}: logits differ by {worst:.1e} of the largest")

    generator = inference.Generator(model, dtype=jnp.float32)
    same = generator.generate([ids], max_new_tokens=12, stop_token_ids=[1])[0] == text
    print(f"greedy text is the same: {same}")
    return worst, same


if __name__ == "__main__":
    main()
