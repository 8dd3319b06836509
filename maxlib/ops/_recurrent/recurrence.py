"""What the recurrences share: a call and its checks, the inputs of kernels, and their run, on several devices too."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._utils.varying import is_tracked, vary_alike
from maxlib._xla_workarounds import inner, scaled
from maxlib.hardware import current_device
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._axes import require
from maxlib.ops._dispatch import Call, Kernel, Op, Shaped

AxisName = str | tuple[str, ...]
EPS = 1e-6  # added to the squared norm of a query or key
FEW = 8  # tokens up to which the recurrence is faster than a chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentCall(Call):
    """The properties of a call that decide its kernel.

    Args:
        batch: Number B of rows.
        tokens: Number T of tokens in a row.
        key_heads: Heads of keys, or groups of SSD.
        heads: Heads of values.
        key_dim: Rows of a state: the width of keys, or the size of SSD's state.
        value_dim: Columns of a state: the width of values, with those of a transition if the sequence is split.
        l2_norm: True if queries and keys have unit norm.
        tracked: True if JAX tracks the mesh axes that arrays vary over (`jax.shard_map` with `check_vma`).
    """

    batch: int
    tokens: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    l2_norm: bool = True
    tracked: bool = False

    def __str__(self) -> str:
        return (
            f"B={self.batch} T={self.tokens} K={self.key_heads} N={self.heads} Hk={self.key_dim} Hv={self.value_dim} "
            f"{self.dtype} on {self.platform} ({self.device_kind})"
        )


def describe(
    k: Shaped,
    v: Shaped,
    device: tuple[str, str] | None,
    *,
    l2_norm: bool = True,
    with_transition: bool = False,
) -> RecurrentCall:
    """Describes a call.

    Args:
        k: Keys, `B T K Hk`.
        v: Values, `B T N Hv`.
        device: Platform and kind of the device; None for the one in use.
        l2_norm: True if queries and keys have unit norm.
        with_transition: True if a device computes the transition of its part of a split sequence beside its values.
    """
    (B, T, K, Hk), (N, Hv) = k.shape, v.shape[2:]
    platform, device_kind = device or current_device()
    return RecurrentCall(
        batch=B,
        tokens=T,
        key_heads=K,
        heads=N,
        key_dim=Hk,
        value_dim=Hv + Hk if with_transition else Hv,
        dtype=str(v.dtype),
        l2_norm=l2_norm,
        tracked=is_tracked(k, v),
        platform=platform,
        device_kind=device_kind,
    )


def recurrent_op(
    name: str,
    *,
    jax_linear_attention: Callable,
    refuses: Callable,
    chunked: Callable,
    tiles: Callable,
    sequential: Callable,
    others: tuple[Kernel, ...] = (),
) -> Op:
    """Returns the operation with its kernels, in order of preference.

    Decoding has one or a few tokens at a time, so a chunk would be mostly padding: "sequential" comes first there.

    Args:
        name: Name of the operation in errors and warnings.
        jax_linear_attention: Kernels of that package.
        refuses: Function of a call that returns why these cannot run it, or None.
        chunked: The form in matmuls.
        tiles: Its tile sizes, a function of a call.
        sequential: The form token by token.
        others: Kernels to try after those of the package.
    """

    def first(call: RecurrentCall) -> str | None:
        return "sequential" if call.tokens <= FEW else None

    package = "jax_linear_attention"
    kernels = (
        Kernel(
            package,
            jax_linear_attention,
            "kernels of jax-linear-attention for Hopper, in both passes",
            frozenset({"gpu"}),
            refuses=refuses,
        ),
        *others,
        Kernel("chunked", chunked, "chunks of tokens in matmuls, by XLA", tiles=tiles),
        Kernel("sequential", sequential, f"the reference, token by token: the fastest form for up to {FEW} tokens"),
    )
    return Op(name, kernels, first=first, fused=(package,))


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a kernel runs a call.

    Args:
        dtype: Dtype of the values.
        has_starts: True if documents may begin in a row.
        starts_at_zero: True if the state before the first token is zero, and need not be read.
        scale: Factor on the queries.
        l2_norm: True if queries and keys are to have unit norm.
        tiles: Tile sizes of the kernel.
    """

    dtype: Any
    has_starts: bool
    starts_at_zero: bool
    scale: float = 1.0
    l2_norm: bool = False
    tiles: TileSizes | None = None

    @property
    def precision(self) -> jax.lax.Precision:
        """Returns the precision of matmuls in XLA."""
        # Full precision takes six passes of a TPU's matmul unit. Narrow inputs do not need that, but sums over a
        # document need more than one pass.
        narrow = jnp.dtype(self.dtype).itemsize < 4
        return jax.lax.Precision.HIGH if narrow else jax.lax.Precision.HIGHEST


