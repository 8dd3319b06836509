"""Writes a card for each model family, from the models themselves: `python docs/_extension/cards.py FOLDER`.

A process of its own does this, since Sphinx forks and jax has threads.
"""

import hashlib
import math
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
SEQUENCE, MOST = 4096, 1024  # tokens of a row, GPUs


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
        text = card.read_text() + parity(card.stem)
        if not (path := target / card.name).exists() or path.read_text() != text:  # else Sphinx would read it again
            path.write_text(text)


def parity(family: str) -> str:
    """Returns the rows of a family in the table of docs/models.md."""
    table = (HERE / "models.md").read_text().partition("<!-- begin parity -->")[2]
    rows = re.findall(rf"^\| {family} \| (.*)$", table, re.MULTILINE)
    if not rows:
        return ""
    head = "| case | logits | norms of gradients |\n| --- | ---: | ---: |\n"
    lines = "\n".join(f"| {row}" for row in rows)
    return f"\n## Equal to transformers\n\nGreatest relative differences; [how they are measured](../models.md#parity-with-transformers).\n\n{head}{lines}\n"


def card(family) -> str:
    """Returns a page about a family, a `weights.Family`."""
    import inspect

    from maxlib import nn
    from maxlib.models.__main__ import row

    rows = [row(family, preset) for preset in family.presets]
    small = min((r for r in rows if r.total > 1e8), key=lambda found: found.total)  # not a toy of a paper
    described = inspect.getdoc(sys.modules[family.model.__module__]) or ""
    name = f"models.{family.name}.{family.model.__name__}"
    lines = [f"| `{r.preset}` | {_count(r)} | {2 * r.total / 2**30:,.1f} | {r.kind[0]} | {r.kind[2]} |" for r in rows]
    types = " or ".join(f'`"{name}"`' for name in family.model_types)
    return f"""# {family.model.__name__}

{described.split(chr(10) + chr(10))[0]}

`{name}` is the model; its file is `maxlib/models/{family.name}.py`. {_features(rows)}.

## What it is made of

<p><code>nn.draw(model)</code> of {small.preset}. Shapes are outputs by inputs.</p>

```{{raw}} html
<div class="card-figure">{nn.draw(abstract(family, small.preset)).svg}</div>
```

## Presets

| preset | parameters | GiB in bfloat16 | attention | caches |
| --- | --- | ---: | --- | --- |
{chr(10).join(lines)}

{memory(family, small.preset)}

## Load, train, serve

A directory or a name on the hub whose `config.json` has the `model_type` {types}:

```python
import jax.numpy as jnp
import maxlib

model = maxlib.from_pretrained("org/name")  # in the dtype of the files; train with dtype=jnp.float32
maxlib.save_pretrained(model, "copy")  # transformers opens it
```

```bash
maxlib plan {small.preset} --target h100x8 --sequence {row_length(family, small.preset)}   # does it fit, and how fast can it be?
python examples/finetune.py org/name data.txt --lora 16      # fine-tune
maxlib chat org/name                                         # talk with it
```

[What is special about each family, and how to change a part](../guides/models.md).
"""


def _features(rows) -> str:
    found = list(dict.fromkeys(feature for row in rows for feature in row.kind[1].split(", ") if feature))
    return f"In some or all sizes: {', '.join(found)}"


def _count(row) -> str:
    from maxlib.models.__main__ import short

    return short(row.total) + (f", {short(row.active)} active" if row.active < row.total else "")


def abstract(family, preset: str):
    """Returns a model without values."""
    import jax
    from flax import nnx

    from maxlib import nn

    with nn.stack.skip_layer_check():
        return jax.eval_shape(lambda: family.model(family.presets[preset], rngs=nnx.Rngs(0)))


def row_length(family, preset: str) -> int:
    """Returns the tokens of a row: fewer where a model has learned positions for fewer."""
    return min(SEQUENCE, getattr(family.presets[preset], "num_positions", SEQUENCE))


def memory(family, preset: str) -> str:
    """Says how many H100s train a preset: with FSDP, or where a layer's experts are too large for that, with EP too."""
    from maxlib import sharding
    from maxlib.hardware import GIB

    tokens = row_length(family, preset)
    for name, layout in (
        ("`FSDP`", sharding.Layout({"fsdp": -1}, sharding.FSDP)),
        ("`FSDP | EP` (`expert` 8)", sharding.Layout({"fsdp": -1, "expert": 8}, sharding.FSDP | sharding.EP)),
    ):
        if found := fewest(preset, layout, tokens):
            number = found.target.devices
            return (
                f"To train all of `{preset}` with AdamW and float32 weights takes {number} H100{'s' if number > 1 else ''}: "
                f"{found.peak / GIB:.1f} GiB on each, with a row of {tokens} tokens, {name} and full remat. "
                "That is an estimate; [a plan](../guides/plan.md) compiles the program."
            )
    return ""


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
    for family in weights.families():
        if not (path := part / f"{family.name}.md").exists():  # of a build that was stopped
            text = card(family)
            path.write_text(text)
    part.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
