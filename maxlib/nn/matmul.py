"""Matmul strategies: how a layer multiplies by its weight. They are attributes of layers, so they can be replaced."""

import dataclasses
import math
import string
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import _xla_workarounds as workarounds
from maxlib import ops, sharding
from maxlib.kernels.grouped_matmul.rows import owners
from maxlib.nn.quantized import QuantizedWeight


@runtime_checkable
class Matmul(Protocol):
    """Multiplies activations by a stored weight, whose matrix is `w[...]`: a Param, an array or a `QuantizedWeight`.

    An implementation without arrays must be hashable and compare by value, because it is part of the layer's structure.
    """

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]: ...

    def grouped(
        self,
        rows: Float[Array, "M I"],
        w: Any,
        rows_per_expert: Int[Array, " E"],
        weight_order: ops.ExpertWeightOrder = "EOI",
    ) -> Float[Array, "M O"]:
        """Multiplies rows, sorted by expert, by the matrices of their experts (`ops.grouped_matmul`)."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainMatmul:
    """Casts weights to the dtype of the activations and multiplies in it.

    Args:
        implementation: Name of an implementation of `ops.grouped_matmul`; None chooses the best one.
    """

    implementation: Literal["tokamax", "ragged_dot", "tiled", "mosaic_gpu", "reference"] | None = None

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        """Computes `einsum(spec, x, w)` in the dtype of `x`."""
        if isinstance(w, QuantizedWeight):
            return ops.quantized_einsum(spec, x, w, multiply=_einsum)
        return _einsum(spec, x, jnp.asarray(w[...], x.dtype))

    def grouped(
        self,
        rows: Float[Array, "M I"],
        w: Any,
        rows_per_expert: Int[Array, " E"],
        weight_order: ops.ExpertWeightOrder = "EOI",
    ) -> Float[Array, "M O"]:
        """Multiplies rows by the matrices of their experts in the dtype of `rows`."""
        return ops.grouped_matmul(
            rows, w, rows_per_expert, weight_order=weight_order, implementation=self.implementation
        )


def _einsum(spec: str, x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
    # XLA for CPUs would transpose a weight of more than two dimensions at every call. On a mesh, merging dimensions
    # may gather them at every use.
    return merged_einsum(_product, spec, x, w, matrix=sharding.current() is None)


def _product(spec: str, x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
    _, of_w, of_y = spec.replace("->", ",").split(",")
    is_plain = x.ndim == w.ndim == 2 and of_w[0] == of_y[-1]  # "...I,OI->...O"
    if is_plain and x.dtype == jnp.float32 and sharding.current() is None:
        return workarounds.multiply_few(x, w)
    return jnp.einsum(spec, x, w)


def rounding_einsum(spec: str, x: Float[Array, "..."], w: QuantizedWeight, activations: str) -> Float[Array, "..."]:
    """Computes `einsum(spec, x, w)` of rounded activations and a stored weight.

    Args:
        spec: The einsum.
        x: Activations.
        w: The weight.
        activations: Type to which activations are rounded.
    """
    return ops.quantized_einsum(spec, x, w, activations=activations, multiply=_einsum)


def _read(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Names what adapters read, for `nn.with_dropout`."""
    return checkpoint_name(x, "lora_input")


