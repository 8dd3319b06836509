"""Probes that run or re-run a training step to find out what is wrong with it.

They show each layer's statistics, the first value that is not finite, corrupted devices, and whether muP's learning
rates transfer. Each works in a loop of your own.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.training.probes._faults import Recompute as Recompute
    from maxlib.training.probes._faults import find_nonfinite as find_nonfinite
    from maxlib.training.probes._faults import gradient_digests as gradient_digests
    from maxlib.training.probes._faults import replicas_that_differ as replicas_that_differ
    from maxlib.training.probes._layers import LayerStatistics as LayerStatistics
    from maxlib.training.probes._layers import Observation as Observation
    from maxlib.training.probes._layers import mup_coord_check as mup_coord_check
    from maxlib.training.probes._layers import observe as observe

__getattr__, __dir__ = lazy(__name__, __file__)
