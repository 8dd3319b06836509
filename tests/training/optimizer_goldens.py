"""Writes the parameters after 20 steps of optimizers of other libraries.

    python -m tests.training.optimizer_goldens

Needs `pip install pytorch-optimizer==4.1.0 schedulefree==1.4.1`. Their Newton-Schulz steps run in float32 here.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("optimizer_goldens.npz")
LAYERS, SIZE, STEPS, RATE = 3, 6, 20, 1e-2  # matrices are square, so that their Gram matrices have full rank


def start() -> np.ndarray:
    """The matrices of a stack, `layers x outputs x inputs`."""
    return np.random.RandomState(0).randn(LAYERS, SIZE, SIZE).astype(np.float32)


def gradient(w: Any, step: int) -> Any:
    """The gradient of a noisy quadratic function, for numpy, torch and JAX."""
    noise = np.random.RandomState(step + 1).randn(LAYERS, SIZE, SIZE).astype(np.float32)
    return 0.5 * w + 0.3 * noise


def write() -> None:
    import torch
    from pytorch_optimizer.optimizer import SOAP
    from pytorch_optimizer.optimizer.muon import adamuon, base, normuon
    from schedulefree import AdamWScheduleFree

    for module in (adamuon, base, normuon):
        if hasattr(module, "zero_power_via_newton_schulz_5"):
            in_float32 = functools.partial(module.zero_power_via_newton_schulz_5, dtype=torch.float32)
            module.zero_power_via_newton_schulz_5 = in_float32

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
    np.savez(FILE, **results)


if __name__ == "__main__":
    write()
