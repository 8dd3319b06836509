"""Post-training: losses of preferences, policies and distillation, and helpers to prepare their batches.

Formulas are functions of arrays (`advantages`, `policies`, `preferences`); `preference_loss`, `kto_loss`,
`policy_loss` and `distillation_loss` make training losses of them for `training.make_train_step` and
`training.Trainer`. Losses of supervised tuning are in `training`; `data` makes pairs and labelled answers. Every name
is loaded on first use.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.post_training import advantages as advantages
    from maxlib.post_training import policies as policies
    from maxlib.post_training import preferences as preferences
    from maxlib.post_training._distillation import distillation_loss as distillation_loss
    from maxlib.post_training._loaders import add_reference as add_reference
    from maxlib.post_training._loaders import add_teacher as add_teacher
    from maxlib.post_training._models import WithFrozen as WithFrozen
    from maxlib.post_training._models import log_probs as log_probs
    from maxlib.post_training._policy_losses import check_sampler as check_sampler
    from maxlib.post_training._policy_losses import cispo as cispo
    from maxlib.post_training._policy_losses import dapo as dapo
    from maxlib.post_training._policy_losses import dr_grpo as dr_grpo
    from maxlib.post_training._policy_losses import grpo as grpo
    from maxlib.post_training._policy_losses import gspo as gspo
    from maxlib.post_training._policy_losses import policy_loss as policy_loss
    from maxlib.post_training._policy_losses import rloo as rloo
    from maxlib.post_training._preference_losses import kto_loss as kto_loss
    from maxlib.post_training._preference_losses import preference_loss as preference_loss
    from maxlib.post_training._rewards import RewardPool as RewardPool
    from maxlib.post_training._rollouts import Rollouts as Rollouts
    from maxlib.post_training._rollouts import completion_batch as completion_batch
    from maxlib.post_training.advantages import group_advantages as group_advantages
    from maxlib.post_training.advantages import leave_one_out as leave_one_out
    from maxlib.post_training.advantages import reward_metrics as reward_metrics
    from maxlib.post_training.policies import CISPO as CISPO
    from maxlib.post_training.policies import KL as KL
    from maxlib.post_training.policies import Clip as Clip
    from maxlib.post_training.policies import Correction as Correction
    from maxlib.post_training.policies import FixedLengthMean as FixedLengthMean
    from maxlib.post_training.preferences import DPO as DPO
    from maxlib.post_training.preferences import KTO as KTO
    from maxlib.post_training.preferences import ORPO as ORPO
    from maxlib.post_training.preferences import ChosenNLL as ChosenNLL
    from maxlib.post_training.preferences import Mixture as Mixture
    from maxlib.post_training.preferences import SimPO as SimPO

__getattr__, __dir__ = lazy(__name__, __file__)
