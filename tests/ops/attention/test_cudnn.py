"""The inputs of cuDNN, checked in lowered programs and with a mock, because it does not run without a GPU."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.cudnn import fused_attention_stablehlo

from maxlib import ops
from maxlib.ops._attention import api, cudnn, tokamax_gpu
from tests.ops.attention import cases
from tests.ops.attention.kernels import by_name, reference


def arrays(dtype=jnp.float32, key_dim=8, value_dim=8):
    shapes = ((4, key_dim), (2, key_dim), (2, value_dim))
    return [jax.random.normal(jax.random.key(i), (2, 37, *shape), dtype) for i, shape in enumerate(shapes)]


@pytest.fixture
def plain(monkeypatch):
    """JAX's own XLA implementation takes the same arguments; returns the widths of heads that came."""
    theirs, widths = jax.nn.dot_product_attention, []

    def run(q, k, v, *, implementation, **options):
        assert implementation == "cudnn"
        widths.append(q.shape[-1])
        return theirs(q, k, v, **options, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", run)
    return widths


@pytest.mark.parametrize(
    ("kind", "widths", "padded"),
    [
        ("NVIDIA H200", (192, 128), 192),
        ("NVIDIA B200", (192, 128), 256),
        pytest.param("NVIDIA B200", (64, 128), 128, marks=pytest.mark.full),
        ("NVIDIA A100-SXM4-80GB", (32, 64), 64),
    ],
)
def test_heads_of_two_widths_are_padded_and_nothing_changes(kind, widths, padded, plain, monkeypatch):
    """Values and gradients; cuDNN's backward kernels for Blackwell have no heads between 128 and 256."""
    monkeypatch.setattr(cudnn, "current_device", lambda: ("gpu", kind))
    inputs, bounds = arrays(jnp.float32, *widths), cases.bounds("causal", "one", (37, 37))
    bounds = dict(zip(("k_start", "k_end"), bounds, strict=True))

    def results(run, **more):
        out, pull = jax.vjp(lambda *x: run(*x, **bounds, scale=0.1, **more)[0], *inputs)
        return [out, *pull(out)]

    about = ops.MaskHint(ops.StaticMask("causal", aligned=True))
    got = jax.jit(lambda: results(by_name(cudnn.cudnn), mask_hint=about))()
    assert plain == [padded]
    for result, want in zip(got, jax.jit(lambda: results(reference))(), strict=True):
        np.testing.assert_allclose(result, want, atol=2e-5, rtol=1e-5)
    q, k, v = (jax.ShapeDtypeStruct((2, 4096, *x.shape[2:]), jnp.bfloat16) for x in inputs)
    ends = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    options = dict(k_start=ends, k_end=ends, mask_hint=about.static, device=("gpu", kind))
    # On Hopper mosaic_gpu takes wide heads of two widths as they are, and is faster.
    assert ops.explain_attention(q, k, v, **options).chosen == ("mosaic_gpu" if padded == 192 else "cudnn")


@pytest.mark.parametrize(
    "mask", ["window", *(pytest.param(mask, marks=pytest.mark.full) for mask in ("full", "causal"))]
)
def test_the_named_mask_is_the_intervals(mask, plain):
    start, end = cases.bounds(mask, "one", (37, 37))
    inputs, bounds = arrays(), dict(k_start=start, k_end=end)
    about = ops.MaskHint(cases.MASKS[mask].static)
    out, _ = jax.jit(lambda inputs, bounds: by_name(cudnn.cudnn)(*inputs, **bounds, scale=0.3, mask_hint=about))(
        inputs, bounds
    )
    want, _ = jax.jit(lambda inputs, bounds: reference(*inputs, **bounds, scale=0.3))(inputs, bounds)
    np.testing.assert_allclose(out, want, atol=2e-6, rtol=2e-6)


def test_one_query_sees_the_filled_part_of_a_cache(plain):
    """Rows of a cache are filled to different lengths; one of them not at all."""
    q, k, v = arrays()
    q, filled = q[:, :1], jnp.array([[20], [0]])
    bounds = dict(k_start=jnp.zeros_like(filled), k_end=filled, scale=0.3)
    out, _ = jax.jit(
        lambda: by_name(cudnn.cudnn)(q, k, v, **bounds, mask_hint=ops.MaskHint(ops.StaticMask("causal")))
    )()
    want, _ = jax.jit(lambda: reference(q, k, v, **bounds))()
    np.testing.assert_allclose(out, want, atol=2e-6, rtol=2e-6)
    assert not out[1].any() and out[0].any()


@pytest.mark.parametrize(("window", "length"), [(None, None), (64, 64)])
def test_a_gpu_program_calls_cudnn(window, length, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 128), jnp.bfloat16) for heads in (4, 2))
    ends = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def both(q, k, v, start, end):
        mask = ops.StaticMask("causal", window, aligned=True)
        run = lambda *x: ops.attention(*x, k_start=start, k_end=end, mask_hint=mask).astype(jnp.float32).sum()
        return jax.grad(run, argnums=(0, 1, 2))(q, k, v)

    allowed = [export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{end}") for end in ("", "Backward")]
    # Under an abstract mesh newer versions of jax refuse to lower cuDNN's calls.
    monkeypatch.setattr(api, "current_device", lambda: ("gpu", "NVIDIA H100"))
    text = export.export(jax.jit(both), platforms=["cuda"], disabled_checks=allowed)(q, k, k, ends, ends).mlir_module()
    assert text.count("__cudnn$fmhaSoftmax(") == text.count("__cudnn$fmhaSoftmaxBackward(") == 1
    assert "CAUSAL" in text and (
        length is None or f'"sliding_window_length\\22: {length}' in text.replace("\\22sli", '"sli')
    )


def test_without_tokamax_the_error_says_what_to_install(monkeypatch):
    for name in ("tokamax", "tokamax._src.ops.attention.api"):  # which an earlier test may have imported
        monkeypatch.setitem(sys.modules, name, None)
    bounds = dict(zip(("k_start", "k_end"), cases.bounds("causal", "one", (37, 37)), strict=True))
    with pytest.raises(ImportError, match=r"pip install 'maxlib\[cuda\]'"):
        by_name(tokamax_gpu.tokamax)(*arrays(), **bounds, scale=1.0, mask_hint=ops.MaskHint(ops.StaticMask("causal")))
