"""Multi-process runs: initialization, rendezvous, preemption, timeouts, a launcher, XLA flags.

Nothing here shards arrays; `maxlib.sharding` does.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.distributed import xla_flags as xla_flags
    from maxlib.distributed._initialize import Cluster as Cluster
    from maxlib.distributed._initialize import initialize as initialize
    from maxlib.distributed._initialize import rendezvous as rendezvous
    from maxlib.distributed._launcher import launch as launch
    from maxlib.distributed._preemption import Interrupted as Interrupted
    from maxlib.distributed._preemption import StopRequest as StopRequest
    from maxlib.distributed._preemption import stop_on_signal as stop_on_signal
    from maxlib.distributed._processes import PeerError as PeerError
    from maxlib.distributed._processes import allgather_json as allgather_json
    from maxlib.distributed._processes import main_process_first as main_process_first
    from maxlib.distributed._processes import raise_on_all as raise_on_all
    from maxlib.distributed._timeouts import hard_timeout as hard_timeout

__getattr__, __dir__ = lazy(__name__, __file__)
