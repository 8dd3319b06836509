"""cuDNN's fused attention on a CPU: a lowering of JAX's primitives that computes what its kernels are documented to.

The forward kernel returns the output and `max + ln(sum of exponentials)` of each row. The backward kernel computes the
weights from that number, exp(logits - stats), and the rows' sums of `d_out * out` from the output that it is given.
JAX's rules for batches and for meshes, and its checks of shapes, are those that run on a GPU.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from einops import rearrange
from jax._src.cudnn import fused_attention_stablehlo as theirs
from jax.interpreters import mlir


@contextlib.contextmanager
def on_a_cpu(monkeypatch) -> Iterator[None]:
    """Runs cuDNN's primitives on CPUs, also in float32, which JAX's check of dtypes would refuse."""
    table = mlir._platform_specific_lowerings["cpu"]
    for primitive, run in (
        (theirs._dot_product_attention_fwd_p, _forward),
        (theirs._dot_product_attention_bwd_p, _backward),
    ):
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform="cpu")
    monkeypatch.setattr(theirs, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(theirs, "check_is_flash_attention", lambda *args, **kwargs: None)
    monkeypatch.setattr(theirs, "check_layout", lambda *args, **kwargs: None)
    yield
    for primitive in (theirs._dot_product_attention_fwd_p, theirs._dot_product_attention_bwd_p):
        table.pop(primitive)


def _forward(q, k, v, *unused, is_training, **options):
    logits, (_, _, v) = _logits(q, k, v, **options)
    stats = jax.nn.logsumexp(logits, axis=-1)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", jnp.exp(logits - stats[..., None]), v)
    out = rearrange(out, "B T K G H -> B T (K G) H").astype(q.dtype)
    return [out, rearrange(stats, "B K G T -> B (K G) T")] if is_training else [out]


def _backward(q, k, v, *more, **options):
    stats, out, d_out = more[7:10]
    by_group = lambda x: rearrange(x, "B T (K G) H -> B T K G H", K=k.shape[2]).astype(jnp.float32)
    logits, arrays = _logits(q, k, v, **options)
    weights = jnp.exp(logits - rearrange(stats, "B (K G) T -> B K G T", K=k.shape[2])[..., None])
    out, d_out = by_group(out), by_group(d_out)
    sums = jnp.einsum("BTKGH,BTKGH->BKGT", out, d_out)[..., None]
    d_logits = weights * (jnp.einsum("BTKGH,BSKH->BKGTS", d_out, arrays[2]) - sums) * options["scale"]
    dq = rearrange(jnp.einsum("BKGTS,BSKH->BTKGH", d_logits, arrays[1]), "B T K G H -> B T (K G) H")
    dk = jnp.einsum("BKGTS,BTKGH->BSKH", d_logits, arrays[0])
    dv = jnp.einsum("BKGTS,BTKGH->BSKH", weights, d_out)
    return [x.astype(y.dtype) for x, y in zip((dq, dk, dv), (q, k, v), strict=True)]


def _logits(q, k, v, *, scale, mask_type, sliding_window_length, layout, **_):
    """The logits `B K G T S`, -inf where they are masked, and the arrays in float32, queries by groups."""
    assert layout == theirs.AttentionLayout.BTNH.value
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q = rearrange(q, "B T (K G) H -> B T K G H", K=k.shape[2])
    logits = scale * jnp.einsum("BTKGH,BSKH->BKGTS", q, k)
    query, key = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    seen = query >= key if mask_type == theirs.MaskType.CAUSAL else jnp.ones((q.shape[1], k.shape[1]), bool)
    # A window is (query - sliding_window_length, query].
    seen = seen if not sliding_window_length else seen & (key > query - sliding_window_length)
    return jnp.where(seen[None, None, None], logits, -jnp.inf), (q, k, v)
