"""Draws the figures of the guides, from the rules and schedules themselves: `python docs/figures.py`."""

import json
import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.patches import Patch, Rectangle

from maxlib import nn, sharding
from maxlib.models import llama
from maxlib.sharding._pipeline_chunks import Schedule

HERE = Path(__file__).parent
COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44"]
WHOLE = "#bbbbbb"
# What lies downwards and what lies to the right; of several axes the one that is split.
ARRAYS = {
    "tokens' vectors\nbatch x seq": (("batch",), ("seq",)),
    "hidden of an MLP\nbatch or seq x mlp": (("batch", "seq"), ("act_mlp",)),
    "an MLP's weights\nmlp x embed": (("mlp",), ("embed",)),
    "experts' weights\nexpert x mlp or embed": (("expert",), ("mlp", "expert_embed")),
    "layers": (("layers",), ()),
}
KINDS = {
    "DP": ("data", sharding.DP),
    "FSDP": ("fsdp", sharding.FSDP),
    "TP": ("tensor", sharding.TP),
    "TP | SP": ("tensor", sharding.TP | sharding.SP),
    "EP": ("expert", sharding.EP),
    "DP | CP_RING": ("context", sharding.DP | sharding.CP_RING),
    "DP | PP": ("stage", sharding.DP | sharding.PP),
}


