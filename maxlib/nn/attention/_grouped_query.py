"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); multi-head and multi-query attention are special
cases.

Shapes: B rows, T new tokens, S keys, D width, N query heads, K key heads, H head dimension (Hk of keys, Hv of values).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import ops
from maxlib.kernels.attention.merge import merge_parts
from maxlib.nn._linear import Einsum, of_same
from maxlib.nn.cache import AttentionCache, SharedKV, kv_cache
from maxlib.nn.decoder._context import AnyRope, Context, check_prefix, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import Clip
from maxlib.nn.remat import mark_heads
from maxlib.ops import BlockCausal, Causal, Chunked, Mask, MaskHint, SlidingWindow, StaticMask, apply_rope
from maxlib.sharding import constrain, current, shard_map_by_name
from maxlib.sharding.layers import axis_size, mesh_axes, natural_order
from maxlib.sharding.strategies import ContextParallel, RingAttention, UlyssesAttention

CANNOT_TRAVEL = "chosen keys, position biases and pairs of rows cannot travel around a ring: split sequences by CP_GATHER or CP_ULYSSES"


@dataclasses.dataclass(frozen=True)
class TemperatureTuning:
    """Factor on queries that grows with the number of tokens before them (Nakanishi 2025, arXiv:2501.19399).

    Computes `1 + scale * log(1 + floor((index + offset) / floor))`. Llama 4 uses it in layers without rotary
    positions, Ministral 3 in all, with `offset=0`.

    Args:
        floor: Tokens per step; the factor is 1 for the first `floor - offset` tokens.
        scale: Weight of the logarithm.
        offset: Added to the index, which counts from 0.
    """

    floor: float
    scale: float
    offset: int = 1

    def __call__(self, index: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """Returns the factor of each query in float32, given its index in its document."""
        steps = jnp.floor((index.astype(jnp.float32) + self.offset) / self.floor)
        return 1 + self.scale * jnp.log1p(steps)


class Attention(SequenceMixer):
    """Grouped-query attention: `num_heads` query heads attend to `num_kv_heads` heads of keys and values under `mask`.

        rope = ops.Rope(16)
        attn = nn.Attention(64, num_heads=4, num_kv_heads=2, head_dim=16, rope=rope, rngs=nnx.Rngs(0))
        y, _ = attn(jnp.ones((2, 8, 64)))  # B T D, causal

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of query heads.
        head_dim: Width H of a head.
        num_kv_heads: Number K of key and value heads, which divides N; None means N (multi-head attention).
        v_dim: Width of a value's head; None means `head_dim`.
        mask: Which keys a query attends to, a mask of `maxlib.ops`.
        rope: Rotation of queries and keys by position; None for none (NoPE).
        bias: True adds biases to the query, key, value and gate projections.
        out_bias: True adds a bias to the output projection.
        q_norm: Norm over the head dimension of queries, applied before the rotation; None for none.
        k_norm: Norm over the head dimension of keys, applied before the rotation; None for none.
        v_norm: Norm over the head dimension of values; None for none.
        keys_as_values: True uses the key projection, before norm and rotation, as values; there is no `v` (Gemma 4).
        scale: Factor on the scores, by default `head_dim ** -0.5`.
        softcap: `c` in `c * tanh(scores / c)`; None leaves scores as they are.
        sinks: True adds one learned logit per head to the softmax's denominator (GPT-OSS).
        out_gate_act: Activation of the output gate, such as `jax.nn.sigmoid` (Qiu et al. 2025, arXiv:2505.06708). The
            gate projects the input to one number per head and dimension. None for no gate.
        temperature: Maps a token's index in its document to a factor on its query, such as `TemperatureTuning`.
        implementation: Name of an implementation of `ops.attention`; None chooses the best one. `with_attention` sets
            it in a whole model.
        rngs: Source of initial values.

    Raises:
        ValueError: when `num_heads` is not a positive multiple of `num_kv_heads`, or `rope` rotates more than
            `head_dim` dimensions.
        TypeError: when `mask` is not a mask, or `rope` not a rotary embedding.
    """

    op: ClassVar[str | None] = "attention"
    reorderable: ClassVar[bool] = True
    quantizable_cache: ClassVar[bool] = True
    probes_scores: ClassVar[bool] = True
    takes_position_bias: ClassVar[bool] = True
    takes_pairs: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        v_dim: int | None = None,
        mask: Mask = Causal(),
        rope: AnyRope | None = None,
        bias: bool = False,
        out_bias: bool = False,
        q_norm: Callable | None = None,
        k_norm: Callable | None = None,
        v_norm: Callable | None = None,
        keys_as_values: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        out_gate_act: Callable[[Array], Array] | None = None,
        temperature: Callable[[Array], Array] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, H = dim, num_heads, head_dim
        K, Hv = N if num_kv_heads is None else num_kv_heads, H if v_dim is None else v_dim
        if N < 1 or K < 1 or N % K:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, and both at least 1; got {N} and {K}")
        if keys_as_values and Hv != H:
            raise ValueError(f"keys_as_values needs v_dim equal to head_dim, got {Hv} and {H}")
        check_mask(mask)
        _check_rope(rope, H)
        # Weights have their output dimensions first: tensor parallelism splits heads, FSDP splits `embed`.
        self.q = Einsum("...D,NHD->...NH", (N, H, D), ("heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        self.k = Einsum("...D,KHD->...KH", (K, H, D), ("kv_heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        if keys_as_values:
            self.v = None
        else:
            self.v = Einsum("...D,KHD->...KH", (K, Hv, D), ("kv_heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        # [B, T, N, H] -> [B, T, D]: sums over heads and their width at once.
        self.o = Einsum("...NH,DNH->...D", (D, N, Hv), ("embed", "heads", "head_dim"), bias=out_bias, rngs=rngs)
        if out_gate_act is None:
            self.gate = None
        else:
            self.gate = Einsum("...D,NHD->...NH", (N, Hv, D), ("heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        self.q_norm, self.k_norm, self.v_norm, self.out_gate_act = q_norm, k_norm, v_norm, out_gate_act
        self.sinks = nnx.Param(jnp.zeros(N), axes=("heads",)) if sinks else None
        self.mask, self.rope, self.scale, self.softcap = mask, rope, scale, softcap
        self.temperature, self.implementation = temperature, implementation
        self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim = N, K, H, Hv

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: AttentionCache | None = None
    ) -> tuple[Float[Array, "B T D"], AttentionCache | None]:
        """Mixes the tokens of each document.

        Args:
            x: Input, `B T D`.
            ctx: Values shared by all layers (`nn.make_context`); None treats each row as one document from position 0.
            cache: Keys and values of earlier tokens, or None.

        Returns:
            The output, `B T D`, and the cache with the new tokens (None without one).
        """
        return self.with_kv(x, ctx, cache)[:2]  # XLA removes the unused outputs

    def with_kv(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: AttentionCache | None = None
    ) -> tuple[Float[Array, "B T D"], AttentionCache | None, SharedKV]:
        """Like `__call__`, but also returns the keys and values, for `SharedKVAttention` in later layers."""
        ctx = context_of(x, ctx)
        q, k, v = map(mark_heads, self.project(x, ctx), ("q", "k", "v"))
        q = q if cache is None else check_prefix(q, self.mask, ctx)
        # Query t attends to keys k_start[t] <= s < k_end[t]; both bounds are [B, T].
        (k_start, k_end), mask_hint = ctx.key_intervals(self.mask), ctx.mask_hint(self.mask, cache)
        # The cache returns all stored keys, [B, T, K, H] -> [B, S, K, H], and the bounds as indices into them.
        if cache is not None:
            cache, k, v, k_start, k_end = cache.extend(k, v, ctx, k_start, k_end)
        sinks = None if self.sinks is None else self.sinks[...]
        options = {"scale": self.scale, "softcap": self.softcap, "implementation": self.implementation}
        options["bias"] = ctx.position_bias
        # softmax(softcap(scale * q k^T)) v, [B, T, N, H]
        if isinstance(self.mask, BlockCausal) and self.mask.pairs:
            if cache is not None:
                raise ValueError(
                    "pairs of rows are for training, not for a cache: "
                    f"nn.with_mask(model, ops.BlockCausal({self.mask.block}))"
                )
            own_block = ctx.key_intervals(Chunked(self.mask.block))
            out = _attend_pairs(q, k, v, (k_start, k_end), own_block, sinks, zigzag=ctx.zigzag, **options)
        else:
            out = attend(q, k, v, k_start, k_end, sinks, mask_hint=mask_hint, zigzag=ctx.zigzag, **options)
        # o(act(gate(x)) * out), [B, T, N, H] -> [B, T, D]
        if self.gate is not None and self.out_gate_act is not None:
            out = out * self.out_gate_act(self.gate(x))
        out = checkpoint_name(out, "heads")
        static_mask, segment_ids = (None, None) if mask_hint is None else mask_hint
        return self.o(out), cache, SharedKV(k, v, k_start, k_end, segment_ids, static_mask)

    def project(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values, after norms, temperature and rotation.

        Returns:
            Queries `B T N H`, keys `B T K H` and values `B T K Hv`.
        """
        # [B, T, D] -> [B, T, N, H] and [B, T, K, H]
        projected = of_same(x, self.q, self.k, *(() if self.v is None else (self.v,)))
        q, k, *values = (constrain(y, "batch", "seq", "act_heads", None) for y in projected)
        # With keys_as_values, the values are the projected keys before their norm and rotation.
        v = values[0] if values else k
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        v = v if self.v_norm is None else self.v_norm(v)
        # The factor is indexed by position within the document, so packing does not change the result.
        # [B, T] -> [B, T, 1, 1]
        if self.temperature is not None:
            q = (q * self.temperature(ctx.index - ctx.start)[:, :, None, None]).astype(q.dtype)
        if (rope := self.rope) is None:
            return q, k, v
        # [B, T, H / 2] each, the same for all heads; computed once per forward pass and shared by the layers.
        cos, sin = ctx.rotary(rope)
        return (
            apply_rope(q, cos, sin, interleaved=rope.interleaved),
            apply_rope(k, cos, sin, interleaved=rope.interleaved),
            v,
        )

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> AttentionCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens; a sliding window stores only its last
        keys.
        """
        return kv_cache(
            batch,
            capacity,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.head_dim,
            v_dim=self.v_dim,
            ring=self.mask.ring,
            dtype=dtype,
        )

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes that attention sends in a training step (`SplitSequence.attention`)."""
        # Queries and outputs have N * H and N * Hv numbers per token, keys and values K * H and K * Hv.
        both = self.head_dim + self.v_dim
        return split.attention(queries=self.num_heads * both, keys=self.num_kv_heads * both)

    def queries_and_keys(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Array, Array]:
        """Returns the queries `B T N H` and keys `B T K H` that enter the scores, for probes."""
        return self.project(x, ctx)[:2]

    @property
    def kind(self) -> str:
        """Names the kind in tables: MHA, GQA or MQA."""
        return attention_kind(self.num_heads, self.num_kv_heads)

    @property
    def features(self) -> tuple[str, ...]:
        """Labels of its options for tables, such as "qk-norm"."""
        labels = {
            "partial RoPE": self.rope is not None and self.rope.dim < self.head_dim,
            "layers without positions": self.rope is None,
            "qk-norm": not isinstance(self.q_norm, Clip | None),
            "clipped queries, keys, values": isinstance(self.v_norm, Clip),
            "keys as values": self.v is None,
            "temperature tuning": self.temperature is not None,
            "attention soft-cap": self.softcap is not None,
            "sinks": self.sinks is not None,
            "output gate": self.gate is not None,
        }
        return tuple(label for label, applies in labels.items() if applies)


def check_mask(mask: Any) -> None:
    """Raises TypeError unless `mask` is a mask, and ValueError if its sliding window is not causal."""
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be a mask of maxlib.ops, such as Causal() & SlidingWindow(8), got {_described(mask)}; "
            "boolean arrays are not masks here"
        )
    if mask.has_open_window:
        raise ValueError(
            f"{mask} lets a token attend to later ones, because a sliding window alone limits only the past: write "
            f"Causal() & {mask if isinstance(mask, SlidingWindow) else 'SlidingWindow(n)'}"
        )


def _described(value: Any) -> str:
    """Describes an argument of the wrong type for an error: a class by its name, an array by its shape."""
    if isinstance(value, type):
        return f"the class {value.__name__}, not an instance: write {value.__name__}()"
    if hasattr(value, "shape"):
        return f"an array of shape {value.shape}"
    return f"{type(value).__name__} {value!r:.40}"


def _check_rope(rope: Any, head_dim: int) -> None:
    """Raises TypeError unless `rope` is a rotary embedding or None, and ValueError if it is wider than a head."""
    if not isinstance(rope, AnyRope | None):
        raise TypeError(
            f"rope must be an ops.Rope, such as Rope(head_dim), or None; got {type(rope).__name__} {rope!r:.40}"
        )
    if rope is not None and rope.dim > head_dim:
        raise ValueError(f"the rotary dimensions ({rope.dim}) must not exceed head_dim ({head_dim})")


def attention_kind(num_heads: int, num_kv_heads: int) -> str:
    """Names attention by its number of key heads: MHA (one per query head), MQA (a single one) or GQA."""
    if num_heads == num_kv_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def attend(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"] | int,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    sinks: Float[Array, " N"] | None = None,
    *,
    bias: Float[Array, "#B #N T S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask_hint: MaskHint | None = None,
    implementation: str | None = None,
    zigzag: bool = False,
) -> Float[Array, "B T N Hv"]:
    """Runs `ops.attention` on each device's shard, as the active layout splits rows, heads and queries.

    When the sequence is sharded, the axes `q_seq` and `kv_seq` choose the communication. If only `q_seq` is
    split, keys are gathered. If both are, keys travel around a ring (Liu et al. 2023, arXiv:2310.01889). If neither is,
    heads are split, with all-to-alls before and after (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

    Args:
        q: Queries, `B T N Hk`.
        k: Keys, `B S K Hk`.
        v: Values, `B S K Hv`; or their width, if they are the first channels of the keys.
        k_start: First key of each query, `B T`.
        k_end: One past each query's last key, `B T`.
        sinks: One logit per query head that takes part in the softmax, or None.
        bias: Added to the scores, for tokens in order; B and N may be 1, for all rows and all heads.
        scale: Factor on the scores, by default `Hk ** -0.5`.
        softcap: `c` in `c * tanh(scores / c)`, or None.
        mask_hint: Static description of the mask (`ctx.mask_hint`), for kernels that do not take intervals.
        implementation: Name of an implementation of `ops.attention`; None chooses the best one.
        zigzag: True if tokens are in the order of `sharding.layers.zigzag`.

    Raises:
        ValueError: if Ulysses' all-to-all cannot divide the heads over the devices; for a bias whose keys travel around
            a ring.
    """
    options = {"scale": scale, "softcap": softcap, "implementation": implementation}
    return _attend(q, k, v, k_start, k_end, sinks, bias, mask_hint=mask_hint, zigzag=zigzag, **options)


def _attend(
    q: Array,
    k: Array,
    v: Array | int,
    k_start: Array,
    k_end: Array,
    sinks: Array | None = None,
    bias: Array | None = None,
    *,
    mask_hint: MaskHint | None = None,
    zigzag: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Runs `attend`; with `return_lse` it also returns the log-sum-exps of the scores, `B T N`."""
    # Reshard from sequence to heads (Ulysses' all-to-all) only here; otherwise XLA would gather the tokens, and project
    # and rotate all of them on every device.
    if q.shape[1] == k.shape[1]:
        q, k, v = map(_by_tokens, (q, k, v))
    k, v = _repeat_heads(axis_size("attn_heads"), q, k, v)
    _check_exchange(q, k)
    ring = _ring_of(k.shape[1])
    if (bias is not None and (ring is not None or zigzag)) or (return_lse and ring is not None):
        raise ValueError(CANNOT_TRAVEL)
    if ring is not None and isinstance(v, int):
        v = k[..., :v]
    static, segments = (None, None) if mask_hint is None else mask_hint
    if static is not None and axis_size("q_seq") > 1:
        static = dataclasses.replace(static, aligned=False)  # local query i is not aligned with local key i
    op = _on_one_device(ring, static, options | ({"return_lse": True} if return_lse else {}), zigzag=zigzag)
    queries, names = _axes(v, bias, segments)
    outputs = (queries, queries[:3]) if return_lse else queries
    out = shard_map_by_name(op, names, outputs)(q, k, v, k_start, k_end, sinks, bias, *segments or ())
    return (_by_tokens(out[0]), out[1]) if return_lse else _by_tokens(out)


def _attend_pairs(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B T K Hk"],
    v: Float[Array, "B T K Hv"],
    in_text: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    own_block: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    sinks: Float[Array, " N"] | None,
    **options: Any,
) -> Float[Array, "B T N Hv"]:
    """Attends in pairs of rows, a text and its noisy copy.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        in_text: First key of each query in the row of the text, and one past the last.
        own_block: The same in its own row, for noisy queries.
        sinks: One logit per query head that takes part in the softmax, or None.
        **options: Those of `_attend`.

    Raises:
        ValueError: when the number of rows is odd.
    """
    if q.shape[0] % 2:
        raise ValueError(f"pairs of a text and its noisy copy need an even number of rows, got {q.shape[0]}")

    def rows(x: Array) -> tuple[Array, Array]:
        # [B, ...] -> [B / 2, ...] each: a reshape, so that pairs stay on their device
        pairs = x.reshape(-1, 2, *x.shape[1:])
        return pairs[:, 0], pairs[:, 1]

    def both(text: Array, noisy: Array) -> Array:
        return jnp.stack([text, noisy], axis=1).reshape(-1, *text.shape[1:])

    def of_text(x: Array) -> Array:
        text, _ = rows(x)
        return both(text, text)

    out, lse = _attend(q, of_text(k), of_text(v), *in_text, sinks, return_lse=True, **options)
    (text, noisy), (_, noisy_lse) = rows(out), rows(lse)
    inside, inside_lse = _attend(*(rows(x)[1] for x in (q, k, v, *own_block)), return_lse=True, **options)
    # A softmax over both sets of keys: the outputs, weighted by the sums of their exponentials.
    merged, _ = merge_parts(jnp.stack([noisy, inside]).astype(noisy_lse.dtype), jnp.stack([noisy_lse, inside_lse]))
    return both(text, merged.astype(out.dtype))


def _by_tokens(x: Any) -> Any:
    """Splits queries, keys or values `B T N H` as the sequence is split; an integer `v` is returned unchanged."""
    return x if isinstance(x, int) else constrain(x, "batch", "seq", "act_heads", None)


def _axes(v: Array | int, bias: Array | None, segments: Any) -> tuple[tuple, list]:
    """Returns the names of the axes of queries, and those of all arguments of one device's function."""
    # [B, T, N, H], [B, S, K, H] and, of bounds and segments, [B, T]
    queries, keys = ("batch", "q_seq", "attn_heads", None), ("batch", "kv_seq", "attn_heads", None)
    of_values = None if isinstance(v, int) else keys
    of_bias = None
    if bias is not None:
        rows, heads = ("batch" if bias.shape[0] > 1 else None), ("attn_heads" if bias.shape[1] > 1 else None)
        of_bias = (rows, heads, "q_seq", None)
    names = [queries, keys, of_values, queries[:2], queries[:2], ("attn_heads",), of_bias]
    return queries, names if segments is None else [*names, queries[:2], keys[:2]]


def _repeat_heads(shards: int, q: Array, k: Array, v: Array | int) -> tuple[Array, Array | int]:
    """Returns keys and values with a head for each device that splits heads, if there are fewer."""
    if q.shape[2] % shards or shards <= k.shape[2] or shards % k.shape[2]:
        # If heads do not divide over the devices, `shard_map_by_name` replicates them (or `_check_exchange` raises).
        return k, v
    # [B, S, K, H] -> [B, S, shards, H]
    repeats = shards // k.shape[2]
    return jnp.repeat(k, repeats, axis=2), v if isinstance(v, int) else jnp.repeat(v, repeats, axis=2)


def check_no_ring(keys: int) -> None:
    """Raises ValueError where the active layout passes keys around a ring, which those that were chosen cannot do."""
    if _ring_of(keys) is not None:
        raise ValueError(CANNOT_TRAVEL)


def _ring_of(keys: int) -> str | None:
    """Returns the mesh axis around which keys travel. A ring needs equal pieces; others are gathered instead."""
    sequence = _sequence()
    return sequence.axis if isinstance(sequence, RingAttention) and keys % axis_size("kv_seq") == 0 else None


def _sequence() -> ContextParallel | None:
    layout = current()
    return None if layout is None else layout.sequence


def _on_one_device(ring: str | None, static: StaticMask | None, options: dict[str, Any], *, zigzag: bool):
    """Returns the function for one device's part; it passes keys around a ring or gathers them."""
    parts = axis_size("q_seq") if zigzag else 1

    def op(q, k, v, k_start, k_end, sinks, bias, *segments):
        # Queries [B, T / parts, N, H]; keys [B, S, K, H], or in a ring this device's part of them.
        if ring is None and zigzag:
            # Bounds index keys in natural order, so restore it for the gathered keys; queries may stay reordered.
            k, v = natural_order(k, parts), v if isinstance(v, int) else natural_order(v, parts)
            segments = *segments[:1], *(natural_order(x, parts) for x in segments[1:])
        hint = None if static is None else MaskHint(static, cast(Any, segments or None))
        shared = {"k_start": k_start, "k_end": k_end, "sinks": sinks, "mask_hint": hint, **options}
        if ring is None:
            return ops.attention(q, k, v, bias=bias, **shared)
        assert not isinstance(v, int)
        return ops.ring_attention(q, k, v, axis_name=ring, pieces=2 if zigzag else 1, **shared)

    return op


def _check_exchange(q: Array, k: Array) -> None:
    """Raises ValueError if Ulysses' all-to-all cannot split the heads: each device would gather all tokens and heads.

    Decoding a single token splits nothing, so it passes.
    """
    parts, heads = axis_size("attn_heads"), (q.shape[2], k.shape[2])
    exchanges = isinstance(_sequence(), UlyssesAttention) and q.shape[1] % axis_size("seq") == 0
    if exchanges and any(count % parts for count in heads):
        raise ValueError(
            f"Ulysses attention over mesh axes {mesh_axes('attn_heads')} ({parts} devices) needs query heads divisible by "
            f"{parts}, and key heads that {parts} divides or that divide {parts}; got {heads[0]} and {heads[1]}. Use fewer "
            "devices on that axis, or CP_RING / CP_GATHER."
        )
