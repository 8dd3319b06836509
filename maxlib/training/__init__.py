"""Training: a pure step to loop over by hand, and a small `Trainer` around it.

Every name is loaded on first use: checkpoints bring Orbax with them, which takes seconds to import.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxlib.training.checkpoint import Checkpointer as Checkpointer
    from maxlib.training.deadlines import deadline as deadline
    from maxlib.training.evaluation import evaluate as evaluate
    from maxlib.training.export import Export as Export
    from maxlib.training.export import HuggingFaceExport as HuggingFaceExport
    from maxlib.training.export import ParameterExport as ParameterExport
    from maxlib.training.flops import forward_flops as forward_flops
    from maxlib.training.flops import peak_flops as peak_flops
    from maxlib.training.flops import training_flops as training_flops
    from maxlib.training.interrupt import Interrupted as Interrupted
    from maxlib.training.losses import Stats as Stats
    from maxlib.training.losses import next_token_loss as next_token_loss
    from maxlib.training.metrics import Console as Console
    from maxlib.training.metrics import Csv as Csv
    from maxlib.training.metrics import Jsonl as Jsonl
    from maxlib.training.metrics import Meter as Meter
    from maxlib.training.metrics import TensorBoard as TensorBoard
    from maxlib.training.metrics import Writer as Writer
    from maxlib.training.metrics import read_jsonl as read_jsonl
    from maxlib.training.mtp import mtp_loss as mtp_loss
    from maxlib.training.offload import by_layer as by_layer
    from maxlib.training.optimizers import adamw as adamw
    from maxlib.training.optimizers import clip_by_global_norm as clip_by_global_norm
    from maxlib.training.optimizers import decay_mask as decay_mask
    from maxlib.training.optimizers import muon as muon
    from maxlib.training.optimizers import width_factors as width_factors
    from maxlib.training.optimizers import width_scaled as width_scaled
    from maxlib.training.pipelining import one_f_one_b as one_f_one_b
    from maxlib.training.placement import own_model as own_model
    from maxlib.training.placement import place_batch as place_batch
    from maxlib.training.prefetch import Loader as Loader
    from maxlib.training.prefetch import Prefetch as Prefetch
    from maxlib.training.schedules import warmup_cosine as warmup_cosine
    from maxlib.training.schedules import warmup_linear as warmup_linear
    from maxlib.training.schedules import warmup_stable_decay as warmup_stable_decay
    from maxlib.training.step import TrainState as TrainState
    from maxlib.training.step import jit_step as jit_step
    from maxlib.training.step import make_eval_step as make_eval_step
    from maxlib.training.step import make_state as make_state
    from maxlib.training.step import make_train_step as make_train_step
    from maxlib.training.trainer import Diverged as Diverged
    from maxlib.training.trainer import Trainer as Trainer
    from maxlib.training.wrappers import averaged as averaged
    from maxlib.training.wrappers import averaged_model as averaged_model
    from maxlib.training.wrappers import in_bfloat16 as in_bfloat16
    from maxlib.training.wrappers import only as only
    from maxlib.training.wrappers import scale_by_path as scale_by_path
    from maxlib.training.wrappers import skip_spikes as skip_spikes

_MODULES = {
    "checkpoint": ("Checkpointer",),
    "deadlines": ("deadline",),
    "evaluation": ("evaluate",),
    "export": ("Export", "HuggingFaceExport", "ParameterExport"),
    "flops": ("forward_flops", "peak_flops", "training_flops"),
    "interrupt": ("Interrupted",),
    "losses": ("Stats", "next_token_loss"),
    "metrics": ("Console", "Csv", "Jsonl", "Meter", "TensorBoard", "Writer", "read_jsonl"),
    "mtp": ("mtp_loss",),
    "offload": ("by_layer",),
    "optimizers": ("adamw", "clip_by_global_norm", "decay_mask", "muon", "width_factors", "width_scaled"),
    "pipelining": ("one_f_one_b",),
    "placement": ("own_model", "place_batch"),
    "prefetch": ("Loader", "Prefetch"),
    "schedules": ("warmup_cosine", "warmup_linear", "warmup_stable_decay"),
    "step": ("TrainState", "jit_step", "make_eval_step", "make_state", "make_train_step"),
    "trainer": ("Diverged", "Trainer"),
    "wrappers": ("averaged", "averaged_model", "in_bfloat16", "only", "scale_by_path", "skip_spikes"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
