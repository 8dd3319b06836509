"""Which kernels every preset trains, prefills and decodes with, on devices that are not there.

    python -m tests.benchmarks.kernels [NAME ...] [--write] [--json out.json]

Nothing is compiled: a preset is traced once for each phase, and the choosers answer for every device, with tokamax
and jax-linear-attention as if they were installed. `--write` replaces the table of
docs/kernels.md; `--json` keeps a line for each preset, phase and device.
"""

import argparse
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import ops, weights
from maxlib.ops._attention import table
from maxlib.ops._attention.table import ATTENTION, AttentionCall
from maxlib.ops._dispatch import Call, Op
from maxlib.ops._grouped_matmul import tokamax_triton
from maxlib.ops._recurrent import jax_linear_attention

DEVICES = {
    "A100": ("gpu", "NVIDIA A100-SXM4-80GB"),
    "H100": ("gpu", "NVIDIA H100 80GB HBM3"),
    "B200": ("gpu", "NVIDIA B200"),
    "v5e": ("tpu", "TPU v5 lite"),
    "v5p": ("tpu", "TPU v5p"),
    "v6e": ("tpu", "TPU v6 lite"),
}
PHASES = ("train", "train packed", "prefill", "decode")
PROVEN = (
    "cudnn",
    "mosaic_gpu",
    "mosaic_gpu_mla",
    "tokamax",
    "tokamax_triton",
    "splash",
    "megablox",
    "jax_linear_attention",
)
RECURRENCES = {
    "gated_delta_rule": "the gated delta rule",
    "kimi_delta_attention": "Kimi delta attention",
    "ssd": "Mamba-2's recurrence",
}
EXTRA = {"softcap", "sinks", "bias", "lse"}
CAUSAL = ops.StaticMask("causal", aligned=True)
TOKENS, ROWS = 1024, 2  # what every preset has positions for
PAGE, BEGIN, END = Path("docs/kernels.md"), "<!-- kernels: begin -->", "<!-- kernels: end -->"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one call of an operation gets, and what of it no proven kernel takes; nothing if one runs it."""

    op: str
    name: str
    lacking: tuple[str, ...] = ()


Asked = Callable[[tuple[str, str]], Kernel]  # a call, which answers for a device


def asked(name: str, phase: str) -> list[Asked]:
    """Returns the calls of a preset's phase."""
    family = next(candidate for candidate in weights.families() if name in candidate.presets)
    with _recorded(phase) as calls:
        model = jax.eval_shape(lambda: family.model(family.presets[name], rngs=nnx.Rngs(0)))
        tokens = jax.ShapeDtypeStruct((ROWS, 1 if phase == "decode" else TOKENS), jnp.int32)
        jax.eval_shape(lambda model, tokens: _run(model, tokens, phase), model, tokens)
    return list(calls.values())


