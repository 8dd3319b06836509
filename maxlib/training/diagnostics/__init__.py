"""What a run does, and why it is slow or wrong. Each part works in a loop of your own and attaches to a `Trainer` from
outside.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxlib.training.diagnostics.clock import Account as Account
    from maxlib.training.diagnostics.clock import Clock as Clock
    from maxlib.training.diagnostics.clock import goodput as goodput
    from maxlib.training.diagnostics.clock import plot_goodput as plot_goodput
    from maxlib.training.diagnostics.coordinates import Coordinates as Coordinates
    from maxlib.training.diagnostics.coordinates import coordinate_check as coordinate_check
    from maxlib.training.diagnostics.coordinates import plot_coordinates as plot_coordinates
    from maxlib.training.diagnostics.corruption import Recompute as Recompute
    from maxlib.training.diagnostics.corruption import gradient_digests as gradient_digests
    from maxlib.training.diagnostics.corruption import replicas_that_differ as replicas_that_differ
    from maxlib.training.diagnostics.curve import plot_loss as plot_loss
    from maxlib.training.diagnostics.html import report as report
    from maxlib.training.diagnostics.layers import LayerStatistics as LayerStatistics
    from maxlib.training.diagnostics.layers import Observation as Observation
    from maxlib.training.diagnostics.layers import norms_by_layer as norms_by_layer
    from maxlib.training.diagnostics.layers import observe as observe
    from maxlib.training.diagnostics.memory import live_arrays as live_arrays
    from maxlib.training.diagnostics.memory import memory_profile as memory_profile
    from maxlib.training.diagnostics.memory import memory_use as memory_use
    from maxlib.training.diagnostics.nonfinite import find_nonfinite as find_nonfinite
    from maxlib.training.diagnostics.profile import Op as Op
    from maxlib.training.diagnostics.profile import Profile as Profile
    from maxlib.training.diagnostics.profile import summary as summary
    from maxlib.training.diagnostics.profile import top_ops as top_ops
    from maxlib.training.diagnostics.program import DumpProgram as DumpProgram
    from maxlib.training.diagnostics.program import dump_program as dump_program
    from maxlib.training.diagnostics.run import Samples as Samples
    from maxlib.training.diagnostics.run import add_sample as add_sample
    from maxlib.training.diagnostics.run import write_config as write_config
    from maxlib.training.diagnostics.stacks import Watchdog as Watchdog
    from maxlib.training.diagnostics.stacks import dump_stacks as dump_stacks
    from maxlib.training.diagnostics.stragglers import SlowHosts as SlowHosts
    from maxlib.training.diagnostics.stragglers import SlowSteps as SlowSteps
    from maxlib.training.diagnostics.stragglers import slow_hosts as slow_hosts

_MODULES = {
    "coordinates": ("Coordinates", "coordinate_check", "plot_coordinates"),
    "corruption": ("Recompute", "gradient_digests", "replicas_that_differ"),
    "clock": ("Account", "Clock", "goodput", "plot_goodput"),
    "curve": ("plot_loss",),
    "memory": ("live_arrays", "memory_profile", "memory_use"),
    "nonfinite": ("find_nonfinite",),
    "layers": ("LayerStatistics", "Observation", "norms_by_layer", "observe"),
    "profile": ("Op", "Profile", "summary", "top_ops"),
    "program": ("DumpProgram", "dump_program"),
    "html": ("report",),
    "run": ("Samples", "add_sample", "write_config"),
    "stacks": ("Watchdog", "dump_stacks"),
    "stragglers": ("SlowHosts", "SlowSteps", "slow_hosts"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
