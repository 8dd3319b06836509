"""Reports: which matmuls are quantized, and the loss of accuracy."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from rich import box
from rich.table import Table

from maxlib._utils.text import to_text
from maxlib.nn.sites import SITES, Kind, find, kind_of, unknown
from maxlib.quantization._formats import Format
from maxlib.quantization._matmul import format_of


@dataclasses.dataclass(frozen=True)
class Row:
    """The weights of one matmul.

    Attributes:
        path: Dotted path of the layer.
        kind: Kind of the layer.
        format: Its format; None for full precision.
        numbers: Number of weights.
        before: Bytes in full precision.
        after: Bytes as stored.
    """

    path: str
    kind: Kind
    format: str | None
    numbers: int
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Report of every matrix of a model; print it.

    Attention's own products have no weights and stay in full precision; `observability.flops_by_dtype` counts
    those, too.

    Attributes:
        rows: One row per matmul.
        other_bytes: Bytes of arrays that are never quantized: norms, biases, positions.
    """

    rows: tuple[Row, ...]
    other_bytes: int

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Returns the paths of the matmuls in full precision."""
        return tuple(row.path for row in self.rows if row.format is None)

    @property
    def share(self) -> float:
        """Returns the share of the numbers in matmuls that are quantized."""
        total = sum(row.numbers for row in self.rows)
        return sum(row.numbers for row in self.rows if row.format is not None) / max(total, 1)

    @property
    def bytes_before(self) -> int:
        """Returns the bytes of the model in full precision."""
        return self.other_bytes + sum(row.before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Returns the bytes of the stored model."""
        return self.other_bytes + sum(row.after for row in self.rows)

    @property
    def summary(self) -> str:
        """Returns two lines: how much is quantized, and the matmuls that are not."""
        formats = ", ".join(dict.fromkeys(row.format for row in self.rows if row.format)) or "nothing"
        bytes = f"{self.bytes_before:,} bytes" + f" -> {self.bytes_after:,}" * (self.bytes_after != self.bytes_before)
        return f"quantized: {formats} in {self.share:.1%} of the weights, {bytes}\nin full precision: {', '.join(self.unquantized)}"

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE, show_footer=True)
        table.add_column("matmul", footer=f"{self.share:.1%} of the numbers in matmuls are quantized")
        table.add_column("kind")
        table.add_column("format")
        table.add_column("bytes before", justify="right", footer=f"{self.bytes_before:,}")
        table.add_column("now", justify="right", footer=f"{self.bytes_after:,}")
        for row in self.rows:
            format = row.format or "full precision"
            table.add_row(row.path, row.kind, format, f"{row.before:,}", f"{row.after:,}")
        table.add_row(
            "norms, biases and the like", "", "full precision", f"{self.other_bytes:,}", f"{self.other_bytes:,}"
        )
        return to_text(table)


def report(model: Any) -> Report:
    """Lists which matmuls of `model` are quantized. Layers that a stack scans share a row.

    Args:
        model: A model; `jax.eval_shape` of one is enough.
    """
    rows = [_row(path, kind_of(site), site.w, format_of(site)) for path, site in find(model, SITES)]
    rows += [_row(path, "unknown", w, None) for path, w in unknown(model).items()]
    total = sum(_bytes(leaf) for leaf in jax.tree.leaves(model))
    return Report(tuple(rows), total - sum(row.after for row in rows))


def _row(path: str, kind: Kind, w: Any, format: Format | None) -> Row:
    """Returns the row of a weight."""
    numbers, after = math.prod(w.shape), sum(_bytes(leaf) for leaf in jax.tree.leaves(w))
    name = None if format is None else str(format)
    return Row(path, kind, name, numbers, numbers * w.dtype.itemsize, after)


