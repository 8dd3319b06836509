"""Reports: what is adapted, at which cost, and who can read it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx
from rich import box
from rich.table import Table

from maxlib import nn
from maxlib._utils.tables import to_text
from maxlib.adapters._apply import adapted
from maxlib.nn._sites import Kind, kind_of


@dataclasses.dataclass(frozen=True)
class Row:
    """Adapters of one layer, or of several that a stack stores together.

    Attributes:
        path: Dotted path of the layer.
        kind: Kind of the layer.
        rank: Rank of the product.
        scale: Factor on the product.
        dora: True if lengths are trained.
        trained: False for adapters from `frozen`.
        numbers: Numbers in the factors.
        bytes: Bytes of the factors.
    """

    path: str
    kind: Kind
    rank: int
    scale: float
    dora: bool
    trained: bool
    numbers: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Report of every adapter of a model; print it.

    Attributes:
        rows: One row per adapted layer.
        base_bytes: Bytes of everything else.
    """

    rows: tuple[Row, ...]
    base_bytes: int

    @property
    def bytes(self) -> int:
        """Returns the bytes of all factors."""
        return sum(row.bytes for row in self.rows)

    @property
    def readers(self) -> tuple[str, ...]:
        """Returns a line for each reader of a PEFT directory: what it reads of these adapters."""
        # An adapter and the frozen ones below it are written as one, with the sum of their ranks.
        written: dict[str, tuple[int, float]] = {}
        for row in self.rows:
            rank, scale = written.get(row.path, (0, row.scale))
            written[row.path] = rank + row.rank, scale
        experts = any(row.kind == "expert" for row in self.rows)
        return ("PEFT: from 0.19" if experts else "PEFT: all of it", vllm_line(written.values(), dora=self.dora))

    @property
    def dora(self) -> bool:
        """Returns True if an adapter trains lengths."""
        return any(row.dora for row in self.rows)

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE, show_footer=True)
        table.add_column("layer", footer="\n".join(self.readers))
        for name in ("kind", "adapter", "scale"):
            table.add_column(name)
        table.add_column("bytes", justify="right", footer=f"{self.bytes:,} beside {self.base_bytes:,}")
        for row in self.rows:
            name = f"{'DoRA' if row.dora else 'LoRA'} r={row.rank}{'' if row.trained else ', frozen'}"
            table.add_row(row.path, row.kind, name, f"{row.scale:g}", f"{row.bytes:,}")
        return to_text(table)


def report(model: Any) -> Report:
    """Lists the adapters of `model`. Layers that a stack scans share a row.

    Args:
        model: A model; `jax.eval_shape` of one is enough.
    """
    rows = tuple(row for path, site in adapted(model) for row in _rows(path, site))
    total = sum(_bytes(leaf) for leaf in jax.tree.leaves(model))
    return Report(rows, total - sum(row.bytes for row in rows))


def vllm_line(written: Iterable[tuple[int, float]], *, dora: bool, fused: bool = False) -> str:
    """Returns what vLLM reads of a PEFT directory.

    Args:
        written: Rank and scale of each module, as they are written.
        dora: True if lengths are trained.
        fused: True if experts are written as fused parameters.
    """
    kinds = {*written}
    found = {"DoRA": dora, "several ranks or scales in one directory": len(kinds) > 1, "fused experts": fused}
    if missing := [what for what, is_there in found.items() if is_there]:
        return f"vLLM: does not support {', '.join(missing)}; merge the adapters to serve the model there"
    return f"vLLM: with max_lora_rank of at least {max(rank for rank, _ in kinds)}"


def _rows(path: str, site: Any) -> list[Row]:
    """Returns the rows of a layer: its adapter, and the frozen ones below."""
    rows, matmul = [], site.matmul
    while isinstance(matmul, nn.matmul.LowRank):
        factors = [v.get_value() for v in (matmul.a, matmul.b, matmul.magnitude) if v is not None]
        what = matmul.rank, matmul.scale, matmul.magnitude is not None
        trained = isinstance(matmul.b, nnx.LoRAParam)
        rows.append(
            Row(path, kind_of(site), *what, trained, sum(a.size for a in factors), sum(_bytes(a) for a in factors))
        )
        matmul = matmul.inner
    return rows


def _bytes(array: Any) -> int:
    return array.size * array.dtype.itemsize
