"""Reference adapters and logits of small models from PEFT, with values from a formula that any Python reproduces.

`matrix.npz` has whole files that PEFT wrote: pairs of what a config may say about one tiny model, with logits and
gradients. `python -m tests.adapters.peft_parity [case ... | matrix]` writes the golden files anew; it needs torch,
transformers and peft.
"""

import copy
import functools
import itertools
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
OTHERWISE = ("llama", "llama4", *MAMBA, *NO_TEXT, "image_encoders", "combinations", "layer_combinations", "diffusion")
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


# The matrix: what a config may say of each kind, for one tiny model.
MATRIX: dict[str, dict[str, dict[str, Any]]] = {
    "targets": {
        "attention": {"target_modules": ["q_proj", "o_proj"]},
        "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
        "head": {"target_modules": ["v_proj", "lm_head"]},
        "linear": ALL,  # also the router and the experts
    },
    "saved": {
        "saved_none": {},
        "saved_embedding": {"modules_to_save": ["embed_tokens"]},
        "saved_head": {"modules_to_save": ["lm_head"]},
        "saved_both": {"modules_to_save": ["embed_tokens", "lm_head"]},
        "saved_norms": {"modules_to_save": ["norm"]},
    },
    "base": {"untied": {}, "tied": {}, "kept_tied": {"ensure_weight_tying": True}},
    "kind": {"lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}},
    "experts": {"frozen": {}, "gate_up": {"target_parameters": ["mlp.experts.gate_up_proj"]}, "all": EXPERTS},
}
# PEFT has no DoRA for experts, and gives no module both an adapter and a copy.
IMPOSSIBLE = [
    *[{"dora", other} for other in ("linear", "gate_up", "all")],
    *[{target, f"saved_{saved}"} for target in ("embedding", "head") for saved in (target, "both")],
    *[{"kept_tied", target, f"saved_{saved}"} for target, saved in (("embedding", "head"), ("head", "embedding"))],
]
PRODUCT = [case for case in itertools.product(*MATRIX.values()) if not any(pair <= {*case} for pair in IMPOSSIBLE)]
TINY: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 10,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}


def values(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Adapter tensors by name."""
    random = np.random.RandomState(3)
    arrays = {}
    for name in sorted(shapes):
        noise = random.standard_normal(shapes[name]).astype(np.float32)
        arrays[name] = 1 + 0.2 * np.abs(noise) if "magnitude" in name else 0.3 * noise
    return arrays


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


def pairs(cases: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Few cases that together have every pair of values that occurs in `cases`."""
    open_pairs = {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}
    chosen = []
    while open_pairs:
        best = max(cases, key=lambda case: len(open_pairs & {*itertools.combinations(enumerate(case), 2)}))
        open_pairs -= {*itertools.combinations(enumerate(best), 2)}
        chosen.append(best)
    return chosen


@functools.cache
def matrix_golden() -> dict[str, Any]:
    """The golden file of the matrix: bases, and of every case PEFT's file, logits, and projections of gradients."""
    with np.load(GOLDEN / "matrix.npz") as file:
        text = json.loads(str(file["text"]))
        for name, case in text["cases"].items():
            case["logits"], flat = file[f"{name}/logits"], file[f"{name}/tensors"]
            ends = np.cumsum([np.prod(shape, dtype=int) for shape in case["shapes"].values()])
            parts = zip(case["shapes"].items(), np.split(flat, ends[:-1]), strict=True)
            case["tensors"] = {key: values.reshape(shape) for (key, shape), values in parts}
    return text


def tiny_configs() -> dict[str, Any]:
    """Configs and shapes of the bases of the matrix, from transformers."""
    import transformers

    bases = {}
    for name in ("untied", "tied"):
        config = transformers.Qwen3MoeConfig(**TINY, tie_word_embeddings=name == "tied")
        model = transformers.AutoModelForCausalLM.from_config(config)
        shapes = {key: list(t.shape) for key, t in parity.stored(model, parity.tensors_of(model)).items()}
        bases[name] = {"config": json.loads(config.to_json_string(use_diff=False)), "shapes": shapes}
    return bases


def base_of(case: tuple[str, ...]) -> str:
    """Which base a case of the matrix is for."""
    return "untied" if "untied" in case else "tied"


def write_matrix_case(base: Path, adapter: Path, case: tuple[str, ...]) -> dict[str, Any]:
    """Lets PEFT write the file of a case; returns its logits, and projections of gradients by the file's names."""
    import peft
    import torch

    fields: dict[str, Any] = {"r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM"}
    for value, choices in zip(case, MATRIX.values(), strict=True):
        fields |= copy.deepcopy(choices[value])  # PEFT changes its lists
    model = peft.get_peft_model(their_base(base), peft.LoraConfig(**fields)).eval()
    random = np.random.RandomState(5)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:  # in place: with `ensure_weight_tying` two factors share their values
            is_whole = "modules_to_save" in name or "magnitude" in name
            noise = (0.05 if is_whole else 0.3) * random.standard_normal(tuple(parameter.shape))
            parameter.data.mul_(float(is_whole)).add_(torch.from_numpy(noise.astype(np.float32)))
    model.save_pretrained(adapter)
    ids = torch.from_numpy(tokens(TINY["vocab_size"])).long()
    logits = model(ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    parameters = model.named_parameters(remove_duplicate=False)
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters}
    named = peft.get_peft_model_state_dict(model, state_dict=gradients)
    projections = {name: parity.projection(name, gradient.numpy()).tolist() for name, gradient in named.items()}
    return {"logits": logits.detach().numpy(), "gradients": projections}


def write_matrix() -> None:
    """Writes the golden file of the matrix."""
    import tempfile

    bases, cases, arrays = tiny_configs(), {}, {}
    for case in pairs(PRODUCT):
        name = "-".join(case)
        with tempfile.TemporaryDirectory() as scratch:
            base = parity.directory(Path(scratch, "base"), bases[base_of(case)])
            result = write_matrix_case(base, adapter := Path(scratch, "adapter"), case)
            config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
            tensors = dict(sorted(load_file(adapter / "adapter_model.safetensors").items()))
        shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
        cases[name] = {"config": config, "shapes": shapes, "gradients": result["gradients"]}
        arrays[f"{name}/logits"] = result["logits"]
        arrays[f"{name}/tensors"] = np.concatenate([tensor.ravel() for tensor in tensors.values()])
        print(name, flush=True)
    text = json.dumps({"bases": bases, "cases": cases}, sort_keys=True)
    np.savez_compressed(GOLDEN / "matrix.npz", text=np.array(text), **arrays)


def write(names: list[str]) -> None:
    import tempfile

    GOLDEN.mkdir(exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            arrays = theirs(name, Path(scratch))
        text = json.dumps({key: arrays[key] for key in ("config", "shapes")}, sort_keys=True)
        np.savez_compressed(GOLDEN / f"{name}.npz", logits=arrays["logits"], text=np.array(text))


if __name__ == "__main__":
    for case in sys.argv[1:] or ["matrix", *CASES]:
        try:
            write_matrix() if case == "matrix" else write([case])
            print(case, flush=True)
        except Exception as error:  # the others are of use
            print("FAILED", case, type(error).__name__, str(error)[:400], flush=True)
