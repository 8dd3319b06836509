"""The gated delta rule, with a decay for each head, or for each channel of a key (Kimi delta attention)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib.hardware import explained_device
from maxlib.ops._axes import check_axes, require
from maxlib.ops._cost import register_flops
from maxlib.ops._dispatch import Choice, Explanation, Op, Shaped
from maxlib.ops._recurrent.gated_delta import GATED_DELTA, DeltaTiles
from maxlib.ops._recurrent.kimi_delta import KIMI_DELTA
from maxlib.ops._recurrent.recurrence import (
    AxisName,
    DeltaInputs,
    Settings,
    check_floating,
    delta_across_devices,
    describe,
    run_kernel,
    without_padding,
)


def gated_delta_rule(
    q: Float[Array, "B T K Hk"],
    k: Float[Array, "B T K Hk"],
    v: Float[Array, "B T N Hv"],
    log_decay: Float[Array, "B T N"] | Float[Array, "B T N Hk"],
    beta: Float[Array, "B T N"],
    *,
    is_start: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    initial_state: Float[Array, "B N Hk Hv"] | None = None,
    scale: float | None = None,
    l2_norm: bool = True,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N Hk Hv"]]:
    """Computes the gated delta rule (Yang et al. 2024, arXiv:2412.06464), linear attention with a matrix as state.

    For each value head and token: `S <- exp(log_decay) S`, `S <- S + k (beta (v - k^T S))^T`, `o = q^T S`. The state is
    float32 (float64 for float64 inputs), whatever the dtype of the inputs. With a decay for each channel of a key, a
    row of S, it is Kimi delta attention (Kimi Team 2025, arXiv:2510.26692), whose K is N.

    Args:
        q: Queries, K heads.
        k: Keys, K heads; each is shared by N / K consecutive value heads.
        v: Values, N heads of any width.
        log_decay: Logarithm of the factor on the state, or on each of its rows, at most 0.
        beta: Step towards the value, in [0, 1], or in [0, 2] to allow negative eigenvalues.
        is_start: True for the first token of a document, before which the state is set to zero; None if every row
            continues `initial_state` (`nn.Context.is_start`).
        valid: False for padding, which does not change the state and outputs zero; None if every token is real.
        initial_state: State before the first token; None for zero.
        scale: Factor on the queries; default `Hk ** -0.5`.
        l2_norm: True divides each head of `q` and `k` by its L2 norm, with 1e-6 added to the squared norm.
        axis_name: Mesh axis over which the sequence is split, inside `jax.shard_map`; devices hold consecutive parts.
        implementation: "sequential", token by token; "chunked", in matmuls; "jax_linear_attention", kernels for Hopper
            GPUs of that package; "mosaic_tpu", kernels for TPUs. None chooses the fastest; `explain_gated_delta_rule`
            shows which one and why.

    Returns:
        The output, in the dtype of `v`, and the state after the last real token, for the next call.

    Raises:
        ValueError: When shapes do not agree, or the named implementation does not exist or cannot run the call.
    """
    _check(q, k, v, log_decay, beta, is_start, valid, initial_state)
    call = describe(k, v, None, l2_norm=l2_norm, with_transition=axis_name is not None)
    choice = _op(by_channel=log_decay.ndim == 4).choose(call, implementation)
    return _gated_delta_rule(
        q,
        k,
        v,
        log_decay,
        beta,
        is_start,
        valid,
        initial_state,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        l2_norm=l2_norm,
        axis_name=axis_name,
        choice=choice,
    )


def explain_gated_delta_rule(
    q: Shaped,
    v: Shaped,
    *,
    by_channel: bool = False,
    l2_norm: bool = True,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `gated_delta_rule` would run for these arguments, and why.

    Args:
        q: Queries, `B T K Hk`, an array or a `jax.ShapeDtypeStruct`.
        v: Values, `B T N Hv`, likewise.
        by_channel: True if each channel of a key has its own decay.
        l2_norm: As in `gated_delta_rule`.
        axis_name: As in `gated_delta_rule`.
        implementation: As in `gated_delta_rule`.
        device: Platform, and jax's `device_kind` or a short name, such as `("tpu", "v5p")`; default: the device in use.

    Returns:
        An `Explanation`, which prints as a readable text. `chosen` is None if the named one cannot run the call.

    Raises:
        ValueError: When no implementation has this name, or the device is unknown.
    """
    device = explained_device(device)
    call = describe(q, v, device, l2_norm=l2_norm, with_transition=axis_name is not None)
    return _op(by_channel=by_channel).explain(call, implementation)


