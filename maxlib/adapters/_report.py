"""Reports: the adapted layers, their memory, and which programs can read them."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx
from rich import box
from rich.table import Table

from maxlib import nn
from maxlib._utils.text import to_text
from maxlib.adapters._apply import adapted, levels
from maxlib.adapters._saved_modules import is_saved
from maxlib.nn.sites import Kind, kind_of


@dataclasses.dataclass(frozen=True)
class Row:
    """Adapters of one layer, or of several that a stack stores together. `bytes` is the size of the factors, `trained`
    is False for adapters from `freeze`, and `dora` is True for DoRA.
    """

    path: str
    kind: Kind
    rank: int
    scale: float
    dora: bool
    trained: bool
    bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Report of every adapter of a model; print it.

    Attributes:
        rows: One row per adapted layer.
        base_bytes: Bytes of everything else.
        saved: Paths of weights that `load` wrote into the base (`modules_to_save`).
    """

    rows: tuple[Row, ...]
    base_bytes: int
    saved: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Returns the bytes of all factors."""
        return sum(row.bytes for row in self.rows)

    @property
    def readers(self) -> tuple[str, ...]:
        """Returns a line for each reader of a PEFT directory about what it reads of these adapters."""
        # An adapter and the frozen ones below it are saved as one adapter with the sum of their ranks.
        written: dict[str, tuple[int, float]] = {}
        for row in self.rows:
            rank, scale = written.get(row.path, (0, row.scale))
            written[row.path] = rank + row.rank, scale
        dora, experts = any(row.dora for row in self.rows), any(row.kind == "expert" for row in self.rows)
        return readers(written.values(), dora=dora, experts=experts, saved=bool(self.saved))

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE, show_footer=True)
        table.add_column("layer", footer="\n".join(self.readers))
        for name in ("kind", "adapter", "scale"):
            table.add_column(name)
        table.add_column("bytes", justify="right", footer=f"{self.bytes:,} beside {self.base_bytes:,}")
        for row in self.rows:
            name = f"{'DoRA' if row.dora else 'LoRA'} r={row.rank}{'' if row.trained else ', frozen'}"
            table.add_row(row.path, row.kind, name, f"{row.scale:g}", f"{row.bytes:,}")
        for path in self.saved:
            table.add_row(path, "saved module", "", "", "")
        return to_text(table)


def report(model: Any) -> Report:
    """Lists the adapters of `model`. Layers that a stack scans share a row.

    Args:
        model: A model; `jax.eval_shape` of one is enough.
    """

    def row(path: str, site: Any, matmul: Any) -> Row:
        what = matmul.rank, matmul.scale, matmul.magnitude is not None, isinstance(matmul.b, nnx.LoRAParam)
        return Row(path, kind_of(site), *what, _bytes((matmul.a, matmul.b, matmul.magnitude)))

    rows = tuple(row(path, site, matmul) for path, site in adapted(model) for matmul in levels(site))
    saved = tuple(path for path, variable in nn.variables(model).items() if is_saved(variable))
    return Report(rows, _bytes(model) - sum(row.bytes for row in rows), saved)


def readers(
    written: Iterable[tuple[int, float]],
    *,
    dora: bool,
    experts: bool,
    saved: bool,
    fused: bool = False,
    beside: Sequence[str] = (),
) -> tuple[str, str]:
    """Describes what PEFT and vLLM read of a PEFT directory with these ranks and scales.

    `beside` are adapted dense MLP modules of a model with one module per expert.
    """
    peft, kinds = "PEFT: from 0.19" if experts else "PEFT: all of it", {*written}
    if beside:
        peft = f"PEFT: ignores {len(beside)} dense MLP modules beside experts, such as {beside[0]}; vLLM reads them"
    unsupported = {
        "DoRA": dora,
        "several ranks or scales in one directory": len(kinds) > 1,
        "fused experts": fused,
        "saved modules": saved,
    }
    if missing := [what for what, is_there in unsupported.items() if is_there]:
        return peft, f"vLLM: does not support {', '.join(missing)}; merge the adapters to serve the model there"
    return peft, f"vLLM: with max_lora_rank of at least {max(rank for rank, _ in kinds)}"


def _bytes(tree: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))
