"""Uses maxlib's attention in code with parameters in dictionaries (as in haiku), without a framework.

`ops.attention` takes arrays. A mask is two numbers for each query, its first and last key, so packed documents, windows
and padding need no matrix. On GPUs and TPUs it chooses a fused kernel; `ops.explain_attention` says which and why.
"""

import jax
import jax.numpy as jnp

from maxlib import ops

DIM, HEADS, KV_HEADS, HEAD = 64, 4, 2, 16
Params = dict[str, jax.Array]


def init(key: jax.Array) -> Params:
    shapes = {"q": (DIM, HEADS, HEAD), "k": (DIM, KV_HEADS, HEAD), "v": (DIM, KV_HEADS, HEAD), "o": (HEADS, HEAD, DIM)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shapes[name]) / DIM**0.5 for name, k in zip(shapes, keys, strict=True)}


def attend(params: Params, x: jax.Array, segments: jax.Array) -> jax.Array:
    """Causal attention of packed documents.

    Args:
      params: your own arrays.
      x: vectors, [B, T, D].
      segments: number of each token's document, rising from left to right, [B, T].
    """
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
    length = x.shape[1]
    index = jnp.broadcast_to(jnp.arange(length), segments.shape)
    same = segments[:, :, None] == segments[:, None, :]  # B T S; one line, where a data pipeline would know the starts
    start, end = jnp.argmax(same, -1), length - jnp.argmax(same[..., ::-1], -1)
    bounds = ops.key_intervals(ops.Causal() & ops.SlidingWindow(8), ops.TokenPositions(index, start, end))
    y = ops.attention(q, k, v, k_start=bounds[0], k_end=bounds[1])  # B T N H
    return jnp.einsum("btnh,nhd->btd", y, params["o"])


def textbook(params: Params, x: jax.Array, segments: jax.Array) -> jax.Array:
    """The same with jax.nn's attention and a mask of T x T."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
    index = jnp.arange(x.shape[1])
    ahead = index[:, None] - index[None]
    mask = ((ahead >= 0) & (ahead < 8))[None] & (segments[:, :, None] == segments[:, None, :])
    y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
    return jnp.einsum("btnh,nhd->btd", y, params["o"])


def main() -> float:
    params, x = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 40, DIM))
    segments = jnp.array([[0] * 25 + [1] * 15, [0] * 8 + [1] * 20 + [2] * 12])
    total = lambda f: jax.jit(jax.value_and_grad(lambda p: jnp.sum(f(p, x, segments) ** 2)))(params)
    (ours, our_grads), (theirs, their_grads) = total(attend), total(textbook)
    pairs = zip(jax.tree.leaves(our_grads), jax.tree.leaves(their_grads), strict=True)
    worst = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
    print(f"sum of squares {ours:.4f} and {theirs:.4f}; gradients differ by {worst:.1e} of the largest")
    chosen = ops.explain_attention(
        jax.ShapeDtypeStruct((1, 4096, 32, 128), jnp.bfloat16),
        *2 * (jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16),),
    ).chosen
    print(f"here a Llama of 8 billion parameters would use the implementation {chosen!r}")
    return worst


if __name__ == "__main__":
    main()
