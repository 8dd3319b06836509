"""State-space duality (Mamba-2; Dao & Gu 2024, arXiv:2405.21060): its public function and its kernels.

Within a chunk of C tokens, A is the running sum of log decays, and `D[i, j] = exp(A[i] - A[j])` for j <= i in the same
document, else 0. With u = dt x:

    S <- exp(A[C]) S + (exp(A[C] - A) u)^T b,  y = (c b^T D) u + exp(A) S c, with the S before

The first product of y is masked attention without a softmax; the rest depends on the previous chunk. A block computes
what its chunks add to the state at once, then passes the state through them.

Shapes: n chunks of a block, B rows, C tokens of a chunk, G groups, R heads of each, P wide, S the size of b and c.
"""

import dataclasses
import functools
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib._xla_workarounds import for_each_token
from maxlib.hardware import explained_device
from maxlib.ops._axes import check_axes, require
from maxlib.ops._cost import register_flops
from maxlib.ops._dispatch import Choice, Explanation, Shaped
from maxlib.ops._recurrent import jax_linear_attention, mosaic_tpu
from maxlib.ops._recurrent.chunks import (
    ChunkTiles,
    count_starts,
    decays,
    for_each_head,
    in_blocks,
    in_chunks,
    joined,
    over_blocks,
)
from maxlib.ops._recurrent.recurrence import (
    AxisName,
    RecurrentCall,
    Settings,
    SSDInputs,
    check_floating,
    describe,
    recurrent_op,
    run_kernel,
    ssd_across_devices,
    token_by_token,
    without_padding,
)

_HEADS = (2, 1, 1, 2, 2, 0)  # axes of heads in each of `SSDInputs`