def run_kernel(
    kernel: Kernel,
    settings: Settings,
    x: Any,
    initial_state: Array | None,
    state_shape: tuple[int, ...],
    axis_name: AxisName | None,
    across_devices: Callable,
) -> tuple[Array, Array]:
    """Runs a kernel on this device's tokens, after those of the devices before it if the sequence is split.

    Args:
        kernel: The kernel; it takes the inputs, a state and settings.
        settings: How it runs.
        x: The operation's inputs, a named tuple.
        initial_state: State before the first token; None for zero.
        state_shape: Shape of a state, with heads grouped as in the inputs.
        axis_name: Mesh axis over which the sequence is split; None if it is not.
        across_devices: Function that runs the kernel on a split sequence.
    """
    wide = jnp.promote_types(settings.dtype, jnp.float32)
    state = jnp.zeros(state_shape, wide) if initial_state is None else initial_state.reshape(state_shape).astype(wide)

    def run(x, state):
        return kernel.run(x, state, settings)

    return run(x, state) if axis_name is None else across_devices(run, x, state, axis_name=axis_name)


def token_by_token(step: Callable, x: Any, state: Array) -> tuple[Array, Array]:
    """Applies a recurrence to one token after the other: the reference, and the fastest way to decode.

    Args:
        step: Function of a state and the inputs of a token that returns the new state and the output.
        x: Inputs, a pytree of arrays `B T ...`.
        state: State before the first token.

    Returns:
        The outputs, `B T ...`, and the state after the last token.
    """
    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), x)  # [B, T, ...] -> [T, B, ...]
    tokens, state = vary_alike((tokens, state))
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def without_padding(out: Array, valid: Array | None) -> Array:
    """Sets the outputs of padding to zero."""
    return out if valid is None else jnp.where(valid[:, :, None, None], out, 0)