class LowRank(nnx.Module):
    """Matmul of an adapted weight: `gain * (w + scale * b @ a)` (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353).

    `maxlib.adapters` replaces a layer's matmul by it. The product `b @ a` is not computed: inputs are multiplied by `a`
    and the results by `b`, in the dtype of the activations.

    Args:
        inner: The matmul of the weight itself.
        a: First factor, `rank inputs`, with a leading axis of experts if there is one.
        b: Second factor, `outputs rank`, with the same leading axis.
        scale: Factor on the product.
        summed: Dimensions of the weight that are summed over, counted from its end.
        kept: Dimensions of the weight that are outputs, counted from its end.
        magnitude: Norm of each output's row of the adapted matrix, `outputs` (DoRA); None leaves the norm free.
        normalized: False if `magnitude` is already the gain.
        rslora: True if `scale` is alpha / sqrt(rank), which files of adapters record.
    """

    def __init__(
        self,
        inner: Any,
        a: nnx.Variable,
        b: nnx.Variable,
        *,
        scale: float,
        summed: tuple[int, ...],
        kept: tuple[int, ...],
        magnitude: nnx.Variable | None = None,
        normalized: bool = True,
        rslora: bool = False,
    ):
        self.inner, self.scale, self.summed, self.kept = inner, scale, summed, kept
        self.a, self.b, self.magnitude, self.normalized, self.rslora = a, b, magnitude, normalized, rslora

    @property
    def rank(self) -> int:
        """Returns the rank of the product."""
        return self.b.get_value().shape[-1]

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        """Computes `einsum(spec, x, adapted w)` in the dtype of `x`; `spec` may sum over any dimensions of `w`."""
        of_x, of_w, of_y = spec.replace("->", ",").split(",")
        of_a, of_b, of_gain = self._letters(of_w)
        gain = None if self.magnitude is None else self.gain(w).astype(x.dtype)
        late = {*of_gain} <= {*of_y}  # otherwise `spec` sums over the weight's outputs, and gains multiply `x`
        if gain is not None and not late:
            x = jnp.einsum(f"{of_x},{of_gain}->{of_x}", x, gain)
        a, b = jnp.asarray(self.a[...], x.dtype), jnp.asarray(self.b[...], x.dtype)
        # In the order with the fewest operations: multiply x by one factor, and the result by the other.
        low = jnp.einsum(f"{of_x},{of_a},{of_b}->{of_y}", _read(x), a, b, optimize="optimal")
        y = self.inner.einsum(spec, x, w) + self.scale * low
        return jnp.einsum(f"{of_y},{of_gain}->{of_y}", y, gain) if gain is not None and late else y

    def grouped(
        self,
        rows: Float[Array, "M I"],
        w: Any,
        rows_per_expert: Int[Array, " E"],
        weight_order: ops.ExpertWeightOrder = "EOI",
    ) -> Float[Array, "M O"]:
        """Multiplies rows by the adapted matrices of their experts."""
        a, b = jnp.asarray(self.a[...], rows.dtype), jnp.asarray(self.b[...], rows.dtype)
        # [M, I] -> [M, rank] -> [M, O]
        low = ops.grouped_matmul(ops.grouped_matmul(_read(rows), a, rows_per_expert), b, rows_per_expert)
        y = self.inner.grouped(rows, w, rows_per_expert, weight_order) + self.scale * low
        if self.magnitude is None:
            return y
        # [E, O] -> [M, O]: the gains of each row's expert.
        gains = self.gain(w).astype(y.dtype)
        return y * gains.at[owners(rows_per_expert, len(rows))].get(mode="fill", fill_value=1)

    def matrix(self, w: Any) -> Float[Array, "..."]:
        """Returns the adapted weight in float32, with the dimensions of `w`."""
        free = self._free_matrix(w)
        of_w = string.ascii_uppercase[: free.ndim]
        of_gain = self._letters(of_w)[2]
        return free if self.magnitude is None else jnp.einsum(f"{of_w},{of_gain}->{of_w}", free, self.gain(w))

    def row_norms(self, w: Any) -> Float[Array, "..."]:
        """Returns the norm of each output's row of `w + scale * b @ a`."""
        return jnp.sqrt(jnp.sum(jnp.square(self._free_matrix(w)), axis=self.summed))

    def gain(self, w: Any) -> Float[Array, "..."]:
        """Returns `magnitude / row_norms` of each output; no gradient flows through the length."""
        assert self.magnitude is not None
        magnitude = self.magnitude[...].astype(jnp.float32)
        if not self.normalized:
            return magnitude
        norms = jax.lax.stop_gradient(self.row_norms(w))
        return magnitude / jnp.where(norms > 0, norms, 1)  # a row of zeros has no direction

    def with_gain(self, w: Any) -> "LowRank":
        """Returns a matmul with precomputed gains, for devices that have only a part of `w`."""
        inner = self.inner.with_gain(w) if isinstance(self.inner, LowRank) else self.inner
        gain = None if self.magnitude is None else self.magnitude.replace(self.gain(w))
        return self._with(inner, gain, normalized=gain is None)

    def unquantized(self) -> "LowRank":
        """Returns a matmul that multiplies by the unquantized weight, in the dtype of the activations."""
        inner = self.inner.unquantized() if isinstance(self.inner, LowRank) else PlainMatmul()
        return self._with(inner, self.magnitude, normalized=self.normalized)

    def _with(self, inner: Any, magnitude: nnx.Variable | None, *, normalized: bool) -> "LowRank":
        return LowRank(
            inner,
            self.a,
            self.b,
            scale=self.scale,
            summed=self.summed,
            kept=self.kept,
            magnitude=magnitude,
            normalized=normalized,
            rslora=self.rslora,
        )

    def _free_matrix(self, w: Any) -> Float[Array, "..."]:
        """Returns `w + scale * b @ a` in float32."""
        weight = self.inner.matrix(w) if isinstance(self.inner, LowRank) else w[...].astype(jnp.float32)
        of_w = string.ascii_uppercase[: weight.ndim]
        of_a, of_b, _ = self._letters(of_w)
        a, b = self.a[...].astype(jnp.float32), self.b[...].astype(jnp.float32)
        precision = jax.lax.Precision.HIGHEST
        return weight + self.scale * jnp.einsum(f"{of_b},{of_a}->{of_w}", b, a, precision=precision)

    def _letters(self, of_w: str) -> tuple[str, str, str]:
        """Returns the letters of `a`, of `b` and of the gains, given those of the weight; `r` is the rank."""
        inner = {d % len(of_w) for d in (*self.summed, *self.kept)}
        experts = "".join(letter for d, letter in enumerate(of_w) if d not in inner)
        summed, kept = ("".join(of_w[d] for d in dims) for dims in (self.summed, self.kept))
        return f"{experts}r{summed}", f"{experts}{kept}r", f"{experts}{kept}"


