"""Metrics, loss spikes, goodput, memory, profiles, slow hosts and reports of training runs.

Each part works in your own training loop and can be attached to a `Trainer`. Every name is loaded on first use.
"""

from typing import TYPE_CHECKING

from maxlib._lazy import lazy

if TYPE_CHECKING:
    from maxlib.observability._anomalies import SlowHosts as SlowHosts
    from maxlib.observability._anomalies import SlowSteps as SlowSteps
    from maxlib.observability._anomalies import Spike as Spike
    from maxlib.observability._anomalies import loss_spikes as loss_spikes
    from maxlib.observability._anomalies import slow_hosts as slow_hosts
    from maxlib.observability._flops import flops_by_dtype as flops_by_dtype
    from maxlib.observability._flops import forward_flops as forward_flops
    from maxlib.observability._flops import peak_flops as peak_flops
    from maxlib.observability._flops import training_flops as training_flops
    from maxlib.observability._goodput import GoodputRecorder as GoodputRecorder
    from maxlib.observability._goodput import GoodputSummary as GoodputSummary
    from maxlib.observability._goodput import goodput as goodput
    from maxlib.observability._metrics import Console as Console
    from maxlib.observability._metrics import Jsonl as Jsonl
    from maxlib.observability._metrics import Meter as Meter
    from maxlib.observability._metrics import Writer as Writer
    from maxlib.observability._metrics import Writers as Writers
    from maxlib.observability._metrics import collect_metrics as collect_metrics
    from maxlib.observability._metrics import read_jsonl as read_jsonl
    from maxlib.observability._profile import DumpProgram as DumpProgram
    from maxlib.observability._profile import OpStats as OpStats
    from maxlib.observability._profile import Profile as Profile
    from maxlib.observability._profile import dump_program as dump_program
    from maxlib.observability._profile import live_arrays as live_arrays
    from maxlib.observability._profile import memory_use as memory_use
    from maxlib.observability._profile import profile_summary as profile_summary
    from maxlib.observability._profile import top_ops as top_ops
    from maxlib.observability._report import Samples as Samples
    from maxlib.observability._report import add_sample as add_sample
    from maxlib.observability._report import report as report
    from maxlib.observability._report import write_config as write_config
    from maxlib.observability._trackers import MLflow as MLflow
    from maxlib.observability._trackers import Prometheus as Prometheus
    from maxlib.observability._trackers import TensorBoard as TensorBoard
    from maxlib.observability._trackers import Trackio as Trackio
    from maxlib.observability._trackers import WandB as WandB

__getattr__, __dir__ = lazy(__name__, __file__)
