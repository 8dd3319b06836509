"""Makes golden/training.json: losses of 20 AdamW steps of PEFT's LoRA on models shaped as SmolLM2-135M.

Run with PEFT, transformers and torch: `python -m tests.adapters.peft_training [case ...]`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.adapters import peft_parity
from tests.models import parity

PATH = peft_parity.GOLDEN / "training.json"
STEPS, ROWS, SEQ, VOCAB = 20, 4, 128, 1024
RATE, DECAY = 1e-3, 0.1
RANK, ALPHA = 8, 16
# By name: layers, heads, heads of keys, width of the MLP. A head is 64 wide, as in SmolLM2.
CASES = {"small": (3, 3, 1, 512), "smollm2_135m": (30, 9, 3, 1536)}


def matrices(name: str) -> dict[str, list[int]]:
    """Shapes [out, in] of the matrices that LoRA adapts."""
    layers, heads, kv_heads, mlp = CASES[name]
    dim, kv = 64 * heads, 64 * kv_heads
    attention = {"q_proj": [dim, dim], "k_proj": [kv, dim], "v_proj": [kv, dim], "o_proj": [dim, dim]}
    gated = {"gate_proj": [mlp, dim], "up_proj": [mlp, dim], "down_proj": [dim, mlp]}
    layer = {f"self_attn.{k}": s for k, s in attention.items()} | {f"mlp.{k}": s for k, s in gated.items()}
    return {f"model.layers.{i}.{k}": s for i in range(layers) for k, s in layer.items()}


def base(path: Path, name: str) -> Path:
    """The model that adapters are for, as a directory. The embedding is also the head: it is scaled for logits of
    about one.
    """
    layers, heads, kv_heads, mlp = CASES[name]
    dim = 64 * heads
    norms = [f"model.layers.{i}.{k}_layernorm" for i in range(layers) for k in ("input", "post_attention")]
    shapes = {f"{k}.weight": s for k, s in matrices(name).items()}
    shapes |= {f"{k}.weight": [dim] for k in (*norms, "model.norm")}
    table = np.random.RandomState(4).standard_normal((VOCAB, dim)).astype(np.float32) * np.float32(dim**-0.5)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": mlp,
        "max_position_embeddings": 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
    }
    return parity.directory(path, {"config": config, "shapes": shapes}, **{"model.embed_tokens.weight": table})


def adapter(path: Path, name: str) -> Path:
    """The adapter that training begins with, as a PEFT directory: B = 0, and A of deviation 1 / sqrt(in)."""
    path.mkdir(parents=True, exist_ok=True)
    random, factors = np.random.RandomState(5), {}
    for key, (outputs, inputs) in matrices(name).items():
        a = random.standard_normal((RANK, inputs)).astype(np.float32)
        factors[f"base_model.model.{key}.lora_A.weight"] = a * np.float32(inputs**-0.5)
        factors[f"base_model.model.{key}.lora_B.weight"] = np.zeros((outputs, RANK), np.float32)
    modules = sorted({key.rsplit(".", 1)[1] for key in matrices(name)})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def batches() -> np.ndarray:
    """Tokens [STEPS, ROWS, SEQ + 1]. Low numbers are frequent, which adapters can learn."""
    return (VOCAB * np.random.RandomState(6).random_sample((STEPS, ROWS, SEQ + 1)) ** 3).astype(np.int32)


def theirs(name: str, scratch: Path) -> list[float]:
    """Trains with PEFT, and returns the loss of each step."""
    import peft
    import torch

    start = str(adapter(scratch / "adapter", name))
    model: Any = peft.PeftModel.from_pretrained(
        peft_parity.their_base(base(scratch / "base", name)), start, is_trainable=True
    )
    factors = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(factors, lr=RATE, weight_decay=DECAY)
    losses = []
    for ids in torch.from_numpy(batches()).long():
        optimizer.zero_grad()
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    import tempfile

    for name in sys.argv[1:] or list(CASES):
        with tempfile.TemporaryDirectory() as scratch:
            losses = theirs(name, Path(scratch))
        found = json.loads(PATH.read_text()) if PATH.exists() else {}
        PATH.write_text(json.dumps(found | {name: losses}, indent=1, sort_keys=True) + "\n")
        print(name, losses[0], losses[-1], flush=True)


if __name__ == "__main__":
    main()
