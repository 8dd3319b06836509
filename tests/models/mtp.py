"""Multi-token prediction modules, which transformers does not save, and directories in the released format."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

import maxlib
from tests.models import parity


def released(config: Any, path: Path) -> tuple[Any, Any, Path]:
    """transformers' model of `config`, which has two layers, with two modules; and a directory that has both."""
    import torch
    import transformers
    from transformers.modeling_layers import MtpModel

    main = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs = MtpModel(main, 2).eval()
    random = torch.Generator().manual_seed(0)
    for name, p in (*parity.tensors_of(main).items(), *parity.tensors_of(theirs).items()):
        noise = torch.randn(p.shape, generator=random)
        p.data.copy_(1 + 0.1 * noise if "norm" in name else noise * (1 if "embed" in name else p.shape[-1] ** -0.5))
    main.save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    tensors = {
        f"model.{name}": p.detach() for name, p in parity.tensors_of(theirs).items() if name.startswith("layers.")
    }
    for name, value in parity.stored(main, tensors).items():
        _, _, depth, rest = name.split(".", 3)
        rest = rest.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        stored[f"model.layers.{2 + int(depth)}.{rest}"] = value.contiguous().numpy()
    for layer in ("model.layers.2", "model.layers.3"):
        stored[f"{layer}.embed_tokens.weight"] = stored["model.embed_tokens.weight"]
        stored[f"{layer}.shared_head.head.weight"] = stored["lm_head.weight"]
    save_file(stored, path / "model.safetensors")
    return main, theirs, path


def check_predictions(main: Any, theirs: Any, path: Path) -> None:
    """Each module takes what the one before found, and tokens one place further ahead."""
    import torch

    model, tokens = maxlib.from_pretrained(path, num_mtp=2), parity.tokens(61, 24)
    run = jax.jit(lambda model, tokens: model.predict_ahead(model(tokens, dtype=jnp.float32).hidden, tokens))
    with torch.no_grad():
        ids = torch.from_numpy(tokens).long()
        hidden, positions = main.model(ids).last_hidden_state, torch.arange(24)[None]
        for depth, prediction in enumerate(run(model, tokens), start=1):
            shifted = {"input_ids": ids[:, depth:], "position_ids": positions[:, depth:]}
            hidden = theirs.forward_layer(depth - 1, hidden[:, :-1], mtp_cache=None, **shifted)
            got, want = prediction.hidden[:, : 24 - depth], hidden.numpy()
            assert np.abs(got - want).max() < 1e-4 * want.std()


def check_export(path: Path, tmp_path: Path) -> None:
    """Modules are left out unless asked for, and are written as they were read."""
    model = maxlib.from_pretrained(path)
    assert len(model.mtp) == 0
    maxlib.save_pretrained(model, tmp_path / "without")
    assert not any(".layers.2." in name for name in load_file(tmp_path / "without" / "model.safetensors"))
    maxlib.save_pretrained(maxlib.from_pretrained(path, num_mtp=2), tmp_path / "with")
    got, want = (load_file(p / "model.safetensors") for p in (tmp_path / "with", path))
    copies = {name for name in want if name.endswith((".embed_tokens.weight", "shared_head.head.weight"))}
    assert want.keys() - got.keys() == copies - {"model.embed_tokens.weight"}
    assert all(got[name].tobytes() == want[name].tobytes() for name in got)
    assert len(maxlib.from_pretrained(tmp_path / "with", num_mtp=1).mtp) == 1
