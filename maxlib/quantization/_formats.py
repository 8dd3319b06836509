"""Number formats, and the rules that give them to layers."""

import dataclasses
from collections.abc import Mapping, Sequence

from maxlib.nn.sites import Kind, Layers

WEIGHTS = ("int8", "int4", "nf4", "float8_e4m3fn", "float8_e5m2")
FOUR_BIT_FLOATS = {"nvfp4": 16, "mxfp4": 32}  # E2M1 in groups of this size, only in training
NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Format:
    """Formats to which the operands of a matmul are rounded; None does not round an operand.

    Args:
        weights: "int8", "int4", "nf4", "float8_e4m3fn" or "float8_e5m2"; in training also "nvfp4" and "mxfp4".
        activations: "int8" or a float8; None multiplies in the dtype of the activations.
        gradients: "int8" or a float8 for incoming gradients in training; None computes the backward pass in full
            precision. All three may be "nvfp4" with blocks of 16, for training in four bits.
        group: Number of neighbouring inputs that share a scale; None for all inputs of an output. "nvfp4" has groups of
            16 and "mxfp4" of 32.
        block: Side of the blocks that share a scale in training, a multiple of 32: lines in activations and gradients,
            squares in weights. Scales are powers of two, of E4M3 in NVFP4. None uses one scale for each row of
            activations and each output of a weight.
        symmetric: False gives each scale of a weight a zero point, as AWQ does; for int8 and int4 with activations that
            are not rounded.

    Raises:
        ValueError: when the settings are inconsistent.
    """

    weights: str
    activations: str | None = None
    gradients: str | None = None
    group: int | None = None
    block: int | None = None
    symmetric: bool = True

    def __post_init__(self):
        if self.weights not in (*WEIGHTS, *FOUR_BIT_FLOATS):
            raise ValueError(f"weights must be one of {(*WEIGHTS, *FOUR_BIT_FLOATS)}, got {self.weights!r}")
        if not self.symmetric and (self.weights not in ("int8", "int4") or self.activations is not None):
            raise ValueError(
                f"zero points need weights in int8 or int4, and activations that are not rounded; got {self}"
            )
        if "nvfp4" in (self.activations, self.gradients):
            if (self.weights, self.activations, self.gradients, self.group, self.block) != (*["nvfp4"] * 3, None, 16):
                raise ValueError(f"nvfp4 rounds weights, activations and gradients in blocks of 16; got {self}")
            return
        if self.group != FOUR_BIT_FLOATS.get(self.weights, self.group):
            raise ValueError(f"{self.weights} has groups of {FOUR_BIT_FLOATS[self.weights]}, got {self.group}")
        for name in ("activations", "gradients"):
            if getattr(self, name) not in (None, *NARROW):
                raise ValueError(f"{name} must be None or one of {NARROW}, got {getattr(self, name)!r}")
        if self.is_emulated and (self.gradients is not None or self.block is not None):
            raise ValueError(
                f"gradients and blocks need weights in one of {NARROW} without groups, and rounded activations; got {self}"
            )
        if self.group is not None and self.group < 2:
            raise ValueError(f"group must be at least 2, got {self.group}")
        if self.block is not None and (self.block < 32 or self.block % 32):
            raise ValueError(f"block must be a multiple of 32, got {self}")

    @property
    def is_emulated(self) -> bool:
        """Returns True if training rounds operands to this format and multiplies in the dtype of the activations."""
        return self.activations is None or self.group is not None or self.weights not in (*NARROW, self.activations)

    def __str__(self) -> str:
        group = "" if self.symmetric else " asymmetric"
        group += "" if self.group is None else f" in groups of {self.group}"
        group += "" if self.block is None else f" in blocks of {self.block}"
        more = [f"{what} {kind}" for what, kind in (("x", self.activations), ("d", self.gradients)) if kind]
        return " ".join([self.weights + group, *more])


_E4M3 = "float8_e4m3fn"
_NVFP4 = Format("nvfp4", "nvfp4", "nvfp4", block=16)
TRAINING = {
    "int8": Format("int8", "int8"),
    "int8_gradients": Format("int8", "int8", "int8"),
    "fp8": Format(_E4M3, _E4M3, "float8_e5m2"),
    "fp8_block": Format(_E4M3, _E4M3, _E4M3, block=128),
    "nvfp4": _NVFP4,
    "int4_qat": Format("int4", group=32),
    "int4_w4a8_qat": Format("int4", "int8", group=32),
    "nvfp4_qat": Format("nvfp4", group=16),
    "mxfp4_qat": Format("mxfp4", group=32),
}
INFERENCE = {
    "int8": Format("int8"),
    "int4": Format("int4", group=32),
    "int4_asymmetric": Format("int4", group=32, symmetric=False),
    "nf4": Format("nf4", group=64),
    "fp8": Format(_E4M3),
    "int8_w8a8": Format("int8", "int8"),
    "fp8_w8a8": Format(_E4M3, _E4M3),
}


@dataclasses.dataclass(frozen=True)
class LastLayers:
    """The last layers of each stack, for `Rule.layers`.

    Args:
        share: Share of the layers, rounded to a whole number; one at least.
    """

    share: float

    def __call__(self, count: int) -> tuple[int, ...]:
        """Returns the indices in a stack of `count` layers."""
        return tuple(range(count - max(1, round(self.share * count)), count))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives `format` to the layers that the other fields select.

    Args:
        format: The format; None for full precision: `Rule(None, layers=(0, -1))` keeps the first and the last layer.
        match: Shell pattern on pattern paths ("layers.attn.q").
        layers: Indices of layers in each stack; negative ones count from the end. None for all. Also a function of the
            number of layers that returns them, such as `LastLayers(0.15)`.
        kinds: Kinds of layers, by default neither routers nor embeddings (the head is one). "unknown" are matrices in
            layers of other libraries; they can only be left in full precision, by a rule with `format=None`.
    """

    format: Format | None
    match: str = "*"
    layers: Layers = None
    kinds: tuple[Kind, ...] = ("dense", "expert")


Rules = str | Format | Sequence[Rule]


def as_rules(rules: Rules, presets: Mapping[str, Format]) -> tuple[Rule, ...]:
    """Returns rules; a preset's name or a format applies to all layers except embeddings, head and routers.

    The preset "nvfp4" also leaves the last 15 % of a stack's layers in full precision (arXiv:2509.25149, section 4.1).
    """
    if isinstance(rules, str):
        if rules not in presets:
            raise ValueError(
                f"there is no preset {rules!r}; pass one of {sorted(presets)}, a Format or a list of Rules"
            )
        if presets[rules] == _NVFP4:
            return Rule(None, layers=LastLayers(0.15)), Rule(_NVFP4)
        rules = presets[rules]
    return (Rule(rules),) if isinstance(rules, Format) else tuple(rules)