def merged_einsum(
    einsum: Callable[..., Array],
    spec: str,
    x: Float[Array, "..."],
    w: Any,
    *,
    rows: bool = False,
    matrix: bool = False,
) -> Float[Array, "..."]:
    """Computes `einsum(spec, x, w)` with neighbouring dimensions merged, where `spec` allows it.

    Args:
        einsum: Function of a spec and two arrays.
        spec: Einsum of an input and a weight, such as `"...D,NHD->...NH"`.
        x: Input.
        w: Weight; an array if `matrix` is True.
        rows: True merges the dimensions that `...` stands for: `[B, T, D]` becomes `[B * T, D]`.
        matrix: True merges the weight's dimensions to outputs and inputs: `[N, H, D]` becomes `[N * H, D]`.
    """
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    if not of_x.startswith("...") or not of_y.startswith("..."):
        return einsum(spec, x, w)
    summed = len(of_x) - len("...")
    # [*lead, *inputs], for example [B, T, N, H]
    lead, inputs, outputs = x.shape[: x.ndim - summed], x.shape[x.ndim - summed :], None
    rows = rows and len(lead) > 1
    if matrix := matrix and len(of_w) > 2 and of_w == of_y[3:] + of_x[3:]:
        outputs, inputs = w.shape[: w.ndim - summed], (math.prod(inputs),)
        spec, w = "...I,OI->...O", w.reshape(-1, *inputs)
    if not rows and not matrix:
        return einsum(spec, x, w)
    merged = (-1,) if rows else lead
    y = einsum(spec, x.reshape(*merged, *inputs), w)
    return y.reshape(*lead, *(y.shape[len(merged) :] if outputs is None else outputs))
