"""Training: a pure step to loop over by hand, and a small `Trainer` around it.

Every name is loaded on first use.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.training import losses as losses
    from maxlib.training import probes as probes
    from maxlib.training._diffusion import MaskedDiffusion as MaskedDiffusion
    from maxlib.training._evaluation import Evaluation as Evaluation
    from maxlib.training._evaluation import evaluate as evaluate
    from maxlib.training._moments import bfloat16_moments as bfloat16_moments
    from maxlib.training._moments import eight_bit_moments as eight_bit_moments
    from maxlib.training._mup import mup_init as mup_init
    from maxlib.training._mup import mup_lr_factors as mup_lr_factors
    from maxlib.training._offload import offload_by_layer as offload_by_layer
    from maxlib.training._optimizer_wrappers import ema as ema
    from maxlib.training._optimizer_wrappers import ema_model as ema_model
    from maxlib.training._optimizer_wrappers import scale_by_path as scale_by_path
    from maxlib.training._optimizer_wrappers import skip_spikes as skip_spikes
    from maxlib.training._optimizer_wrappers import trainable_only as trainable_only
    from maxlib.training._optimizers import adamw as adamw
    from maxlib.training._optimizers import clip_by_global_norm as clip_by_global_norm
    from maxlib.training._optimizers import decay_mask as decay_mask
    from maxlib.training._optimizers import dion as dion
    from maxlib.training._optimizers import muon as muon
    from maxlib.training._optimizers import soap as soap
    from maxlib.training._placement import batch_axes as batch_axes
    from maxlib.training._placement import copy_model as copy_model
    from maxlib.training._placement import shard_batch as shard_batch
    from maxlib.training._prefetch import Prefetch as Prefetch
    from maxlib.training._prefetch import StatefulLoader as StatefulLoader
    from maxlib.training._prefetch import follow_layout as follow_layout
    from maxlib.training._saving import Export as Export
    from maxlib.training._saving import HuggingFaceExport as HuggingFaceExport
    from maxlib.training._saving import ParameterExport as ParameterExport
    from maxlib.training._schedules import Ramp as Ramp
    from maxlib.training._schedules import by_tokens as by_tokens
    from maxlib.training._schedules import warmup_cosine as warmup_cosine
    from maxlib.training._schedules import warmup_linear as warmup_linear
    from maxlib.training._schedules import warmup_stable_decay as warmup_stable_decay
    from maxlib.training._state import TrainState as TrainState
    from maxlib.training._state import abstract_state as abstract_state
    from maxlib.training._state import make_state as make_state
    from maxlib.training._step import jit_step as jit_step
    from maxlib.training._step import make_eval_step as make_eval_step
    from maxlib.training._step import make_train_step as make_train_step
    from maxlib.training._trainer import DivergedError as DivergedError
    from maxlib.training._trainer import Trainer as Trainer
    from maxlib.training.diloco import DiLoCo as DiLoCo
    from maxlib.training.losses import DFT as DFT
    from maxlib.training.losses import MTP as MTP
    from maxlib.training.losses import BySource as BySource
    from maxlib.training.losses import Loss as Loss
    from maxlib.training.losses import MacroMean as MacroMean
    from maxlib.training.losses import NextToken as NextToken
    from maxlib.training.losses import Quotient as Quotient
    from maxlib.training.losses import Stats as Stats

__getattr__, __dir__ = lazy(__name__, __file__)
