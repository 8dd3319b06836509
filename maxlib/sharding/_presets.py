"""What a table of rules can say, and the usual tables by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class IfFree:
    """Mesh axes for an axis that yields: it takes those on which no other axis of the same array (or kernel call)
    lives.

    Among the names of an array, `IfFree("batch")` is the axis `batch`, yielding this once.
    """

    axes: str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What the rule "layers" says: `{"layers": Pipeline("stage", microbatches=8)}`.

    axis: the mesh axis whose devices are the stages. microbatches: into how many parts each batch is cut. repeats: how
    often a microbatch goes around, each time through another part of every stage's layers; microbatches must then be a
    multiple of the stages. Of a pass's `microbatches * repeats + stages - 1` ticks every stage idles in `stages - 1`.
    """

    axis: str
    microbatches: int
    repeats: int = 1

    def __post_init__(self):
        if self.microbatches < 1 or self.repeats < 1:
            raise ValueError(
                f"a pipeline needs at least one microbatch and one repeat, got {self.microbatches} and {self.repeats}"
            )


@dataclasses.dataclass(frozen=True)
class ExpertExchange:
    """What the rule "act_expert" may say in place of a mesh axis alone: over which axis tokens travel to their experts,
    and how.

    how: "ragged", in pieces as large as they are; "dense", in pieces of one size. Without this rule, what suits the
    device.
    """

    axis: str
    how: str

    def __post_init__(self):
        if self.how not in ("ragged", "dense"):
            raise ValueError(f"tokens travel 'ragged' or 'dense', got {self.how!r}")


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the rules "optimizer_memory" and "layers_memory" log: in which memory of their devices arrays live.

    kind: "pinned_host", the host's memory, from which devices copy at full speed.
    """

    kind: str

    def __post_init__(self):
        if self.kind != "pinned_host":
            raise ValueError(f"Memory must be 'pinned_host', the only one besides the devices' own; got {self.kind!r}")


Name = str | IfFree | None
Place = str | tuple[str, ...] | None
Rules = Mapping[str, str | tuple[str, ...] | IfFree | Pipeline | ExpertExchange | Memory | None]

_BATCH = {"batch": ("data", "fsdp")}
_FSDP = {"embed": "fsdp", "expert_embed": "fsdp", "rank": IfFree("fsdp")}
_TENSOR = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "act_heads": "tensor",
    "attn_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
}

DP: Rules = _BATCH
FSDP: Rules = _BATCH | _FSDP
TP: Rules = _BATCH | _TENSOR
FSDP_TP: Rules = _BATCH | _FSDP | _TENSOR
# Between the matmuls that `tensor` splits by heads or width, it splits activations by sequence (arXiv:2205.05198).
SP: Rules = {"seq": IfFree("tensor")}
# Experts over an axis of their own, to which tokens travel; all else takes that axis for more batch and more FSDP.
EP: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "embed": ("fsdp", "expert"),
    "rank": IfFree(("fsdp", "expert")),
    "expert": "expert",
    "act_expert": "expert",
    "expert_embed": "fsdp",
}
# Experts over the FSDP axis instead; each device gathers their weights.
EP_FSDP: Rules = _BATCH | {"embed": "fsdp", "expert": "fsdp", "rank": IfFree("fsdp")}
# How tokens travel, beside EP.
EXCHANGE_RAGGED: Rules = {"act_expert": ExpertExchange("expert", "ragged")}
EXCHANGE_DENSE: Rules = {"act_expert": ExpertExchange("expert", "dense")}
# The optimizer's state over the data axis too (arXiv:1910.02054); see `optimizer_spec`.
ZERO1: Rules = {"optimizer": "data"}

# The sequence over devices, beside any of these: `FSDP | CP_RING`. `nn.attend` says how the three differ.
CP_GATHER: Rules = {"seq": "context", "q_seq": "context"}
CP_RING: Rules = {"seq": "context", "q_seq": "context", "kv_seq": "context"}
CP_ULYSSES: Rules = {"seq": "context", "attn_heads": ("tensor", "context")}
# Layers over devices, also beside any of these.
PP: Rules = {"layers": Pipeline("stage", microbatches=8)}
# On the host until the step needs them, also beside any of these: moments, and the layers that a stack repeats.
OFFLOAD_OPTIMIZER: Rules = {"optimizer_memory": Memory("pinned_host")}
OFFLOAD_LAYERS: Rules = {"layers_memory": Memory("pinned_host")}

PRESETS: Mapping[str, Rules] = {
    "dp": DP,
    "zero1": DP | ZERO1,
    "fsdp": FSDP,
    "tp": TP,
    "tp_sp": TP | SP,
    "fsdp_tp": FSDP_TP,
    "fsdp_tp_sp": FSDP_TP | SP,
    "ep": EP,
    "ep_tp": EP | _TENSOR,
    "ep_fsdp": EP_FSDP,
    "cp_gather": CP_GATHER,
    "cp_ring": CP_RING,
    "cp_ulysses": CP_ULYSSES,
    "pp": PP,
    "exchange_ragged": EXCHANGE_RAGGED,
    "exchange_dense": EXCHANGE_DENSE,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "offload_layers": OFFLOAD_LAYERS,
}


def preset(name: str) -> Rules:
    """The rules of `PRESETS` that a name says, or several that are joined: "fsdp", "fsdp_tp+cp_ring", "fsdp+pp:16x2".

    Numbers after "pp" are those of the microbatches, 8 if there is none, and of the repeats. Raises ValueError for a
    name that is unknown.
    """
    found: dict[str, Any] = {}
    for part in name.split("+"):
        part, _, numbers = part.strip().partition(":")
        counts = numbers.split("x") if numbers else []
        known = part in PRESETS and all(count.isdecimal() for count in counts)
        if not known or len(counts) > (2 if part == "pp" else 0):
            raise ValueError(
                f"rules must be one of {', '.join(PRESETS)}, several such as fsdp+cp_ring+pp:16x2, or a table; got {name!r}"
            )
        found |= {"layers": Pipeline("stage", *map(int, counts))} if counts else PRESETS[part]
    return found