def ssd(
    x: Float[Array, "B T N P"],
    dt: Float[Array, "B T N"],
    a: Float[Array, " N"],
    b: Float[Array, "B T G S"],
    c: Float[Array, "B T G S"],
    *,
    d: Float[Array, " N"] | None = None,
    is_start: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    initial_state: Float[Array, "B N P S"] | None = None,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P S"]]:
    """Computes the recurrence of Mamba-2 by state-space duality (Dao & Gu 2024, arXiv:2405.21060).

    For each head and token: `S <- exp(dt a) S + dt x b^T`, `y = S c + d x`. The state is float32 (float64 for float64
    inputs), whatever the dtype of the inputs.

    Args:
        x: Inputs, N heads of width P.
        dt: Step of each token, at least 0 (after softplus).
        a: Decay rate of each head, at most 0 (after `-exp`).
        b: Input projections of the state, G groups, each shared by N / G consecutive heads.
        c: Output projections of the state, G groups as for `b`.
        d: Skip connection: factor of each head on its input, added to the output; None adds nothing.
        is_start: True for the first token of a document, before which the state is set to zero; None if every row
            continues `initial_state` (`nn.Context.is_start`).
        valid: False for padding, which does not change the state and outputs zero; None if every token is real.
        initial_state: State before the first token; None for zero.
        axis_name: Mesh axis over which the sequence is split, inside `jax.shard_map`; devices hold consecutive parts.
        implementation: "sequential", token by token; "chunked", in matmuls; "jax_linear_attention", kernels for Hopper
            GPUs of that package; "mosaic_tpu", kernels for TPUs. None chooses the fastest; `explain_ssd`
            shows which one and why.

    Returns:
        The output, in the dtype of `x`, and the state after the last real token, for the next call.

    Raises:
        ValueError: When shapes do not agree, or the named implementation does not exist or cannot run the call.
    """
    _check(x, dt, a, b, c, d, is_start, valid, initial_state)
    choice = SSD.choose(describe(b, x, None), implementation)
    return _ssd(x, b, c, dt, a, d, is_start, valid, initial_state, axis_name=axis_name, choice=choice)


def explain_ssd(
    x: Shaped,
    b: Shaped,
    *,
    implementation: str | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `ssd` would run for these arguments, and why.

    Args:
        x: Inputs, `B T N P`, an array or a `jax.ShapeDtypeStruct`.
        b: Input projections of the state, `B T G S`, likewise.
        implementation: As in `ssd`.
        device: Platform, and jax's `device_kind` or a short name, such as `("gpu", "H100")`; default: the device in
            use.

    Returns:
        An `Explanation`, which prints as a readable text. `chosen` is None if the named one cannot run the call.

    Raises:
        ValueError: When no implementation has this name, or the device is unknown.
    """
    return SSD.explain(describe(b, x, explained_device(device)), implementation)


def _flops(x, b, *_) -> float:
    """Counts the FLOPs of the chunked form's matmuls, including masked halves, for every implementation."""
    (B, T, N, P), (G, S) = x.shape, b.shape[2:]
    size = min(SSDTiles().chunk, T)
    # Per token: scores, per group; outputs within the chunk; reads of the state, and its update.
    return 2.0 * B * T * (G * size * S + N * (size * P + 2 * P * S))


@register_flops(_flops, static=("axis_name", "choice"), name="ssd")
def _ssd(x, b, c, dt, a, d, is_start, valid, initial_state, *, axis_name, choice: Choice):
    (B, _, N, P), (G, S) = x.shape, b.shape[2:]
    inputs = _prepare(x, b, c, dt, a, is_start, valid)
    # A part of a split sequence also starts from zero; `ssd_across_devices` adds what comes from the parts before it.
    starts_at_zero = initial_state is None or axis_name is not None
    settings = Settings(x.dtype, is_start is not None, starts_at_zero, tiles=choice.tiles)
    kernel, shape = SSD[choice.kernel], (B, G, N // G, P, S)
    out, state = run_kernel(kernel, settings, inputs, initial_state, shape, axis_name, ssd_across_devices)
    out, wide = out.reshape(x.shape), inputs.dt.dtype
    if d is not None:
        out = out + d.astype(wide)[None, None, :, None] * x.astype(wide)
    return without_padding(out.astype(x.dtype), valid), state.reshape(B, N, P, S)


def _prepare(x, b, c, dt, a, is_start, valid) -> SSDInputs:
    """Returns the inputs with heads grouped, and rates in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dt, a = dt.astype(wide), a.astype(wide)
    if valid is not None:
        # A step of zero does not change the state.
        dt = jnp.where(valid[:, :, None], dt, 0.0)
    # [B, T, N, ...] -> [B, T, G, R, ...]
    rates = dt, dt * for_each_token(a, dt.shape)
    x, dt, log_decay = (y.reshape(*y.shape[:2], b.shape[2], -1, *y.shape[3:]) for y in (x, *rates))
    starts = jnp.zeros(x.shape[:2], bool) if is_start is None else is_start
    return SSDInputs(x, b, c, dt, log_decay, starts)


def _check(x, dt, a, b, c, d, is_start, valid, initial_state) -> None:
    op = "ssd"
    check_floating(op, x=x, b=b, c=c)
    sizes = check_axes(
        op,
        x=(x, "B T N P"),
        b=(b, "B T G S"),
        c=(c, "B T G S"),
        dt=(dt, "B T N"),
        a=(a, "N"),
        d=(d, "N"),
        is_start=(is_start, "B T"),
        valid=(valid, "B T"),
        initial_state=(initial_state, "B N P S"),
    )
    G, N = sizes["G"], sizes["N"]
    require(op, G > 0 and N % G == 0, "the N heads must be a multiple of the G groups", f"N={N} and G={G}")
    require(op, sizes["T"] > 0, "there must be at least one token", "T=0")


# ---------------------------------------------------------------------------------------------- chunk by chunk


@dataclasses.dataclass(frozen=True)
class SSDTiles(ChunkTiles):
    """Tokens of a chunk and of a block of `chunked`."""

    kernel: ClassVar[str] = "ssd/chunked"


def ssd_tiles(call: RecurrentCall) -> SSDTiles:
    """Chooses tile sizes: on TPUs one chunk a block, as wide as their matmul units, else the default."""
    return SSDTiles(128, 128) if call.platform == "tpu" else SSDTiles()


def chunked(x: SSDInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence chunk by chunk.

    Args:
        x: Inputs of each token, rates in float32 or float64.
        state: State before the first token, `B G R P S`.
        settings: How it runs; its tiles are `SSDTiles`.

    Returns:
        The outputs, `B T G R P`, and the state after the last token.
    """
    tokens, tiles = x.x.shape[1], cast(SSDTiles, settings.tiles)
    size = min(tiles.chunk, tokens)
    blocks, per_block = tiles.count(tokens, size)
    xs: SSDInputs = jax.tree.map(lambda a: in_blocks(a, blocks, per_block * size), x)
    xs = xs._replace(is_start=count_starts(xs.is_start, size))
    block = functools.partial(_block, size=size, precision=settings.precision)
    return over_blocks(block, xs, state, tokens)


def _block(state: Array, x: SSDInputs, *, size: int, precision: jax.lax.Precision) -> tuple[Array, Array]:
    """Computes the state after one block and its outputs, `B t G R P`."""
    dot = functools.partial(jnp.einsum, precision=precision)
    x = SSDInputs(*(in_chunks(a, heads, size) for a, heads in zip(x, _HEADS, strict=True)))
    b, c, u = x.b.astype(state.dtype), x.c.astype(state.dtype), x.stepped
    # u is `n B G R C P`, b and c are `n B G C S`, rates are `n B G R C`, `is_start` counts starts, `n B C`.
    decay, into, out_of, across = decays(x.log_decay, x.is_start)
    # (exp(A[C] - A) u)^T b: what each chunk adds to the state, `n B G R P S`.
    added = dot("nbgrip,nbgis->nbgrps", out_of[..., None] * u, b)
    state, before = jax.lax.scan(_pass_on, state, (across, added))
    scores = for_each_head(dot("nbgis,nbgjs->nbgij", c, b), u.shape[3])
    within = dot("nbgrij,nbgrjp->nbgrip", scores * decay, u)
    return state, joined(within + into[..., None] * dot("nbgis,nbgrps->nbgrip", c, before), 2)


def _pass_on(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the states after and before a chunk."""
    across, added = chunk
    return across[..., None, None] * state + added, state


# ---------------------------------------------------------------------------------------------- token by token


def sequential(x: SSDInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence to one token after the other; arguments and results are those of `chunked`."""
    return token_by_token(_step, x, state)


def _step(state: Array, x: SSDInputs) -> tuple[Array, Array]:
    """Updates the state with one token, and reads it."""
    # exp(dt a), or 0 at the start of a document. [B, G, R] -> [B, G, R, 1, 1]
    decay = jnp.where(x.is_start[:, None, None], 0.0, jnp.exp(x.log_decay))[..., None, None]
    # S <- exp(dt a) S + (dt x) b^T: [B, G, R, P, 1] [B, G, 1, 1, S]
    b, c = x.b.astype(state.dtype), x.c.astype(state.dtype)
    state = decay * state + x.stepped[..., None] * b[:, :, None, None, :]
    # y = S c
    return state, jnp.einsum("bgrps,bgs->bgrp", state, c, precision="highest")


SSD = recurrent_op(
    "ssd",
    jax_linear_attention=jax_linear_attention.ssd,
    refuses=jax_linear_attention.refuses_ssd,
    chunked=chunked,
    tiles=ssd_tiles,
    sequential=sequential,
    others=(mosaic_tpu.kernel(mosaic_tpu.ssd),),
)
