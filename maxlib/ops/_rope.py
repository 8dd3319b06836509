"""Rotary position embeddings: a specification, its cosine and sine tables, and the rotation itself.

A `Rope` defines the angle of each pair of dimensions at each position. It is small, frozen and hashable, so layers
that share a specification share its tables. Pairs are laid out as in the published weights and never permuted:
half-split pairs dimension `i` with `i + R/2` (Hugging Face), interleaved pairs `2i` with `2i + 1` (the paper, DeepSeek,
Llama 4). `MRope`, `AxialRope` and `GridRope` rotate by several positions of a token, such as the time, row and column
of an image patch.
"""

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Real

from maxlib.ops._rope_scaling import Frequencies, Length, RopeScaling, check_positive, plain_frequencies

Lengths = Length | Int[Array, " B"] | Int[Array, "B T"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dim` dimensions of each head (https://arxiv.org/abs/2104.09864).

        rope = ops.Rope(128, 500_000.0, ops.Llama3Scaling(8.0, 1.0, 4.0, 8192))  # Llama 3.1's
        attn = nn.Attention(512, num_heads=4, head_dim=128, rope=rope, rngs=nnx.Rngs(0))

    Args:
        dim: Number of rotary dimensions, even. Below the head width (partial rotary) the other dimensions pass through.
        theta: Base of the frequencies, `theta^(-2i / dim)` for pair `i`.
        scaling: Rule for longer contexts; None for none.
        interleaved: True pairs dimensions `2i` and `2i + 1` instead of `i` and `i + dim / 2`.
        max_length: Number of positions that the model supports; None for no limit. A longer sequence is an error if its
            length is known outside `jit`.

    Raises:
        ValueError: When a parameter is out of range.
    """

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False
    max_length: int | None = None

    def __post_init__(self):
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"Rope.dim must be a positive even number (dimensions rotate in pairs), got {self.dim}.")
        check_positive("Rope", theta=self.theta, max_length=self.max_length)
        if self.scaling is not None:
            self.scaling.check(self.dim)

    @property
    def needs_length(self) -> bool:
        """True if the angles depend on the length of the sequence, which in a batch is each document's own; while
        decoding, on the current length of each row.
        """
        return self.scaling is not None and self.scaling.needs_length

    def inv_freq(self, length: Length | None = None) -> Frequencies:
        """Returns the frequency of each pair, in radians per position, shape `(dim / 2,)`.

        Args:
            length: Number of positions in the sequence; used only if `needs_length` (None: a short sequence).
        """
        if self.scaling is None:
            return plain_frequencies(self.dim, self.theta)
        return self.scaling.inv_freq(self.dim, self.theta, length)

    def check_length(self, length: int) -> None:
        """Checks the length of a sequence.

        Raises:
            ValueError: When `length` positions are more than `max_length`.
        """
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"a sequence must not be longer than the rotary table: at most {self.max_length} positions, got "
                f"{length}. Shorten the sequence, or build the model with a longer rope (larger max_length, and a "
                "scaling if it was not trained that far)."
            )

    def tables(
        self, positions: Real[Array, "B T"] | Real[np.ndarray, "B T"], *, length: Lengths | None = None
    ) -> tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]:
        """Returns the cosine and sine of every pair's angle, multiplied by the scaling's magnitude.

        Args:
            positions: Position of each token in its sequence, starting at 0.
            length: Number of positions in the whole sequence including cached ones: one for all rows, one for each
                (`B`), or that of each token's document (`B T`); only used if `needs_length` (default: the row's largest
                position + 1).

        Returns:
            Two float32 arrays of shape `B T dim/2`.

        Raises:
            ValueError: When a known position or length is beyond `max_length`; traced values cannot be checked.
        """
        if self.max_length is not None:
            self._check_known(positions, length)
        positions = jnp.asarray(positions)
        if self.needs_length and length is None:
            length = jnp.max(positions, axis=1, initial=-1) + 1
        # [B, T, 1] * [#B, #T, half] -> [B, T, half]; in float32, because bfloat16 cannot represent all positions
        angles = positions.astype(jnp.float32)[..., None] * self._frequencies(length)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude

    def _frequencies(self, length: Lengths | None) -> Float32[Array, "#B #T half"]:
        """Returns the frequencies for one length of all tokens, one of each row, or one of each token."""
        if not self.needs_length or isinstance(length, int):
            return jnp.asarray(self.inv_freq(length))[None, None]  # [half] -> [1, 1, half]
        lengths = jnp.asarray(length)
        lengths = lengths.reshape(*lengths.shape, *[1] * (2 - lengths.ndim))  # [], [B] or [B, T] -> [#B, #T]
        return jnp.vectorize(self.inv_freq, signature="()->(half)")(lengths)

    def _check_known(self, positions: Array | np.ndarray, length: Lengths | None) -> None:
        for value in (length, positions.max() + 1 if positions.size else None):
            with contextlib.suppress(jax.errors.ConcretizationTypeError):  # traced: its value is unknown
                # jnp.max of a plain number would be traced inside jit, and its value unknown.
                if value is not None:
                    self.check_length(value if isinstance(value, int) else int(value.max()))


def apply_rope(
    x: Float[Array, "B T N H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotates the first `2 * half` dimensions of every head, in float32; the others pass through.

    Args:
        x: Queries or keys.
        cos: Cosines from `Rope.tables`.
        sin: Sines from `Rope.tables`.
        interleaved: Layout of the pairs, as in `Rope`.

    Returns:
        An array with the shape and dtype of `x`.

    Raises:
        ValueError: When the tables rotate more dimensions than a head has.
    """
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise ValueError(f"the rotary tables rotate {dim} dimensions, but a head only has {x.shape[-1]}.")
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]  # [B, T, half] -> [B, T, 1, half]: the same for every head
    rotating = x[..., :dim]
    if interleaved:
        pairs = rotating.reshape(*x.shape[:-1], dim // 2, 2)  # [B, T, N, dim] -> [B, T, N, half, 2]
        turned = jnp.stack(_turn(pairs[..., 0], pairs[..., 1], cos, sin), axis=-1).reshape(rotating.shape)
    else:  # XLA fuses slices and one concatenation into a single pass, also in the backward pass
        turned = jnp.concatenate(_turn(rotating[..., : dim // 2], rotating[..., dim // 2 :], cos, sin), axis=-1)
    return turned if dim == x.shape[-1] else jnp.concatenate([turned, x[..., dim:]], axis=-1)


def _turn(a: Array, b: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Computes (a + ib) * exp(i * angle) in float32.

    Halves are cast before they are joined, so that their gradients are stored in the dtype of `x` instead of float32.
    """
    dtype, a, b = a.dtype, a.astype(jnp.float32), b.astype(jnp.float32)
    return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)


Positions = Real[Array, "B T *R"] | Real[np.ndarray, "B T *R"]
Table = Float32[Array, "B T half"]


@dataclass(frozen=True)
class MRope:
    """Rotary embedding by time, row and column (M-RoPE of Qwen2-VL, arXiv:2409.12191).

    Pairs rotate by the time, then by the row, then by the column: `sections` says how many. If they alternate
    (Qwen3-VL, arXiv:2511.21631), each of the three has high and low frequencies: pair `i` rotates by the row if
    `i % 3 == 1` and `i < 3 * sections[1]`, by the column if `i % 3 == 2` and `i < 3 * sections[2]`, else by the time.
    Text tokens have three equal positions, for which this equals `rope`.

    Args:
        rope: The frequencies and the layout of pairs.
        sections: Number of pairs that rotate by time, row and column.
        alternating: True if the three alternate.

    Raises:
        ValueError: When the sections are not three numbers whose sum is the number of pairs of `rope`, or they
            alternate and the second or third is too large.
    """

    rope: Rope
    sections: tuple[int, ...]
    alternating: bool = True

    def __post_init__(self):
        half = self.rope.dim // 2
        # Of `half` pairs, (half + 1) // 3 have index 1 modulo 3, and half // 3 have index 2.
        most = (half, (half + 1) // 3, half // 3) if self.alternating else (half,) * 3
        fit = len(self.sections) == 3 and all(0 <= n <= m for n, m in zip(self.sections, most, strict=True))
        if not fit or sum(self.sections) != half:
            raise ValueError(
                f"the sections of M-RoPE (mrope_section) must be three numbers whose sum is the {half} rotary pairs, "
                f"of time, row and column at most {most}, got {self.sections}"
            )

    @property
    def dim(self) -> int:
        """Number of rotary dimensions."""
        return self.rope.dim

    @property
    def interleaved(self) -> bool:
        """Layout of the pairs, as in `Rope`."""
        return self.rope.interleaved

    @property
    def needs_length(self) -> bool:
        """True if the frequencies depend on the length of the sequence, as in `Rope`."""
        return self.rope.needs_length

    @property
    def max_length(self) -> int | None:
        """Number of positions that the model supports, as in `Rope`."""
        return self.rope.max_length

    @property
    def _axes(self) -> np.ndarray:
        """Returns the axis that rotates each pair: 0 is time, 1 row, 2 column."""
        if not self.alternating:
            return np.repeat(np.arange(3), self.sections)
        pair = np.arange(self.rope.dim // 2)
        ends = np.array([0, *self.sections[1:3], 0])[pair % 3]  # [half]: pairs below the end rotate by row or column
        return np.where((pair % 3 > 0) & (pair < 3 * ends), pair % 3, 0)

    def tables(self, positions: Positions, *, length: Lengths | None = None) -> tuple[Table, Table]:
        """Returns the cosine and sine of every pair's angle, as `Rope.tables` does.

        Args:
            positions: `B T 3`, time, row and column of each token; `B T` if the three are equal.
            length: As for `Rope.tables`.

        Raises:
            ValueError: When positions do not have three rows.
        """
        if positions.ndim == 2:
            return self.rope.tables(positions, length=length)
        if positions.shape[2] != 3:
            raise ValueError(
                f"positions must have three rows, time, row and column, `B T 3`, got the shape {positions.shape}; "
                "`nn.vision.mrope_positions` makes them"
            )
        if self.needs_length and length is None:
            length = jnp.max(positions, axis=(1, 2), initial=-1) + 1  # one of the row, not of each axis
        # One table per axis, [B, T, half]; each pair selects its axis.
        tables = [self.rope.tables(positions[:, :, axis], length=length) for axis in range(3)]
        by_row, by_column = (self._axes == 1)[None, None], (self._axes == 2)[None, None]
        cos, sin = (
            jnp.select([by_row, by_column], [row, column], time) for time, row, column in zip(*tables, strict=True)
        )
        return cos, sin


@dataclass(frozen=True)
class AxialRope:
    """Rotary embedding of patches by row and column: half of the pairs rotate by each.

    Unlike `GridRope` it takes rows and columns as positions, so images may have any size. In Qwen's image encoders rows
    and columns have the same frequencies. In Pixtral's (arXiv:2410.07073) they alternate: of the `dim / 2` frequencies,
    rows have those with even indices and columns those with odd indices. In MoonViT (Kimi K2.5) pairs are neighbours,
    which rotate by column and row in turn, with the same frequencies.

    Args:
        dim: Number of rotary dimensions, a multiple of 4.
        theta: Base of the frequencies.
        alternating: True if rows and columns alternate in the frequencies, as in Pixtral.
        interleaved: True if pairs are dimensions `2i` and `2i + 1`, as in MoonViT, instead of `i` and `i + dim / 2`.

    Raises:
        ValueError: When `dim` is not a multiple of 4.
    """

    dim: int
    theta: float = 10_000.0
    alternating: bool = False
    interleaved: bool = False
    needs_length: ClassVar[bool] = False  # as in `Rope`
    max_length: ClassVar[None] = None  # no limit

    def __post_init__(self):
        if self.dim % 4 or self.dim < 1:
            raise ValueError(f"AxialRope.dim must be a multiple of 4 (pairs for rows and for columns), got {self.dim}.")
        if self.alternating and self.interleaved:
            raise ValueError("AxialRope must be alternating or interleaved, not both.")

    def tables(self, positions: Positions, *, length: Lengths | None = None) -> tuple[Table, Table]:
        """Returns the cosine and sine of every pair's angle, as `Rope.tables` does.

        Args:
            positions: `B T 2`, row and column of each patch.
            length: Ignored; present for the signature of `Rope.tables`.
        """
        axis = Rope(self.dim if self.alternating else self.dim // 2, self.theta)
        (cos_y, sin_y), (cos_x, sin_x) = (axis.tables(positions[:, :, n]) for n in range(2))
        if self.alternating:  # [B, T, half] -> [B, T, half / 2]
            cos_y, sin_y, cos_x, sin_x = cos_y[:, :, ::2], sin_y[:, :, ::2], cos_x[:, :, 1::2], sin_x[:, :, 1::2]
        if self.interleaved:  # [B, T, half / 2, 2] -> [B, T, half]
            pairs = (cos_x, cos_y), (sin_x, sin_y)
            cos, sin = (jnp.stack(pair, axis=-1).reshape(*positions.shape[:2], -1) for pair in pairs)
            return cos, sin
        # [B, T, half / 2] by row and by column
        return jnp.concatenate([cos_y, cos_x], axis=-1), jnp.concatenate([sin_y, sin_x], axis=-1)


@dataclass(frozen=True)
class GridRope:
    """Rotary embedding of a square of `side` x `side` patches, numbered row by row (Llama 4's image encoder).

    The first half of the pairs rotates by the patch's column, the second by its row, both counted from 1. Tokens after
    the last patch (a class token) are not rotated.

    Args:
        dim: Number of rotary dimensions, a multiple of 4.
        side: Number of patches along each side of the image.
        theta: Base of the frequencies.
        interleaved: Layout of the pairs, as in `Rope`.

    Raises:
        ValueError: When `dim` is not a multiple of 4 or `side` is below 1.
    """

    dim: int
    side: int
    theta: float = 10_000.0
    interleaved: bool = True
    needs_length: ClassVar[bool] = False  # as in `Rope`
    max_length: ClassVar[None] = None  # no limit

    def __post_init__(self):
        if self.dim % 4 or self.side < 1:
            raise ValueError(
                f"GridRope.dim must be a multiple of 4 (pairs for columns and for rows) and side at least 1, got {self}."
            )

    def tables(
        self, positions: Int[Array, "B T"] | Int[np.ndarray, "B T"], *, length: Lengths | None = None
    ) -> tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]:
        """Returns the cosine and sine of every pair's angle, as `Rope.tables` does.

        Args:
            positions: Index of each patch, counted row by row from 0.
            length: Ignored; present for the signature of `Rope.tables`.
        """
        positions = jnp.asarray(positions)
        inside = positions < self.side**2  # False for a class token: angle 0, no rotation
        column, row = (jnp.where(inside, n + 1, 0) for n in (positions % self.side, positions // self.side))
        axis = Rope(self.dim // 2, self.theta)
        # Two embeddings of dim / 2 dimensions each: [B, T, half / 2] by column and [B, T, half / 2] by row.
        (cos_x, sin_x), (cos_y, sin_y) = axis.tables(column), axis.tables(row)
        return jnp.concatenate([cos_x, cos_y], axis=-1), jnp.concatenate([sin_x, sin_y], axis=-1)
