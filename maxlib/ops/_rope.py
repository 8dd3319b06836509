"""Rotary position embeddings: a specification, its cosine and sine tables, and the rotation itself.

A `Rope` defines the angle of each pair of dimensions at each position. It is small, frozen and hashable, so layers
that share a specification share its tables. Pairs are laid out as in the published weights and never permuted:
half-split pairs dimension `i` with `i + R/2` (Hugging Face), interleaved pairs `2i` with `2i + 1` (the paper, DeepSeek,
Llama 4).
"""

import contextlib
from dataclasses import dataclass

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
