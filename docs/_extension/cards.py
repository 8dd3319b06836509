"""Writes a card for each model family, from the models themselves: `python docs/_extension/cards.py FOLDER`.

A process of its own does this, since Sphinx forks and jax has threads.
"""

import dataclasses
import hashlib
import math
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).parents[1]
MADE_OF = "## What it is made of"
SEQUENCE, MOST = 4096, 1024  # tokens of a row, GPUs
# Fields that make a preset small enough to try on a laptop, in order of preference; GPT-2's width is a multiple of 12.
NARROW = {"vocab": 256, "mlp_dim": 128, "expert_dim": 32, "per_layer_vocab": 256}
TRIES = (
    {"dim": 64, "num_layers": 8},
    {"dim": 64},
    {"dim": 96},
    {"dim": 64, "num_layers": 8, "num_heads": 8, "index_heads": 8},
    {"dim": 64, "num_layers": 8, "vision": {"dim": 64, "mlp_dim": 128}},
    {"dim": 64, "vision": {"dim": 64, "mlp_dim": 128}},
    {"dim": 64, "num_layers": 8, "vision": None},
    {"dim": 64, "vision": None},
)
COLUMNS = 100  # letters of a line of code that a page shows
WAYS = (("fsdp=-1", "fsdp"), ("fsdp=-1,expert=8", "fsdp+ep"))  # degrees and strategies, as `maxlib plan` takes them


def write(made: Path) -> None:
    """Lets the cards be in docs/cards; they are made once for each state of maxlib's code and of this file.

    Args:
      made: a folder named after the state of maxlib's code; another one beside it has the cards.
    """
    made = made.with_name(f"{made.name}-cards-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}")
    if not made.exists():
        subprocess.run([sys.executable, __file__, str(made)], check=True)
    target = HERE / "cards"
    target.mkdir(exist_ok=True)
    for card in made.glob("*.md"):
        text = with_prose(card.read_text(), card.stem) + parity(card.stem)
        if not (path := target / card.name).exists() or path.read_text() != text:  # else Sphinx would read it again
            path.write_text(text)


def with_prose(text: str, family: str) -> str:
    """Puts what docs/families says about a family before the picture of its layers."""
    prose = (HERE / "families" / f"{family}.md").read_text().partition("\n")[2].strip()
    return text.replace(MADE_OF, f"## What is special\n\n{prose}\n\n{MADE_OF}", 1)


def parity(family: str) -> str:
    """Returns the rows of a family in the table of docs/models.md."""
    table = (HERE / "models.md").read_text().partition("<!-- begin parity -->")[2]
    rows = re.findall(rf"^\| {family} \| (.*)$", table, re.MULTILINE)
    if not rows:
        return ""
    head = "| case | logits | norms of gradients |\n| --- | ---: | ---: |\n"
    lines = "\n".join(f"| {row}" for row in rows)
    return f"\n## Equal to transformers\n\nGreatest differences: logits in units of their standard deviation, gradients relative; [how they are measured](../models.md#parity-with-transformers).\n\n{head}{lines}\n"


def card(family) -> str:
    """Returns a page about a family, a `weights.Family`."""
    import inspect

    from maxlib import weights
    from maxlib.models.__main__ import row

    rows = [row(family, preset) for preset in family.presets]
    small = min((r for r in rows if r.total > 1e8), key=lambda found: found.total)  # not a toy of a paper
    found, options = trained(family, small.preset)
    described = inspect.getdoc(sys.modules[family.model.__module__]) or ""
    name = f"models.{family.name}.{family.model.__name__}"
    hub = weights.HUB_NAMES.get(small.preset, "org/name")
    lines = [
        f"| `{r.preset}` | {_on_hub(r.preset)} | {_count(r)} | {2 * r.total / 2**30:,.1f} | {r.kind[0]} | {r.kind[2]} |"
        for r in rows
    ]
    types = " or ".join(f'`"{name}"`' for name in family.model_types)
    return f"""# {title(family.name)}

{described.split(chr(10) + chr(10))[0]}

`{name}` is the model; its file is `maxlib/models/{family.name}.py`. {_features(rows)}.

{MADE_OF}

{picture(family, small.preset)}

## Presets

| preset | on the hub | parameters | GiB in bfloat16 | sequence mixers | caches |
| --- | --- | --- | ---: | --- | --- |
{chr(10).join(lines)}

{memory(found)}

## Load, train, serve

A name on the hub, or a directory, whose `config.json` has the `model_type` {types}. The hub needs the extra `hub` (`pip install -e ".[hub]"`); for a gated model, accept its terms on the hub and run
`hf auth login`.

```python
import maxlib

# In the dtype of the files; to train, load with dtype=jnp.float32.
model = maxlib.from_pretrained("{hub}")
# transformers opens what this writes.
maxlib.save_pretrained(model, "copy", like="{hub}")
```
{without_hub(family, small.preset)}
```bash
# Does it fit, and how fast can it be?
maxlib plan {small.preset} {options}
# Fine-tune:
python examples/finetune.py {hub} data.txt --lora 16
# Talk with it:
maxlib chat {hub}
```

[Change a part](../guides/change-a-model.md) of it, or compare it with [other families](../guides/models.md).
"""


