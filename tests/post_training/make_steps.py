"""Makes golden/steps.npz: ten AdamW steps of a PEFT adapter on TRL's losses, on a small Llama of tests/models.

Run with TRL, PEFT, transformers and torch: `python -m tests.post_training.make_steps`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.adapters import peft_parity
from tests.models import parity

PATH = Path(__file__).parent / "golden" / "steps.npz"
STEPS, RATE, DECAY = 10, 3e-3, 0.1
LORA = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def base(path: Path) -> Path:
    """The model that adapters are for, as a directory."""
    return parity.directory(path, next(iter(parity.golden("llama").values())))


def adapter(path: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    """The adapter that training begins with."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(peft_parity.values(shapes), path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def main() -> None:
    """Trains one adapter per loss, and keeps losses, norms of gradients, and projections of what changed."""
    import peft
    import torch

    from tests.post_training import make_golden as trl

    losses = {
        "sft": lambda logits: (-(trl.scores(logits)[0] * trl.MASK).sum() / trl.MASK.sum(), {}),
        "dpo": trl.dpo("sigmoid"),
        "dapo": trl.policy(old=None, beta=0.3, loss_type="dapo"),
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = base(Path(scratch) / "base")
        fresh = peft.get_peft_model(peft_parity.their_base(path), peft.LoraConfig(**LORA))
        fresh.save_pretrained(Path(scratch) / "adapter")
        stored = json.loads((Path(scratch) / "adapter" / "adapter_config.json").read_text())
        config = stored | {"base_model_name_or_path": None, "revision": None}
        tensors = load_file(Path(scratch) / "adapter" / "adapter_model.safetensors")
        shapes = {name: list(value.shape) for name, value in tensors.items()}
        start = adapter(Path(scratch) / "start", config, shapes)
        out: dict[str, Any] = {"text": json.dumps({"config": config, "shapes": shapes}, sort_keys=True)}
        for name, loss in losses.items():
            model = peft.PeftModel.from_pretrained(peft_parity.their_base(path), str(start), is_trainable=True)
            factors = {key.replace(".default", ""): p for key, p in model.named_parameters() if p.requires_grad}
            optimizer = torch.optim.AdamW(factors.values(), lr=RATE, weight_decay=DECAY)
            curves = []
            for step in range(STEPS):
                optimizer.zero_grad()
                value, _ = loss(model(trl.IDS[:, :-1]).logits)
                value.backward()
                norm = sum(p.grad.double().square().sum() for p in factors.values()).sqrt()
                curves.append((value.item(), norm.item()))
                if step == 0:
                    out |= {f"{name}:gradient:{k}": parity.projection(k, p.grad.numpy()) for k, p in factors.items()}
                optimizer.step()
            out[f"{name}:steps"] = np.array(curves)
            out |= {f"{name}:factor:{k}": parity.projection(k, p.detach().numpy()) for k, p in factors.items()}
            print(name, curves[0], curves[-1], flush=True)
    np.savez_compressed(PATH, **{name: np.asarray(value) for name, value in out.items()})


if __name__ == "__main__":
    main()
