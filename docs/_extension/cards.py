"""Writes a card for each model family, from the models themselves: `python docs/_extension/cards.py FOLDER`.

A process of its own does this, since Sphinx forks and jax has threads.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
SEQUENCE, MOST = 4096, 4096  # tokens of a row, GPUs


def write(made: Path) -> None:
    """Lets the cards be in docs/cards; they are made once for each state of maxlib's code."""
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
maxlib.save_pretrained(model, "copy", like="org/name")  # transformers opens it
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
    """Says how many H100s train a preset: the fewest of 1, 2, 4, ... whose estimate fits."""
    from maxlib import nn, plan, sharding
    from maxlib.hardware import GIB

    model = abstract(family, preset)
    number = 1
    while 16 * nn.num_parameters(model) / number > 80e9:  # parameters and moments alone
        number *= 2
    layout, tokens = sharding.Layout({"fsdp": -1}, sharding.FSDP), row_length(family, preset)
    while number <= MOST:
        job = plan.Job(preset, f"h100x{number}", layout=layout, sequence=tokens, remat="full")
        try:
            found = plan.estimated(job)
        except ValueError as error:  # a card without this sentence is better than no documentation
            print(f"cards: no estimate for {preset}: {error}", file=sys.stderr)
            return ""
        if found.fits:
            gpus = "1 H100" if number == 1 else f"{number} H100s"
            return (
                f"To train all of `{preset}` with AdamW and float32 weights takes {gpus}: {found.peak / GIB:.1f} GiB on each, with a row of "
                f"{tokens} tokens, `FSDP` and full remat. That is an estimate; [a plan](../guides/plan.md) compiles the program."
            )
        number *= 2
    return ""


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