def _op(*, by_channel: bool) -> Op:
    """Returns the table of kernels."""
    return KIMI_DELTA if by_channel else GATED_DELTA


def _flops(q, k, v, *_) -> float:
    """Counts the FLOPs of the chunked form's matmuls, including masked halves, for every implementation."""
    (B, T, K, Hk), (N, Hv) = q.shape, v.shape[2:]
    size = min(DeltaTiles().chunk, T)
    # Per token: scores of keys and queries, per key head; the solutions U and W, and outputs within the chunk; reads
    # of the state by W and by queries, and its update.
    return 2.0 * B * T * (K * 2 * size * Hk + N * (size * (Hk + 2 * Hv) + 3 * Hk * Hv))


@register_flops(_flops, static=("scale", "l2_norm", "axis_name", "choice"), name="gated_delta_rule")
def _gated_delta_rule(
    q, k, v, log_decay, beta, is_start, valid, initial_state, *, scale, l2_norm, axis_name, choice: Choice
):
    (B, T, K, Hk), (N, Hv), by_channel = q.shape, v.shape[2:], log_decay.ndim == 4
    starts = jnp.zeros((B, T), bool) if by_channel and is_start is None else is_start
    x = _prepare(q, k, v, log_decay, beta, starts, valid)
    shape = (B, N, Hk, Hv) if by_channel else (B, K, N // K, Hk, Hv)
    x = x if by_channel else _by_key_head(x)
    starts_at_zero = initial_state is None and axis_name is None
    settings = Settings(v.dtype, is_start is not None, starts_at_zero, scale, l2_norm, choice.tiles)
    kernel = _op(by_channel=by_channel)[choice.kernel]
    out, state = run_kernel(kernel, settings, x, initial_state, shape, axis_name, delta_across_devices)
    return without_padding(out.reshape(v.shape).astype(v.dtype), valid), state.reshape(B, N, Hk, Hv)


def _by_key_head(x: DeltaInputs) -> DeltaInputs:
    """Groups value heads by key head: `B T N ...` to `B T K G ...`."""
    v, log_decay, beta = (a.reshape(*a.shape[:2], x.k.shape[2], -1, *a.shape[3:]) for a in (x.v, x.log_decay, x.beta))
    return x._replace(v=v, log_decay=log_decay, beta=beta)


def _check(q, k, v, log_decay, beta, is_start, valid, initial_state) -> None:
    op, by_channel = "gated_delta_rule", log_decay.ndim == 4
    check_floating(op, q=q, k=k, v=v)
    sizes = check_axes(
        op,
        q=(q, "B T K Hk"),
        k=(k, "B T K Hk"),
        v=(v, "B T N Hv"),
        log_decay=(log_decay, "B T N Hk" if by_channel else "B T N"),
        beta=(beta, "B T N"),
        is_start=(is_start, "B T"),
        valid=(valid, "B T"),
        initial_state=(initial_state, "B N Hk Hv"),
    )
    K, N = sizes["K"], sizes["N"]
    require(op, K == N or not by_channel, "a decay by channel needs a key head for each value head", f"N={N} and K={K}")
    require(op, K > 0 and N % K == 0, "the N value heads must be a multiple of the K key heads", f"N={N} and K={K}")
    require(op, sizes["T"] > 0, "there must be at least one token", "T=0")


def _prepare(q, k, v, log_decay, beta, is_start, valid) -> DeltaInputs:
    """Returns the inputs with rates in float32 or wider, and padding that does not change the state."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    log_decay, beta = log_decay.astype(wide), beta.astype(wide)
    if valid is not None:
        # A token with a log decay of 0 and a step of 0 does not change the state.
        log_decay = jnp.where(valid.reshape(*valid.shape, *[1] * (log_decay.ndim - 2)), log_decay, 0.0)
        beta = jnp.where(valid[:, :, None], beta, 0.0)
    return DeltaInputs(q, k, v, log_decay, beta, is_start)
