"""Kimi delta attention: its public function, its form token by token, and its kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib._utils.varying import vary_alike
from maxlib.hardware import explained_device
from maxlib.ops._cost import register_flops
from maxlib.ops._dispatch import Choice, Explanation, Shaped
from maxlib.ops._recurrent import jax_linear_attention
from maxlib.ops._recurrent.across_devices import delta_across_devices
from maxlib.ops._recurrent.delta_inputs import DeltaInputs, check_inputs, normalized, prepare
from maxlib.ops._recurrent.kimi_delta_chunked import KimiTiles, chunked, kimi_tiles
from maxlib.ops._recurrent.recurrence import (
    AxisName,
    Settings,
    describe,
    recurrent_op,
    run_kernel,
    without_padding,
)


def kimi_delta_attention(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B T N Hk"],
    v: Float[Array, "B T N Hv"],
    log_decay: Float[Array, "B T N Hk"],
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
    """Computes Kimi delta attention (Kimi Team 2025, arXiv:2510.26692), a gated delta rule with a decay per channel.

    For each head and token: `S <- diag(exp(log_decay)) S`, `S <- S + k (beta (v - k^T S))^T`, `o = q^T S`. The state is
    float32 (float64 for float64 inputs), whatever the dtype of the inputs.

    Args:
        q: Queries, N heads.
        k: Keys, N heads.
        v: Values, N heads of any width.
        log_decay: Logarithm of the factor on each row of the state, at most 0.
        beta: Step towards the value, in [0, 1].
        is_start: True for the first token of a document, before which the state is set to zero; None if every row
            continues `initial_state` (`nn.Context.is_start`).
        valid: False for padding, which leaves the state as it is and has the output zero; None if every token is real.
        initial_state: State before the first token; None for zero.
        scale: Factor on the queries; default `Hk ** -0.5`.
        l2_norm: Divide each head of `q` and `k` by its length, with 1e-6 added to its square.
        axis_name: Mesh axis over which the sequence is split, inside `jax.shard_map`; devices hold consecutive parts.
        implementation: "sequential", token by token; "chunked", in matmuls; "jax_linear_attention", kernels for Hopper
            GPUs of that package. None chooses the fastest; `explain_kimi_delta_attention` shows which one and why.

    Returns:
        The output, in the dtype of `v`, and the state after the last real token, for the next call.

    Raises:
        ValueError: When shapes do not agree, or the named implementation does not exist or cannot run the call.
    """
    check_inputs("kimi_delta_attention", q, k, v, log_decay, beta, is_start, valid, initial_state, by_channel=True)
    choice = KIMI_DELTA.choose(describe(k, v, None, with_transition=axis_name is not None), implementation)
    return _kimi_delta_attention(
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


def explain_kimi_delta_attention(
    q: Shaped,
    v: Shaped,
    *,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `kimi_delta_attention` would run for these arguments, and why.

    Args:
        q: Queries, `B T N Hk`, an array or a `jax.ShapeDtypeStruct`.
        v: Values, `B T N Hv`, likewise.
        axis_name: As in `kimi_delta_attention`.
        implementation: As in `kimi_delta_attention`.
        device: Platform, and jax's `device_kind` or a short name, such as `("gpu", "H100")`; default: the device in
            use.

    Returns:
        An `Explanation`, which prints as a readable text. `chosen` is None if the named one cannot run the call.

    Raises:
        ValueError: When no implementation has this name, or the device is unknown.
    """
    call = describe(q, v, explained_device(device), with_transition=axis_name is not None)
    return KIMI_DELTA.explain(call, implementation)


def _flops(q, k, v, *_) -> float:
    """Counts the FLOPs of the chunked form's matmuls, including masked halves, for every implementation."""
    (B, T, N, Hk), Hv = q.shape, v.shape[-1]
    size = min(KimiTiles().chunk, T)
    # Per token: products of keys and of queries; the solutions U and W, and outputs within the chunk; reads of the
    # state by W and by queries, and its update.
    return 2.0 * B * T * N * (2 * size * Hk + size * (Hk + 2 * Hv) + 3 * Hk * Hv)


@register_flops(_flops, static=("scale", "l2_norm", "axis_name", "choice"), name="kimi_delta_attention")
def _kimi_delta_attention(
    q, k, v, log_decay, beta, is_start, valid, initial_state, *, scale, l2_norm, axis_name, choice: Choice
):
    (B, _, N, Hk), Hv = q.shape, v.shape[-1]
    starts = jnp.zeros(q.shape[:2], bool) if is_start is None else is_start
    x = prepare(q, k, v, log_decay, beta, starts, valid)
    starts_at_zero = initial_state is None and axis_name is None
    settings = Settings(v.dtype, is_start is not None, starts_at_zero, scale, l2_norm, choice.tiles)
    kernel, shape = KIMI_DELTA[choice.kernel], (B, N, Hk, Hv)
    out, state = run_kernel(kernel, settings, x, initial_state, shape, axis_name, delta_across_devices)
    return without_padding(out.astype(v.dtype), valid), state


# ---------------------------------------------------------------------------------------------- token by token


def sequential(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence to one token after the other: the reference, and the fastest way to decode.

    Args:
        x: Inputs of each token; queries and keys not yet scaled or normalized.
        state: State before the first token, `B N Hk Hv`.
        settings: How it runs.

    Returns:
        The outputs, `B T N Hv`, and the state after the last token.
    """
    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), normalized(x, settings))  # [B, T, ...] -> [T, B, ...]
    tokens, state = vary_alike((tokens, state))
    state, out = jax.lax.scan(_step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def _step(state: Array, x: DeltaInputs) -> tuple[Array, Array]:
    """Updates the state with one token, and reads it."""
    # S <- diag(exp(g)) S, or 0 at the start of a document. [B, N, Hk] -> [B, N, Hk, 1]
    decay = jnp.where(x.is_start[:, None, None], 0.0, jnp.exp(x.log_decay))
    state = decay[..., None] * state
    # S <- S + k (beta (v - k^T S))^T: move the value stored under k towards v by beta.
    stored = jnp.einsum("bnd,bndv->bnv", x.k, state, precision="highest")
    delta = x.beta[..., None] * (x.v - stored)
    state = state + x.k[..., None] * delta[..., None, :]
    # o = q^T S
    return state, jnp.einsum("bnd,bndv->bnv", x.q, state, precision="highest")


KIMI_DELTA = recurrent_op(
    "kimi_delta_attention",
    jax_linear_attention=jax_linear_attention.kimi_delta,
    refuses=jax_linear_attention.refuses_kimi_delta,
    chunked=chunked,
    tiles=kimi_tiles,
    sequential=sequential,
)