def _run(model: Any, tokens: jax.Array, phase: str) -> jax.Array:
    if phase == "train":
        return model(tokens, dtype=jnp.bfloat16).hidden
    if phase == "train packed":
        half = jnp.broadcast_to(jnp.arange(TOKENS) // (TOKENS // 2), tokens.shape)
        return model(tokens, segment_ids=half, dtype=jnp.bfloat16).hidden
    cache = model.init_cache(ROWS, TOKENS, dtype=jnp.bfloat16)
    seen = {"valid": jnp.ones(tokens.shape, bool)} if phase == "prefill" else {}
    return model(tokens, cache=cache, dtype=jnp.bfloat16, **seen).hidden


@contextlib.contextmanager
def _recorded(phase: str) -> Iterator[dict[Any, Asked]]:
    """Yields the calls that are traced inside, each of them once."""
    calls: dict[Any, Asked] = {}
    explain, training = Op.explain, phase.startswith("train")

    def noted(op: Op, call: Call, name: str | None = None):
        calls.setdefault((op.name, call), lambda device: _answer(device, op, call, training=training))
        return explain(op, call, name)

    with mock.patch.object(Op, "explain", noted):
        yield calls


def _answer(device: tuple[str, str], op: Op, call: Any, *, training: bool) -> Kernel:
    call = dataclasses.replace(call, platform=device[0], device_kind=device[1])
    answer = op.explain(call)
    chosen = str(answer.chosen)
    if training and chosen == "tokamax_triton" and "softcap" in call.features:
        return Kernel(op.name, "tokamax_triton and chunked", ("gradients of a softcap",))
    if chosen in PROVEN:
        return Kernel(op.name, chosen)
    lacking = _lacks(call) if op is ATTENTION else (RECURRENCES.get(op.name, "experts"),)
    return Kernel(op.name, chosen, lacking)


def _lacks(call: AttentionCall) -> tuple[str, ...]:
    """Names what in a call of attention no proven kernel of its device takes, each in a call without the rest."""
    plain = {"queries": max(call.queries, 256), "mask": CAUSAL, "key_dim": 64, "value_dim": 64}
    plain |= {"features": call.features & {"gqa", "value_dim"}}
    alone: dict[str, dict[str, Any]] = {
        feature: {"features": plain["features"] | {feature}} for feature in call.features & EXTRA
    }
    mask, width = call.mask or ops.StaticMask("any", aligned=True), max(call.key_dim, call.value_dim)
    alone |= {f"heads of {width}": {"key_dim": call.key_dim, "value_dim": call.value_dim}}
    alone |= {"few queries": {"queries": call.queries}} if call.queries < 256 else {}
    unnamed = call.mask and dataclasses.replace(CAUSAL, kind="any")
    alone |= {"unnamed masks": {"mask": unnamed}} if mask.kind == "any" else {}
    alone |= {"packed rows": {"mask": dataclasses.replace(CAUSAL, segmented=True)}} if mask.segmented else {}
    alone |= {"a cache": {"mask": dataclasses.replace(CAUSAL, aligned=False)}} if not mask.aligned else {}
    missing = [
        feature
        for feature, change in alone.items()
        if ATTENTION.explain(dataclasses.replace(call, **plain | change)).chosen not in PROVEN
    ]
    several = "few queries beside a cache" if call.queries < 256 and not mask.aligned else "several of these at once"
    return tuple(missing) or (several,)


@contextlib.contextmanager
def _all_installed() -> Iterator[None]:
    """Makes the choosers answer as if the packages with kernels were installed, and what Triton's need."""
    with contextlib.ExitStack() as stack:
        version = mock.patch.object(jax_linear_attention, "installed_version", return_value=(0, 1, 0))
        stack.enter_context(version)
        for module, name in (
            (table, "is_installed"),
            (table, "has_triton_attention"),
            (tokamax_triton, "has_triton"),
        ):
            stack.enter_context(mock.patch.object(module, name, return_value=True))
        yield


def rows(names: Sequence[str], phases: Sequence[str] = PHASES) -> list[dict[str, Any]]:
    """Returns a row for each preset, phase and device."""
    lines = []
    with _all_installed():
        for name in names:
            for phase in phases:
                calls = asked(name, phase)
                for device, kind in DEVICES.items():
                    kernels = sorted({call(kind) for call in calls}, key=lambda kernel: (kernel.op, kernel.name))
                    lacking = sorted({why for kernel in kernels for why in kernel.lacking})
                    used = sorted({kernel.name for kernel in kernels})
                    lines.append(
                        {"preset": name, "phase": phase, "device": device, "kernels": used, "lacking": lacking}
                    )
    return lines


def share(rows: list[dict[str, Any]], device: str, phase: str) -> float:
    """Returns the share of presets whose every call runs a proven kernel."""
    here = [row for row in rows if (row["device"], row["phase"]) == (device, phase)]
    return sum(not row["lacking"] for row in here) / len(here)


def shares(rows: list[dict[str, Any]]) -> str:
    """Returns a table of the share of presets on proven kernels, by device and phase."""
    lines = ["| | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    lines += [
        f"| {device} | " + " | ".join(f"{share(rows, device, phase):.0%}" for phase in PHASES) + " |"
        for device in DEVICES
    ]
    return "\n".join(lines)


def gaps(rows: list[dict[str, Any]]) -> str:
    """Returns a table of how many presets lack what, phase by phase."""
    lines = ["| what no proven kernel takes | " + " | ".join(DEVICES) + " |", "|---" * (len(DEVICES) + 1) + "|"]
    lacking = Counter((why, item["device"], item["phase"]) for item in rows for why in item["lacking"])
    for why in sorted({why for why, *_ in lacking}):
        counts = {device: [lacking[why, device, phase] for phase in PHASES] for device in DEVICES}
        cells = [", ".join(map(str, counts[item])) if any(counts[item]) else "-" for item in DEVICES]
        lines.append(f"| {why} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lines = rows(args.names or list(weights.presets()))
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(shares(lines), gaps(lines), sep="\n\n")
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{shares(lines)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