def picture(family, preset: str) -> str:
    """Returns a drawing of the model, and one of its image encoder beside it."""
    from maxlib import nn

    model = abstract(family, preset)
    drawn, what = [], f"<code>nn.draw(model)</code> of {preset}"
    if (tower := vars(model).pop("tower", None)) is not None:
        drawn, what = [nn.draw(tower).svg], f"{what} without its image encoder, and <code>nn.draw(model.tower)</code>"
    drawn.insert(0, nn.draw(model).svg)
    text = f"<p>{what}. Shapes are outputs by inputs.</p>"
    return f'{text}\n\n```{{raw}} html\n<div class="card-figure">{"".join(drawn)}</div>\n```'


def without_hub(family, preset: str) -> str:
    """Returns how to make a small model of the family with new weights; nothing where no sizes of ours fit it."""
    if not (sizes := narrow(family, preset)):
        return ""
    return f"""
Without the hub, a small model with the same kinds of layers and new weights. It has no tokenizer: give it
ids below {sizes["vocab"]}.

```python
import dataclasses
import jax.numpy as jnp
import maxlib
from flax import nnx
from maxlib.models import {family.name}

{narrowing(family, preset, sizes)}
model = {family.name}.{family.model.__name__}(cfg, rngs=nnx.Rngs(0))
# Without like=, nothing is copied from another directory.
maxlib.save_pretrained(model, "small")
model = maxlib.from_pretrained("small")
print(model.logits(model(jnp.array([[1, 2, 3]])).hidden).shape)
```
"""


def narrowing(family, preset: str, sizes: dict) -> str:
    """Returns the lines that make `cfg` of a preset and of what `narrow` found."""
    vision = sizes.get("vision") or {}
    fields = ", ".join(f'"{name}": {value}' for name, value in sizes.items() if name != "vision" or not vision)
    small = f"small = {{{fields}}}"
    if len(small) > COLUMNS:
        small = f"small = {{\n{textwrap.indent(textwrap.fill(fields + ',', COLUMNS - 4), '    ')}\n}}"
    lines = [small, f'cfg = dataclasses.replace({family.name}.PRESETS["{preset}"], **small)']
    if vision:
        given = ", ".join(f"{name}={value}" for name, value in vision.items())
        lines += [f"vision = dataclasses.replace(cfg.vision, {given})", "cfg = dataclasses.replace(cfg, vision=vision)"]
    return "\n".join(lines)


def narrow(family, preset: str) -> dict[str, int | dict[str, int] | None]:
    """Returns fields for `dataclasses.replace` that give a model of less than 100 million parameters; {} for none."""
    import jax
    from flax import nnx

    from maxlib import nn

    cfg = family.presets[preset]
    has = {field.name for field in dataclasses.fields(cfg) if getattr(cfg, field.name)}
    for tried in TRIES:
        sizes = {name: value for name, value in {**tried, **NARROW}.items() if name in has}
        try:
            if isinstance(sizes.get("vision"), dict):
                sizes["vision"] = dataclasses.replace(cfg.vision, **tried["vision"])
            small = dataclasses.replace(cfg, **sizes)
            model = jax.eval_shape(lambda small=small: family.model(small, rngs=nnx.Rngs(0)))
        except (ValueError, AttributeError, TypeError):  # these fields do not fit together
            continue
        if nn.num_parameters(model) < 1e8:
            return {name: tried.get(name, value) for name, value in sizes.items()}
    return {}


