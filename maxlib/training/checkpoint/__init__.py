"""Checkpoints that outlive the mesh, the stacks' layout and accidents; see docs/decisions/0005."""

from maxlib.training.checkpoint.checkpointer import Checkpointer as Checkpointer
from maxlib.training.checkpoint.errors import DamagedError as DamagedError
from maxlib.training.checkpoint.errors import InUseError as InUseError
from maxlib.training.checkpoint.errors import SaveError as SaveError
from maxlib.training.checkpoint.errors import UnsavedError as UnsavedError
from maxlib.training.checkpoint.policy import Best as Best
from maxlib.training.checkpoint.relayout import layouts as layouts
from maxlib.training.checkpoint.restore import load as load
from maxlib.training.checkpoint.restore import verify as verify
from maxlib.training.checkpoint.tiers import Tiers as Tiers
