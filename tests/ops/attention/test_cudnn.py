"""cuDNN and tokamax: what they are given, seen in lowered programs and by stand-ins, as neither runs without a GPU."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.cudnn import fused_attention_stablehlo

from maxlib import ops
from maxlib.ops._attention import api, cudnn, tokamax_gpu
from maxlib.ops._attention.reference import reference
from tests.ops.attention import cases

MASKS = {"full": "full", "causal": "causal", "window": "window"}


def arrays(dtype=jnp.float32):
    return [jax.random.normal(jax.random.key(i), (2, 37, heads, 8), dtype) for i, heads in enumerate((4, 2, 2))]


@pytest.mark.parametrize(
    ("module", "mask"),
    [
        pytest.param(module, mask, marks=() if mask == one else pytest.mark.full)
        for module, one in ((cudnn, "window"), (tokamax_gpu, "causal"))
        for mask in MASKS
    ],
)
def test_the_named_mask_is_the_intervals(module, mask, monkeypatch):
    """JAX's own XLA implementation takes the same arguments: with it the result is that of the definition."""
    theirs = jax.nn.dot_product_attention

    def plain(*args, implementation, logits_soft_cap=None, **options):
        assert implementation in ("cudnn", "mosaic") and logits_soft_cap is None
        return theirs(*args, **options, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(dot_product_attention=plain))
    start, end = cases.bounds(mask, "one", (37, 37))
    run = {cudnn: cudnn.cudnn, tokamax_gpu: tokamax_gpu.tokamax}[module]
    given, bounds = arrays(), dict(k_start=start, k_end=end)
    about = ops.MaskHint(cases.MASKS[mask].static)
    out, _ = jax.jit(lambda given, bounds: run(*given, **bounds, scale=0.3, mask_hint=about))(given, bounds)
    want, _ = jax.jit(lambda given, bounds: reference(*given, **bounds, scale=0.3))(given, bounds)
    np.testing.assert_allclose(out, want, atol=2e-6, rtol=2e-6)


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
    monkeypatch.setitem(sys.modules, "tokamax", None)
    bounds = dict(zip(("k_start", "k_end"), cases.bounds("causal", "one", (37, 37)), strict=True))
    with pytest.raises(ImportError, match=r"pip install 'maxlib\[cuda\]'"):
        tokamax_gpu.tokamax(*arrays(), **bounds, scale=1.0, mask_hint=ops.MaskHint(ops.StaticMask("causal")))
