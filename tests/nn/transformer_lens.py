"""Writes what TransformerLens reads in a small GPT-2, and the grid of its activation patching, for test_capture.py.

pip install "transformer_lens<3" && python -m tests.nn.transformer_lens
"""

from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "transformer_lens.npz"
LAYERS, HEADS, DIM, VOCAB, LENGTH = 2, 2, 16, 32, 6
HOOKS = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "attn": "hook_attn_out",
    "mlp": "hook_mlp_out",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "heads": "attn.hook_z",
    "attention_pattern": "attn.hook_pattern",
    "up": "mlp.hook_pre",
}


def hugging_face() -> Any:
    """Returns the model, with large weights, so that its attention has a pattern."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def main() -> None:
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions.gpt2 import convert_gpt2_weights

    cfg = HookedTransformerConfig(
        n_layers=LAYERS,
        n_heads=HEADS,
        d_model=DIM,
        d_head=DIM // HEADS,
        d_vocab=VOCAB,
        n_ctx=16,
        act_fn="gelu_new",
        normalization_type="LN",
    )
    model = HookedTransformer(cfg)
    model.load_state_dict(convert_gpt2_weights(hugging_face(), cfg), strict=False)
    clean, corrupt = torch.tensor(np.random.default_rng(0).integers(0, VOCAB, (2, 1, LENGTH)))
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
        values = {
            name: np.stack([cache[f"blocks.{i}.{hook}"].numpy() for i in range(LAYERS)]) for name, hook in HOOKS.items()
        }
        grid = np.zeros((LAYERS, LENGTH, VOCAB), np.float32)
        for layer, position in np.ndindex(LAYERS, LENGTH):

            def put(x, hook, position=position):
                x[:, position] = cache[hook.name][:, position]
                return x

            hooks = [(f"blocks.{layer}.hook_resid_pre", put)]
            grid[layer, position] = model.run_with_hooks(corrupt, fwd_hooks=hooks)[0, -1].numpy()
    np.savez_compressed(GOLDEN, clean=clean, corrupt=corrupt, grid=grid, **values)


if __name__ == "__main__":
    main()
