"""Common strategies by name."""

from collections.abc import Mapping

from maxlib.sharding._axes import AxisRules
from maxlib.sharding._parallelism import (
    DataParallel,
    ExpertParallel,
    FullyShard,
    Offload,
    SequenceParallel,
    ShardOptimizer,
    TensorParallel,
)
from maxlib.sharding._pipeline import Pipeline
from maxlib.sharding._sequence import AllGatherAttention, RingAttention, UlyssesAttention
from maxlib.sharding._strategy import Strategy, join, parts_of

DP: Strategy = DataParallel()
FSDP: Strategy = FullyShard()
TP: Strategy = DP | TensorParallel()  # heads, MLP and vocabulary over the tensor axis, rows over the others
FSDP_TP: Strategy = FSDP | TensorParallel()  # FSDP, with heads, MLP and vocabulary over the tensor axis
EP: Strategy = FSDP | ExpertParallel()  # FSDP, with whole experts over the expert axis
FSDP_BY_EXPERT: Strategy = FullyShard(by_expert=True)  # experts over the FSDP axis; each device gathers their weights
# Combine these with any of the above: `FSDP | CP_RING | PP`.
SP: Strategy = SequenceParallel()  # between the matmuls of tensor parallelism, the sequence over the tensor axis
ZERO1: Strategy = ShardOptimizer()
CP_GATHER: Strategy = AllGatherAttention()
CP_RING: Strategy = RingAttention()
CP_ULYSSES: Strategy = UlyssesAttention()
PP: Strategy = Pipeline()
PP_1F1B: Strategy = Pipeline(schedule="1f1b")
OFFLOAD_OPTIMIZER: Strategy = Offload(optimizer=True)
OFFLOAD_LAYERS: Strategy = Offload(layers=True)

PRESETS: Mapping[str, Strategy] = {
    "dp": DP,
    "zero1": DP | ZERO1,
    "fsdp": FSDP,
    "tp": TP,
    "tp_sp": TP | SP,
    "fsdp_tp": FSDP_TP,
    "fsdp_tp_sp": FSDP_TP | SP,
    "ep": EP,
    "ep_tp": EP | TensorParallel(),
    "fsdp_by_expert": FSDP_BY_EXPERT,
    "cp_gather": CP_GATHER,
    "cp_ring": CP_RING,
    "cp_ulysses": CP_ULYSSES,
    "pp": PP,
    "pp_1f1b": PP_1F1B,
    "exchange_ragged": ExpertParallel(exchange="ragged"),
    "exchange_dense": ExpertParallel(exchange="dense"),
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "offload_layers": OFFLOAD_LAYERS,
}


def preset(name: str) -> Strategy:
    """Returns the strategy of `PRESETS` with this name, or several combined.

    Args:
        name: One name or several combined with "+", such as "fsdp", "fsdp_tp+cp_ring" or "fsdp+pp:16x2". The numbers
            after "pp" and "pp_1f1b" are microbatches (default 8) and repeats (default 1).

    Raises:
        ValueError: for an unknown name.
    """
    return join(*(_preset(part.strip(), name) for part in name.split("+")))


def preset_name(strategy: Strategy | AxisRules) -> str:
    """Returns the name of a strategy as read by `preset`; parts without a name are given by their class."""
    left, names = list(parts_of(strategy)), []
    for name, candidate in sorted(PRESETS.items(), key=lambda item: -len(parts_of(item[1]))):
        if all(part in left for part in parts_of(candidate)):
            names.append(name)
            left = [part for part in left if part not in parts_of(candidate)]
    return "+".join(names + [_name_of(part) for part in left])


def _name_of(part: Strategy) -> str:
    if isinstance(part, Pipeline) and part.axis == "stage":
        name = "pp" if part.schedule == "gpipe" else "pp_1f1b"
        return f"{name}:{part.microbatches}x{part.repeats}" if part.repeats > 1 else f"{name}:{part.microbatches}"
    if part == Offload(optimizer=True, layers=True):
        return "offload_optimizer+offload_layers"
    return type(part).__name__


def _preset(part: str, text: str) -> Strategy:
    """Returns one preset; `text` is the name that the user gave."""
    part, _, numbers = part.partition(":")
    counts = numbers.split("x") if numbers else []
    known = part in PRESETS and all(count.isdecimal() for count in counts)
    if not known or len(counts) > (2 if part in ("pp", "pp_1f1b") else 0):
        raise ValueError(
            f"a strategy must be one of {', '.join(PRESETS)}, or several such as fsdp+cp_ring+pp:16x2; got {text!r}"
        )
    if not counts:
        return PRESETS[part]
    return Pipeline("stage", *map(int, counts), schedule="gpipe" if part == "pp" else "1f1b")