def _on_hub(preset: str) -> str:
    from maxlib import weights

    name = weights.HUB_NAMES.get(preset)
    return f"[{name}](https://huggingface.co/{name})" if name else ""


def title(family: str) -> str:
    """Returns the public name of a family."""
    return titles()[family]


def titles() -> dict[str, str]:
    """Returns the public names of the families that have cards, from the headings in docs/api/models.md."""
    page = (HERE / "api" / "models.md").read_text()
    found = re.findall(r"^## (.+)\n\n```\{api\} maxlib\.models\.(\w+)$", page, re.MULTILINE)
    return {name: title for title, name in found if (HERE / "families" / f"{name}.md").exists()}


def _features(rows) -> str:
    found = list(dict.fromkeys(feature for row in rows for feature in row.kind[1].split(", ") if feature))
    return f"Features (not every size has all of them): {', '.join(found)}"


def _count(row) -> str:
    from maxlib.models.__main__ import short

    return short(row.total) + (f", {short(row.active)} active" if row.active < row.total else "")


def abstract(family, preset: str):
    """Returns a model without values."""
    import jax
    from flax import nnx

    from maxlib import nn

    return jax.eval_shape(lambda: family.model(family.presets[preset], rngs=nnx.Rngs(0)))


def row_length(family, preset: str) -> int:
    """Returns the tokens of a row: fewer where a model has learned positions for fewer."""
    return min(SEQUENCE, getattr(family.presets[preset], "num_positions", SEQUENCE))


def trained(family, preset: str):
    """Returns the estimate of a training step on as few H100s as it fits, and the options of `maxlib plan` for it.

    With FSDP, or where a layer's experts are too large for that, with experts over devices too.
    """
    from maxlib import sharding

    for mesh, strategy in WAYS:
        layout = sharding.Layout(sharding.parse_degrees(mesh), sharding.preset(strategy))
        if found := fewest(preset, layout, row_length(family, preset)):
            more = "" if (mesh, strategy) == WAYS[0] else f" --mesh {mesh} --strategy {strategy}"
            return found, f"--target h100x{found.target.devices} --sequence {found.job.sequence}{more}"
    raise ValueError(f"no number of H100s up to {MOST} trains {preset}: give cards.WAYS another way to split it")


def memory(found) -> str:
    """Says what an estimate found."""
    from maxlib.hardware import GIB

    number, layout = found.target.devices, found.job.layout
    axes = " and ".join(f"`{axis}`" for axis, _ in layout.mesh.degrees)
    many = number > 1
    split = f", and the weights split over {axes}" if many else ""
    return (
        f"Training all of `{found.job.model}` with AdamW and float32 weights fits on {f'{number} H100s' if many else 'one H100'} "
        f"({found.peak / GIB:.1f} GiB{' on each' * many}), with rows of {found.job.sequence} tokens and full remat{split}. "
        "That is an estimate; [a plan](../guides/plan.md) compiles the program."
    )


def fewest(preset: str, layout, tokens: int):
    """Returns the estimate for the fewest of 1, 2, 4, ... H100s that a training step fits; None where no number does.

    Weights, optimizer and gradients are split over the GPUs, the rest is not. So one estimate tells where to look next,
    and the one that is returned was made for its own number.
    """
    from maxlib import plan

    number = dict(layout.mesh.degrees).get("expert", 1)
    while number <= MOST:
        found = plan.estimated(plan.Job(preset, f"h100x{number}", layout=layout, sequence=tokens, remat="full"))
        if found.fits:
            return found
        split = found.analytic.arguments + found.analytic.gradients
        room = found.target.chip.memory - (found.peak - split)
        if room <= 0:
            return None
        number *= max(2, 2 ** math.ceil(math.log2(split / room)))
    return None


def main(folder: Path) -> None:
    from maxlib import weights

    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    paths = [part / f"{family.name}.md" for family in weights.families() if family.presets]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:  # jax traces on one core
        list(
            pool.map(make, [path for path in paths if not path.exists()])
        )  # the others are of a build that was stopped
    part.rename(folder)


def make(path: Path) -> None:
    """Writes the card of the family that a path is named after."""
    from maxlib import weights

    (family,) = (family for family in weights.families() if family.name == path.stem)
    path.write_text(card(family))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