def check_floating(op: str, **arrays: Array) -> None:
    """Raises ValueError unless the arrays are floating point."""
    for name, x in arrays.items():
        require(op, jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be floating point", x.dtype)


class DeltaInputs(NamedTuple):
    """Inputs of a delta rule for each token.

    The gated delta rule groups value heads by key head; Kimi delta attention has N heads, a decay for each channel of a
    key, and always an array `is_start`.

    Args:
        q: Queries, `B T K Hk`, or `B T N Hk`.
        k: Keys, of the same shape.
        v: Values, `B T K G Hv`, of the G value heads that share a key head, or `B T N Hv`.
        log_decay: Logarithm of the factor on the state, `B T K G`, or `B T N Hk`, float32 or float64.
        beta: Step towards the value, `B T K G`, or `B T N`, float32 or float64.
        is_start: `B T`, True if the state before a token is zero; None if it never is.
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array
    is_start: Any


def normalized(x: DeltaInputs, settings: Settings) -> DeltaInputs:
    """Returns the inputs in float32 or wider, with scaled queries, and queries and keys of unit norm if requested."""
    q, k, v = (a.astype(x.beta.dtype) for a in (x.q, x.k, x.v))
    if settings.l2_norm:
        q, k = _unit(q), _unit(k)
    return x._replace(q=q * settings.scale, k=k, v=v)


def _unit(x: Array) -> Array:
    """Scales each head to unit norm."""
    return scaled(x, jax.lax.rsqrt(inner(x, x) + EPS))


class SSDInputs(NamedTuple):
    """Inputs of state-space duality for each token.

    Args:
        x: Inputs in their own dtype, `B T G R P`, for the R heads that share a group.
        b: Input projections of the state, in their own dtype, `B T G S`.
        c: Output projections of the state, in their own dtype, `B T G S`.
        dt: Steps, float32 or float64, `B T G R`.
        log_decay: Logarithm of the factor on the state, float32 or float64, `B T G R`.
        is_start: `B T`, True if the state before a token is zero.
    """

    x: Array
    b: Array
    c: Array
    dt: Array
    log_decay: Array
    is_start: Array

    @property
    def stepped(self) -> Array:
        """Inputs times their steps, in the dtype of the steps."""
        return self.dt[..., None] * self.x.astype(self.dt.dtype)


def delta_across_devices(run: Callable, x: Any, state: Array, *, axis_name: AxisName) -> tuple[Array, Array]:
    """Applies a delta rule to this device's tokens, after those of the devices before it.

    A part updates a state by an affine map, `S -> M S + L`. Devices gather `Hk (Hk + Hv)` numbers per head.

    Args:
        run: A kernel, a function of inputs and a state.
        x: Inputs of this device's tokens, a named tuple with the values as `v`.
        state: State before the first token of the first device.
        axis_name: Mesh axis over which the sequence is split.

    Returns:
        The outputs of this device's tokens, and the state after the last token of the last device.
    """

    def join(state, part):
        local, transition = part
        return jnp.einsum("...de,...ev->...dv", transition, state, precision="highest") + local, state

    before, last = _pass_on(join, state, _effect(run, x, state), axis_name)  # [B, K, G, Hk, Hv]
    return run(x, before)[0], last


def _effect(run: Callable, x: Any, like: Array) -> tuple[Array, Array]:
    """Returns the state `L` after this device's tokens from a zero state, and their transition `M`.

    One run gives both: for a second set of values, all zero, the state starts as the identity and ends as `M`.
    """
    width, key_dim = like.shape[-1], like.shape[-2]
    values = jnp.concatenate([x.v, jnp.zeros((*x.v.shape[:-1], key_dim), x.v.dtype)], axis=-1)
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=like.dtype), (*like.shape[:-1], key_dim))
    _, both = run(x._replace(v=values), jnp.concatenate([jnp.zeros_like(like), identity], axis=-1))
    return both[..., :width], both[..., width:]


def ssd_across_devices(run: Callable, x: Any, state: Array, *, axis_name: AxisName) -> tuple[Array, Array]:
    """Applies state-space duality to this device's tokens, after those of the devices before it.

    A part updates a state by `S -> m S + L` with one number m per head. Each device computes its outputs and L from a
    zero state, and adds the contribution of the state before its part to the outputs.

    Args:
        run: A kernel, a function of inputs and a state.
        x: Inputs of this device's tokens.
        state: State before the first token of the first device, `B G R P S`.
        axis_name: Mesh axis over which the sequence is split.

    Returns:
        The outputs of this device's tokens, and the state after the last token of the last device.
    """
    out, local = run(x, jnp.zeros_like(state))
    # The decay from the state before this part to each of its tokens, [B, T, G, R]; 0 once a document has begun.
    first = jnp.cumsum(x.is_start, axis=1)[:, :, None, None] == 0
    into = jnp.exp(jnp.where(first, jnp.cumsum(x.log_decay, axis=1), -jnp.inf))

    def join(state, part):
        local, decay = part
        return decay[..., None, None] * state + local, state

    before, last = _pass_on(join, state, (local, into[:, -1]), axis_name)  # [B, G, R, P, S]
    read = jnp.einsum("btgs,bgrps->btgrp", x.c.astype(before.dtype), before, precision="highest")
    return out + into[..., None] * read, last


def _pass_on(join: Callable, state: Array, effect: Any, axis_name: AxisName) -> tuple[Array, Array]:
    """Returns the state before this device's part, and the state after the last part."""
    last, before = jax.lax.scan(join, state, jax.lax.all_gather(effect, axis_name))
    return jax.lax.dynamic_index_in_dim(before, jax.lax.axis_index(axis_name), keepdims=False), last
