"""Writes the parameters after 20 steps of optimizers of other libraries, and weights after MaxText's QK-clip.

    python -m tests.training.optimizer_goldens

Needs `pip install pytorch-optimizer==4.1.0 schedulefree==1.4.1`, and the file `maxtext/utils/qk_clip_utils.py` of
maxtext 0.2.5 on the path. All of it in float64, Newton-Schulz steps too.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("optimizer_goldens.npz")
LAYERS, SIZE, STEPS, RATE = 3, 6, 20, 1e-2  # matrices are square, so that their Gram matrices have full rank


def start() -> np.ndarray:
    """The matrices of a stack, `layers x outputs x inputs`."""
    return np.random.RandomState(0).randn(LAYERS, SIZE, SIZE)


def gradient(w: Any, step: int) -> Any:
    """The gradient of a noisy quadratic function, for numpy, torch and JAX."""
    noise = np.random.RandomState(step + 1).randn(LAYERS, SIZE, SIZE)
    return 0.5 * w + 0.3 * noise


def write() -> None:
    import torch
    from pytorch_optimizer.optimizer import SOAP
    from pytorch_optimizer.optimizer.muon import adamuon, base, normuon
    from schedulefree import AdamWScheduleFree

    for module in (adamuon, base, normuon):
        if hasattr(module, "zero_power_via_newton_schulz_5"):
            in_float64 = functools.partial(module.zero_power_via_newton_schulz_5, dtype=torch.float64)
            module.zero_power_via_newton_schulz_5 = in_float64

    def matrices(cls: Any, **options: Any) -> Any:
        def make(ws: list[Any]) -> Any:
            return cls([{"params": ws, "use_muon": True}], lr=RATE, foreach=False, **options)

        return make

    makers = {
        "adamuon": matrices(adamuon.AdaMuon, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.1),
        "normuon": matrices(normuon.NorMuon, beta2=0.95, eps=1e-8, update_scale="match_rms", nesterov=False),
        "soap": lambda ws: SOAP(ws, lr=RATE, precondition_frequency=5, weight_decay=0.0),
        "schedule_free": lambda ws: AdamWScheduleFree(ws, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    }
    results = {}
    for name, make in makers.items():
        ws = [torch.nn.Parameter(torch.tensor(w)) for w in start()]
        optimizer = make(ws)
        if name == "schedule_free":
            optimizer.train()
        # The first step of SOAP only begins its preconditioner.
        for step in range(STEPS):
            for i, w in enumerate(ws):
                w.grad = torch.as_tensor(gradient(np.stack([x.detach().numpy() for x in ws]), step)[i])
            optimizer.step()
        results[name] = np.stack([w.detach().numpy() for w in ws])
        if name == "schedule_free":
            optimizer.eval()
            results["schedule_free_average"] = np.stack([w.detach().numpy() for w in ws])
    np.savez(FILE, **results, **clipped())


def mla_weights() -> dict[str, np.ndarray]:
    """Projections of latent attention, `heads x outputs x rank`, and the largest logits of rows and heads."""
    rng = np.random.RandomState(0)
    shapes = {"q_up": (4, 10, 8), "k_up": (4, 6, 8), "v_up": (4, 8, 8)}
    weights = {name: rng.randn(*shape).astype(np.float32) for name, shape in shapes.items()}
    return weights | {"max_logits": rng.uniform(50, 200, (3, 4)).astype(np.float32)}


def clipped() -> dict[str, np.ndarray]:
    """The weights after QK-clip at 100; MaxText's kernels are `rank x heads x outputs`."""
    import types

    from maxtext.utils import qk_clip_utils

    x = mla_weights()
    keys_and_values = np.concatenate([x["k_up"], x["v_up"]], axis=1)
    kernels = {"wq_b": {"kernel": x["q_up"]}, "wkv_b": {"kernel": keys_and_values}}
    params = {"attn": {name: {"kernel": np.moveaxis(w["kernel"], 2, 0)} for name, w in kernels.items()}}

    class State(types.SimpleNamespace):
        def replace(self, params: Any) -> Any:
            return State(params=params)

    config = types.SimpleNamespace(attention_type="mla", qk_clip_threshold=100.0, qk_nope_head_dim=6)
    logits = {"intermediates": {"attn": {"max_logits": (x["max_logits"],)}}}
    new = qk_clip_utils.apply_qk_clip(State(params=params), logits, config).params["attn"]
    q, kv = (np.moveaxis(np.asarray(new[name]["kernel"]), 0, 2) for name in ("wq_b", "wkv_b"))
    return {"clipped_q_up": q, "clipped_k_up": kv[:, :6], "clipped_v_up": kv[:, 6:]}


if __name__ == "__main__":
    write()
