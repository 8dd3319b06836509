"""Checkpoints that can be restored on another mesh or stack grouping, and that survive failures; see
docs/decisions.md.
"""

from maxlib.checkpoint._checkpointer import Checkpointer as Checkpointer
from maxlib.checkpoint._checksum import checksums as checksums
from maxlib.checkpoint._errors import DamagedError as DamagedError
from maxlib.checkpoint._errors import InUseError as InUseError
from maxlib.checkpoint._errors import SaveError as SaveError
from maxlib.checkpoint._errors import UnsavedError as UnsavedError
from maxlib.checkpoint._groupings import layer_paths as layer_paths
from maxlib.checkpoint._local import Local as Local
from maxlib.checkpoint._policy import Best as Best
from maxlib.checkpoint._restore import StepRecords as StepRecords
from maxlib.checkpoint._restore import load as load
from maxlib.checkpoint._restore import read_records as read_records
from maxlib.checkpoint._restore import verify as verify
from maxlib.checkpoint._tiers import Tiers as Tiers