def draw_parallelisms() -> Any:
    """Which of four devices holds what, for every kind of parallelism by itself."""
    figure, axes = plt.subplots(len(KINDS), len(ARRAYS), figsize=(9, 10.5))
    for row, (name, (axis, strategy)) in zip(axes, KINDS.items(), strict=True):
        layout = sharding.Layout(sharding.make_mesh(**{axis: 4}), strategy)
        for ax, (title, names) in zip(row, ARRAYS.items(), strict=True):
            draw_parts(ax, NamedSharding(layout.mesh, placed(names, layout, axis)))
            ax.set_title(title if ax in axes[0] else "", fontsize=9)
        row[0].set_ylabel(f"{name}\n({axis} 4)", rotation=0, ha="right", va="center", fontsize=10)
    keys = [Patch(fc=colour, label=f"device {i}") for i, colour in enumerate(COLOURS)]
    figure.legend(handles=[*keys, Patch(fc=WHOLE, label="whole on each")], loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure


def placed(names: tuple[tuple[str, ...], ...], layout: sharding.Layout, axis: str) -> P:
    """The two dimensions of a picture, each by that of its axes which lies over `axis`."""
    flat = [name for group in names for name in group]
    places = dict(zip(flat, layout.spec(*flat), strict=False))
    over = lambda place: axis == place or (isinstance(place, tuple) and axis in place)
    return P(*[axis if any(over(places.get(name)) for name in group) else None for group in names])


def draw_parts(ax: Any, place: NamedSharding) -> None:
    for device, index in place.devices_indices_map((4, 4)).items():
        (top, bottom), (left, right) = [part.indices(4)[:2] for part in index]
        colour = WHOLE if place.is_fully_replicated else COLOURS[device.id]
        ax.add_patch(Rectangle((left, top), right - left, bottom - top, fc=colour, ec="white", lw=2))
    ax.set(xlim=(0, 4), ylim=(4, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


SCHEDULES = {
    "GPipe, 8 microbatches": (Schedule(4, 8, 1), False),
    "GPipe, 8 microbatches, repeats=2": (Schedule(4, 8, 2), False),
    "1F1B, 8 microbatches": (Schedule(4, 8, 1), True),
}


def draw_schedules() -> Any:
    """What four stages do when: a chunk's backward pass takes twice the time of its forward pass."""
    figure, axes = plt.subplots(len(SCHEDULES), 1, figsize=(11, 6), sharex=True)
    for ax, (name, (schedule, early)) in zip(axes, SCHEDULES.items(), strict=True):
        unit = 1 / schedule.repeats
        (draw_early if early else draw_in_turn)(ax, schedule, unit)
        ax.set(ylim=(schedule.stages, 0), yticks=schedule.all + 0.5, yticklabels=[f"stage {s}" for s in schedule.all])
        ax.set_title(name, loc="left", fontsize=10)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
    axes[-1].set(xlim=(0, 3 * SCHEDULES["GPipe, 8 microbatches"][0].ticks), xlabel="time, in forward passes of a stage")
    names = {"forward": "#4477aa", "forward, second time around": "#88bbee", "backward": "#228833"}
    keys = [Patch(fc=colour, label=name) for name, colour in names.items()]
    keys.append(Patch(fc="#77bb77", label="backward, of the second time around"))
    figure.legend(handles=keys, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def draw_in_turn(ax: Any, schedule: Schedule, unit: float) -> None:
    """All microbatches forward, then the same ticks backward."""
    end = schedule.ticks * unit
    for t in range(schedule.ticks):
        turn = schedule.forward(jnp.asarray(t), schedule.all)
        boxes(ax, turn, t * unit, unit, ("#4477aa", "#88bbee"))
        boxes(ax, turn, end + 2 * (end - (t + 1) * unit), 2 * unit, ("#228833", "#77bb77"))


def draw_early(ax: Any, schedule: Schedule, unit: float) -> None:
    at = 0.0
    for t in range(schedule.ticks + schedule.lead):
        if t < schedule.ticks:
            boxes(ax, schedule.forward(jnp.asarray(t), schedule.all), at, unit, ("#4477aa", "#88bbee"))
            at += unit
        if t >= schedule.lead:
            boxes(ax, schedule.backward(jnp.asarray(t), schedule.all), at, 2 * unit, ("#228833", "#77bb77"))
            at += 2 * unit


def boxes(ax: Any, turn: Any, at: float, width: float, colours: tuple[str, str]) -> None:
    for stage in np.flatnonzero(turn.active):
        ax.add_patch(Rectangle((at, stage), width, 1, fc=colours[int(turn.repeat[stage])], ec="white", lw=0.8))
        ax.text(at + width / 2, stage + 0.55, int(turn.microbatch[stage]), ha="center", va="center", fontsize=7, c="w")


def draw_sweep() -> Any:
    """MFU at the roofline of every recorded preset by its size, on two kinds of chip; red under 60 %."""
    rows = json.loads((HERE.parent / "tests" / "benchmarks" / "sweep.json").read_text())
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for ax, chip in zip(axes, ("v5p", "v6e"), strict=True):
        for one in rows:
            if one["target"].startswith(chip) and one["parameters"] > 1e7:
                ax.scatter(one["parameters"], one["mfu"], color=COLOURS[one["mfu"] < 0.6], s=14)
        ax.axhline(0.6, color=WHOLE, linestyle="--", zorder=0)
        ax.set(title=chip, xscale="log", xlabel="parameters", xlim=(1e8, 3e12), ylim=(0, 1))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MFU at the roofline")
    return figure


def draw_shapes() -> Any:
    """Pictures of `examples/shapes.py`, with what is asked about them."""
    make, rng = (
        runpy.run_path(str(HERE.parent / "examples" / "shapes.py"))["picture_and_chat"],
        np.random.default_rng(3),
    )
    figure, row = plt.subplots(1, 4, figsize=(9, 3.3), layout="constrained")
    for ax in row:
        with tempfile.TemporaryDirectory() as folder:
            chat = make(rng, Path(folder), "picture.png")
            ax.imshow(plt.imread(f"{folder}/picture.png"))
        said = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"] for m in chat]
        ax.set_title("\n".join(f"{q} {a}" for q, a in zip(said[::2], said[1::2], strict=True)), fontsize=7)
        ax.set(xticks=[], yticks=[], anchor="S")
    return figure


# Of the whole picture: an image in a page does not inherit its colour.
STANDALONE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def draw_llama() -> str:
    """Llama 3.1 8B as `nn.draw` shows it, for README.md."""
    model = jax.eval_shape(lambda: llama.Llama(llama.PRESETS["llama3.1-8b"], rngs=nnx.Rngs(0)))
    head, end, body = nn.draw(model).svg.partition(">")
    return f"{head}{end}{STANDALONE}{body}\n"


def main() -> None:
    (HERE / "llama.svg").write_text(draw_llama())
    figures = {"parallelisms": draw_parallelisms, "schedules": draw_schedules}
    for name, draw in (figures | {"shapes": draw_shapes, "sweep": draw_sweep}).items():
        draw().savefig(HERE / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
