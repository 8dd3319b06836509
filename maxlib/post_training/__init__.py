"""Post-training: losses of preferences, policies and distillation, and helpers to prepare their batches.

The losses are `training.Loss`es for `training.make_train_step` and `training.Trainer`; their formulas on arrays are in
`advantages`, `policies` and `preferences`. Losses of supervised tuning are in `training`; `data` makes pairs and
labelled answers. Every name is loaded on first use.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.post_training import advantages as advantages
    from maxlib.post_training import embeddings as embeddings
    from maxlib.post_training import policies as policies
    from maxlib.post_training import ppo as ppo
    from maxlib.post_training import preferences as preferences
    from maxlib.post_training import reward_models as reward_models
    from maxlib.post_training._distillation import Distillation as Distillation
    from maxlib.post_training._episodes import Episode as Episode
    from maxlib.post_training._episodes import episode_metrics as episode_metrics
    from maxlib.post_training._episodes import run_episodes as run_episodes
    from maxlib.post_training._loaders import add_reference as add_reference
    from maxlib.post_training._loaders import add_teacher as add_teacher
    from maxlib.post_training._pools import Environment as Environment
    from maxlib.post_training._pools import EnvironmentPool as EnvironmentPool
    from maxlib.post_training._pools import Prompt as Prompt
    from maxlib.post_training._pools import RewardPool as RewardPool
    from maxlib.post_training._reference import MovingReference as MovingReference
    from maxlib.post_training._reference import ReferencedLoss as ReferencedLoss
    from maxlib.post_training._reference import WithFrozen as WithFrozen
    from maxlib.post_training._reference import log_probs as log_probs
    from maxlib.post_training._rollouts import AsyncRollouts as AsyncRollouts
    from maxlib.post_training._rollouts import Rollouts as Rollouts
    from maxlib.post_training._tool_chat import ToolChat as ToolChat
    from maxlib.post_training._tool_chat import json_schema as json_schema
    from maxlib.post_training._trajectories import Part as Part
    from maxlib.post_training._trajectories import Trajectory as Trajectory
    from maxlib.post_training._trajectories import completion_batch as completion_batch
    from maxlib.post_training._trajectories import join_turns as join_turns
    from maxlib.post_training._trajectories import trajectory_batch as trajectory_batch
    from maxlib.post_training.advantages import AdaptiveEntropy as AdaptiveEntropy
    from maxlib.post_training.advantages import group_advantages as group_advantages
    from maxlib.post_training.advantages import leave_one_out as leave_one_out
    from maxlib.post_training.advantages import reward_metrics as reward_metrics
    from maxlib.post_training.embeddings import InfoNCE as InfoNCE
    from maxlib.post_training.policies import CISPO as CISPO
    from maxlib.post_training.policies import DAPO as DAPO
    from maxlib.post_training.policies import DPPO as DPPO
    from maxlib.post_training.policies import GRPO as GRPO
    from maxlib.post_training.policies import GSPO as GSPO
    from maxlib.post_training.policies import KL as KL
    from maxlib.post_training.policies import LUSPO as LUSPO
    from maxlib.post_training.policies import RLOO as RLOO
    from maxlib.post_training.policies import SAPO as SAPO
    from maxlib.post_training.policies import VESPO as VESPO
    from maxlib.post_training.policies import Clip as Clip
    from maxlib.post_training.policies import FixedLengthMean as FixedLengthMean
    from maxlib.post_training.policies import GammaWeight as GammaWeight
    from maxlib.post_training.policies import PolicyLoss as PolicyLoss
    from maxlib.post_training.policies import ProbabilityClip as ProbabilityClip
    from maxlib.post_training.policies import RolloutCorrection as RolloutCorrection
    from maxlib.post_training.policies import SoftGate as SoftGate
    from maxlib.post_training.policies import TruncatedWeight as TruncatedWeight
    from maxlib.post_training.ppo import PPO as PPO
    from maxlib.post_training.ppo import ValueLoss as ValueLoss
    from maxlib.post_training.preferences import CPO as CPO
    from maxlib.post_training.preferences import DPO as DPO
    from maxlib.post_training.preferences import KTO as KTO
    from maxlib.post_training.preferences import ORPO as ORPO
    from maxlib.post_training.preferences import ChosenNLL as ChosenNLL
    from maxlib.post_training.preferences import MixedPreference as MixedPreference
    from maxlib.post_training.preferences import PreferenceLoss as PreferenceLoss
    from maxlib.post_training.preferences import SimPO as SimPO
    from maxlib.post_training.reward_models import BradleyTerry as BradleyTerry
    from maxlib.post_training.reward_models import TokenClassification as TokenClassification
    from maxlib.post_training.reward_models import text_scores as text_scores
    from maxlib.post_training.reward_models import token_scores as token_scores

__getattr__, __dir__ = lazy(__name__, __file__)
