"""Post-training: losses of preferences, policies and distillation, and what prepares their batches.

Formulas are functions of arrays; `preference_loss`, `kto_loss`, `policy_loss`, `distillation_loss` and `dft_loss` make
training losses of them for `training.make_train_step` and `training.Trainer`. Every name is loaded on first use.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.post_training._advantages import combine_rewards as combine_rewards
    from maxlib.post_training._advantages import decoupled_advantages as decoupled_advantages
    from maxlib.post_training._advantages import group_advantages as group_advantages
    from maxlib.post_training._advantages import has_spread as has_spread
    from maxlib.post_training._advantages import kl_penalized as kl_penalized
    from maxlib.post_training._advantages import leave_one_out as leave_one_out
    from maxlib.post_training._advantages import overlong_penalty as overlong_penalty
    from maxlib.post_training._advantages import reward_metrics as reward_metrics
    from maxlib.post_training._data import completion_batch as completion_batch
    from maxlib.post_training._data import labelled as labelled
    from maxlib.post_training._data import pad as pad
    from maxlib.post_training._data import pairs as pairs
    from maxlib.post_training._distillation_loss import dft_loss as dft_loss
    from maxlib.post_training._distillation_loss import distillation_loss as distillation_loss
    from maxlib.post_training._distillation_loss import with_embedding_noise as with_embedding_noise
    from maxlib.post_training._divergences import top_k_divergence as top_k_divergence
    from maxlib.post_training._loaders import MappedLoader as MappedLoader
    from maxlib.post_training._loaders import add_reference as add_reference
    from maxlib.post_training._loaders import add_teacher as add_teacher
    from maxlib.post_training._models import WithFrozen as WithFrozen
    from maxlib.post_training._models import log_probs as log_probs
    from maxlib.post_training._policies import CISPO as CISPO
    from maxlib.post_training._policies import KL as KL
    from maxlib.post_training._policies import Clip as Clip
    from maxlib.post_training._policies import Correction as Correction
    from maxlib.post_training._policies import Fixed as Fixed
    from maxlib.post_training._policies import kl as kl
    from maxlib.post_training._policies import mean_weights as mean_weights
    from maxlib.post_training._policies import policy_ratio as policy_ratio
    from maxlib.post_training._policy_loss import check_sampler as check_sampler
    from maxlib.post_training._policy_loss import cispo as cispo
    from maxlib.post_training._policy_loss import dapo as dapo
    from maxlib.post_training._policy_loss import dr_grpo as dr_grpo
    from maxlib.post_training._policy_loss import grpo as grpo
    from maxlib.post_training._policy_loss import gspo as gspo
    from maxlib.post_training._policy_loss import policy_loss as policy_loss
    from maxlib.post_training._policy_loss import rloo as rloo
    from maxlib.post_training._preference_loss import kto_loss as kto_loss
    from maxlib.post_training._preference_loss import preference_loss as preference_loss
    from maxlib.post_training._preferences import DPO as DPO
    from maxlib.post_training._preferences import KTO as KTO
    from maxlib.post_training._preferences import ORPO as ORPO
    from maxlib.post_training._preferences import Answers as Answers
    from maxlib.post_training._preferences import ChosenNLL as ChosenNLL
    from maxlib.post_training._preferences import Mixture as Mixture
    from maxlib.post_training._preferences import Preference as Preference
    from maxlib.post_training._preferences import SimPO as SimPO
    from maxlib.post_training._rewards import RewardPool as RewardPool
    from maxlib.post_training._segments import segment_sums as segment_sums
    from maxlib.post_training._segments import token_counts as token_counts

__getattr__, __dir__ = lazy(
    __name__,
    {
        "_advantages": (
            "combine_rewards",
            "decoupled_advantages",
            "group_advantages",
            "has_spread",
            "kl_penalized",
            "leave_one_out",
            "overlong_penalty",
            "reward_metrics",
        ),
        "_data": ("completion_batch", "labelled", "pad", "pairs"),
        "_distillation_loss": ("dft_loss", "distillation_loss", "with_embedding_noise"),
        "_divergences": ("top_k_divergence",),
        "_loaders": ("MappedLoader", "add_reference", "add_teacher"),
        "_models": ("WithFrozen", "log_probs"),
        "_policies": ("CISPO", "KL", "Clip", "Correction", "Fixed", "kl", "mean_weights", "policy_ratio"),
        "_policy_loss": ("check_sampler", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "policy_loss", "rloo"),
        "_preference_loss": ("kto_loss", "preference_loss"),
        "_preferences": (
            "KTO",
            "ORPO",
            "Answers",
            "ChosenNLL",
            "Mixture",
            "Preference",
            "DPO",
            "SimPO",
        ),
        "_rewards": ("RewardPool",),
        "_segments": ("segment_sums", "token_counts"),
    },
)