def _bytes(array: Any) -> int:
    """Returns the size of an array in bytes."""
    return array.size * array.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of a quantized model compared with the model in full precision, on the same text.

    Attributes:
        perplexity: Perplexity in full precision.
        quantized_perplexity: Perplexity of the quantized model.
        logit_error: Root mean square of the difference of logits, relative to that of the logits around their mean.
        divergence: KL(full || quantized) in nats per token.
        agreement: Share of tokens for which both models rank the same token first.
    """

    perplexity: float
    quantized_perplexity: float
    logit_error: float
    divergence: float
    agreement: float

    def __str__(self) -> str:
        change = self.quantized_perplexity / self.perplexity - 1
        return (
            f"perplexity {self.perplexity:.4f} -> {self.quantized_perplexity:.4f} ({change:+.2%}), "
            f"logit error {self.logit_error:.2%}, KL {self.divergence:.2g} nats, same first token {self.agreement:.2%}"
        )


def compare(model: Any, quantized: Any, tokens: Int[Array, "B T"], *, dtype: Any = jnp.float32) -> Errors:
    """Measures the error of `quantized` against `model`; one row's logits are in memory at a time.

    Args:
        model: The model in full precision.
        quantized: The quantized model.
        tokens: Ids without padding.
        dtype: Dtype of the computation.
    """
    sums = jax.device_get(_sums(model, quantized, tokens, dtype))
    count = tokens.shape[0] * tokens.shape[1]
    targets = tokens.shape[0] * (tokens.shape[1] - 1)

    def perplexity(nll):
        return float(np.exp(nll / targets))

    return Errors(
        perplexity(sums["nll"]),
        perplexity(sums["quantized_nll"]),
        float(np.sqrt(sums["difference"] / sums["spread"])),
        float(sums["divergence"] / count),
        float(sums["agreement"] / count),
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Errors of several quantized models, compared with the model in full precision on the same text; print it.

    Attributes:
        errors: The errors of each, by its name.
        bytes: The bytes of each.
    """

    errors: Mapping[str, Errors]
    bytes: Mapping[str, int]

    def __str__(self) -> str:
        table = Table("method", box=box.SIMPLE)
        for title in ("perplexity", "change", "logit error", "KL, nats", "same first token", "bytes"):
            table.add_column(title, justify="right")
        for name, e in self.errors.items():
            change = e.quantized_perplexity / e.perplexity - 1
            figures = f"{e.quantized_perplexity:.4f}", f"{change:+.2%}", f"{e.logit_error:.2%}", f"{e.divergence:.2g}"
            table.add_row(name, *figures, f"{e.agreement:.2%}", f"{self.bytes[name]:,}")
        return to_text(table)


def compare_methods(
    model: Any, methods: Mapping[str, Callable[[], Any]], tokens: Int[Array, "B T"], *, dtype: Any = jnp.float32
) -> Comparison:
    """Measures the errors of several ways to quantize `model`, whose results are in memory one at a time.

        ways = {"nearest": lambda: quantization.for_inference(model, "int4")}
        print(quantization.compare_methods(model, ways, tokens))

    Args:
        model: The model in full precision.
        methods: Functions that make a quantized model, by name.
        tokens: Ids without padding, on which no method was calibrated.
        dtype: Dtype of the computation.
    """
    errors, sizes = {}, {}
    for name, make in methods.items():
        quantized = make()
        errors[name] = compare(model, quantized, tokens, dtype=dtype)
        sizes[name] = report(quantized).bytes_after
    return Comparison(errors, sizes)


def _sums(model, quantized, tokens, dtype):
    """Sums the errors of both models over all tokens."""

    def row(models, tokens):
        full, low = (m.logits(m(tokens[None], dtype=dtype).hidden)[0].astype(jnp.float32) for m in models)
        p, q = jax.nn.log_softmax(full), jax.nn.log_softmax(low)

        def nll(logp):
            return -jnp.take_along_axis(logp[:-1], tokens[1:, None], axis=-1).sum()

        return {
            "nll": nll(p),
            "quantized_nll": nll(q),
            "difference": jnp.sum((full - low) ** 2),
            "spread": jnp.sum((full - full.mean(axis=-1, keepdims=True)) ** 2),
            "divergence": jnp.sum(jnp.exp(p) * (p - q)),
            "agreement": jnp.sum(full.argmax(axis=-1) == low.argmax(axis=-1)),
        }

    run = jax.jit(lambda models, tokens: jax.tree.map(jnp.sum, jax.lax.map(lambda t: row(models, t), tokens)))
    return run((model, quantized), tokens)
