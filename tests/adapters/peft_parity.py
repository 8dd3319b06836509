"""Reference adapters and logits of small models from PEFT, with values from a formula that any Python reproduces.

`python -m tests.adapters.peft_parity [case ...]` writes the golden files anew; it needs torch, transformers and peft.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models import parity

GOLDEN = Path(__file__).parent / "golden"
SEQ, KEPT = 12, 3  # tokens of a row, and how many of their logits are kept
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = {"target_modules": "all-linear"}
# PEFT adapts no `out_proj` of Mamba's, transformers opens no text of these three by itself, and these are no families;
# Llamas are below.
MAMBA, NO_TEXT = ("falcon_h1", "nemotron_h"), ("mistral4", "muse_glimmer", "qwen3_vl")
OTHERWISE = ("llama", "llama4", *MAMBA, *NO_TEXT, "image_encoders", "combinations", "layer_combinations")
# By name: the family, its case in tests/models, and fields of a LoraConfig.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 0, ALL | {"rank_pattern": {"layers.0.*q_proj": 2, "o_proj": 5}, "alpha_pattern": {"v_proj": 3}}),
    "llama_dora": ("llama", 0, ALL | {"use_dora": True, "use_rslora": True}),
    "llama_layers": ("llama", 0, {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0]}),
    "mixtral_experts": ("mixtral", 0, {"target_modules": ATTENTION} | EXPERTS),
    "qwen3_moe_experts": ("qwen3_moe", 0, {"target_modules": ATTENTION} | EXPERTS),
    "qwen3_moe_down": ("qwen3_moe", 0, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    "glm4_moe_experts": ("glm4_moe", 0, ALL | EXPERTS),
    "deepseek_experts": ("deepseek", 0, ALL | EXPERTS),
    "gpt_oss_experts": ("gpt_oss", 0, ALL | EXPERTS),
    "llama4_experts": (
        "llama4",
        0,
        {"target_modules": ATTENTION}
        | {"target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]},
    ),
    "phi3_dora": ("phi3", 0, ALL | {"use_dora": True}),
    "llama4": ("llama4", 0, {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    **{family: (family, 0, ALL) for family in parity.FAMILIES if family not in OTHERWISE},
}


def values(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Adapter tensors by name."""
    random = np.random.RandomState(3)
    found = {}
    for name in sorted(shapes):
        noise = random.standard_normal(shapes[name]).astype(np.float32)
        found[name] = 1 + 0.2 * np.abs(noise) if "magnitude" in name else 0.3 * noise
    return found


def tokens(vocab: int) -> np.ndarray:
    return parity.tokens(vocab, SEQ)


def golden(name: str) -> dict[str, Any]:
    """A golden file: PEFT's config, names and shapes of its tensors, and the last logits of every row."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {"logits": file["logits"], **json.loads(str(file["text"]))}


def base_case(name: str) -> dict[str, Any]:
    """The case of tests/models that the adapter is for."""
    family, number, _ = CASES[name]
    return list(parity.golden(family).values())[number]


def directory(path: Path, name: str, **changes: Any) -> Path:
    """A PEFT directory, made without peft."""
    case = golden(name)
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(case["config"] | changes))
    save_file(values(case["shapes"]), path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def their_base(path: Path) -> Any:
    """The model in transformers."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype="float32").eval()


def their_logits(base: Any, adapter: Path | None, ids: np.ndarray) -> np.ndarray:
    """Logits of the model with the adapter of a directory, as PEFT reads it."""
    import peft
    import torch

    model = base if adapter is None else peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.numpy()


def theirs(name: str, scratch: Path) -> dict[str, Any]:
    """Computes the contents of a golden file with PEFT."""
    import peft

    case, (_, _, fields) = base_case(name), CASES[name]
    base = parity.directory(scratch / "base", case)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM"} | fields)
    peft.get_peft_model(their_base(base), config).save_pretrained(scratch / "adapter")
    path = scratch / "adapter" / "adapter_model.safetensors"
    shapes = {name: list(value.shape) for name, value in load_file(path).items()}
    save_file(values(shapes), path, metadata={"format": "pt"})
    stored = json.loads((scratch / "adapter" / "adapter_config.json").read_text())
    ids = tokens(case["config"]["vocab_size"])
    logits = their_logits(their_base(base), scratch / "adapter", ids)
    return {
        "logits": logits[:, -KEPT:],
        "config": stored | {"base_model_name_or_path": None, "revision": None},
        "shapes": shapes,
    }


def write(names: list[str]) -> None:
    import tempfile

    GOLDEN.mkdir(exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            found = theirs(name, Path(scratch))
        text = json.dumps({key: found[key] for key in ("config", "shapes")}, sort_keys=True)
        np.savez_compressed(GOLDEN / f"{name}.npz", logits=found["logits"], text=np.array(text))


if __name__ == "__main__":
    for case in sys.argv[1:] or list(CASES):
        try:
            write([case])
            print(case, flush=True)
        except Exception as error:  # the others are of use
            print("FAILED", case, type(error).__name__, str(error)[:400], flush=True)
