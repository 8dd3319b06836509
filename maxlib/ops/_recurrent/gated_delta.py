"""The gated delta rule: its public function, its form token by token, and its kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib._utils.varying import vary_alike
from maxlib._xla_workarounds import inner, stored
from maxlib.hardware import explained_device
from maxlib.ops._cost import register_flops
from maxlib.ops._dispatch import Choice, Explanation, Shaped
from maxlib.ops._recurrent import jax_linear_attention
from maxlib.ops._recurrent.across_devices import delta_across_devices
from maxlib.ops._recurrent.chunks import for_each_head
from maxlib.ops._recurrent.delta_inputs import DeltaInputs, check_inputs, normalized, prepare
from maxlib.ops._recurrent.gated_delta_chunked import DeltaTiles, chunked, delta_tiles
from maxlib.ops._recurrent.recurrence import (
    AxisName,
    Settings,
    describe,
    recurrent_op,
    run_kernel,
    without_padding,
)


def gated_delta_rule(
    q: Float[Array, "B T K Hk"],
    k: Float[Array, "B T K Hk"],
    v: Float[Array, "B T N Hv"],
    log_decay: Float[Array, "B T N"],
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
    float32 (float64 for float64 inputs), whatever the dtype of the inputs.

    Args:
        q: Queries, K heads.
        k: Keys, K heads; each is shared by N / K consecutive value heads.
        v: Values, N heads of any width.
        log_decay: Logarithm of the factor on the state, at most 0.
        beta: Step towards the value, in [0, 1], or in [0, 2] to allow negative eigenvalues.
        is_start: True for the first token of a document, before which the state is set to zero; None if every row
            continues `initial_state` (`nn.Context.is_start`).
        valid: False for padding, which does not change the state and outputs zero; None if every token is real.
        initial_state: State before the first token; None for zero.
        scale: Factor on the queries; default `Hk ** -0.5`.
        l2_norm: True divides each head of `q` and `k` by its L2 norm, with 1e-6 added to the squared norm.
        axis_name: Mesh axis over which the sequence is split, inside `jax.shard_map`; devices hold consecutive parts.
        implementation: "sequential", token by token; "chunked", in matmuls; "jax_linear_attention", kernels for Hopper
            GPUs of that package. None chooses the fastest; `explain_gated_delta_rule` shows which one and why.

    Returns:
        The output, in the dtype of `v`, and the state after the last real token, for the next call.

    Raises:
        ValueError: When shapes do not agree, or the named implementation does not exist or cannot run the call.
    """
    check_inputs("gated_delta_rule", q, k, v, log_decay, beta, is_start, valid, initial_state, by_channel=False)
    call = describe(k, v, None, l2_norm=l2_norm, with_transition=axis_name is not None)
    choice = GATED_DELTA.choose(call, implementation)
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
    l2_norm: bool = True,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `gated_delta_rule` would run for these arguments, and why.

    Args:
        q: Queries, `B T K Hk`, an array or a `jax.ShapeDtypeStruct`.
        v: Values, `B T N Hv`, likewise.
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
    return GATED_DELTA.explain(call, implementation)


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
    (B, _, K, Hk), (N, Hv) = q.shape, v.shape[2:]
    x = _by_key_head(prepare(q, k, v, log_decay, beta, is_start, valid))
    starts_at_zero = initial_state is None and axis_name is None
    settings = Settings(v.dtype, is_start is not None, starts_at_zero, scale, l2_norm, choice.tiles)
    kernel, shape = GATED_DELTA[choice.kernel], (B, K, N // K, Hk, Hv)
    out, state = run_kernel(kernel, settings, x, initial_state, shape, axis_name, delta_across_devices)
    return without_padding(out.reshape(v.shape).astype(v.dtype), valid), state.reshape(B, N, Hk, Hv)


def _by_key_head(x: DeltaInputs) -> DeltaInputs:
    """Groups value heads by key head: `B T N ...` to `B T K G ...`."""
    v, log_decay, beta = (a.reshape(*a.shape[:2], x.k.shape[2], -1, *a.shape[3:]) for a in (x.v, x.log_decay, x.beta))
    return x._replace(v=v, log_decay=log_decay, beta=beta)


# ---------------------------------------------------------------------------------------------- token by token


def sequential(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence to one token after the other: the reference, and the fastest way to decode.

    Args:
        x: Inputs of each token; queries and keys not yet scaled or normalized.
        state: State before the first token, `B K G Hk Hv`.
        settings: How it runs.

    Returns:
        The outputs, `B T K G Hv`, and the state after the last token.
    """
    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), normalized(x, settings))  # [B, T, ...] -> [T, B, ...]
    tokens, state = vary_alike((tokens, state))
    state, out = jax.lax.scan(_step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def _step(state: Array, x: DeltaInputs) -> tuple[Array, Array]:
    """Reads the state with one token, and updates it."""
    # exp(g), or 0 at the start of a document. [B, K, G] -> [B, K, G, 1, 1]
    decay = jnp.exp(x.log_decay)
    decay = decay if x.is_start is None else jnp.where(x.is_start[:, None, None], 0.0, decay)
    decay = decay[..., None, None]
    # Key and query read the old state at once, exp(g) k^T S and exp(g) q^T S: a step passes over the state twice, once
    # to read and once to write. [B, K, G, 2, Hk] [B, K, G, Hk, Hv] -> [B, K, G, 2, Hv]
    both = stored(jnp.stack([x.k, x.q], axis=2))  # B K 2 Hk
    k, q = both[:, :, 0], both[:, :, 1]
    rows = for_each_head(both[None], state.shape[2])[0]
    read = decay * jnp.einsum("bkgrd,bkgdv->bkgrv", rows, state, precision="highest")
    by_key, by_query = read[..., 0, :], read[..., 1, :]
    # S <- exp(g) S + k (beta (v - exp(g) k^T S))^T: the value stored under k moves towards v by beta.
    delta = stored(x.beta[..., None] * (x.v - by_key))
    state = decay * state + k[:, :, None, :, None] * delta[..., None, :]
    # o = q^T S = exp(g) q^T S_old + (q^T k) delta
    return state, by_query + inner(q, k)[:, :, None, None] * delta


GATED_DELTA = recurrent_op(
    "gated_delta_rule",
    jax_linear_attention=jax_linear_attention.gated_delta,
    refuses=jax_linear_attention.refuses_gated_delta,
    chunked=chunked,
    tiles=delta_tiles,
    sequential=sequential,
)
