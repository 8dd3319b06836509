"""The inputs of tokamax: its masks equal our intervals; values, gradients, odd lengths and fully masked rows.

A stand-in reads the masks as tokamax documents them; where tokamax is installed, its own XLA code does, and its kernels
are lowered for a Hopper GPU that is not here.
"""

import dataclasses
import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import ops
from maxlib.ops._attention import tokamax_gpu
from tests.ops.attention import cases
from tests.ops.attention.kernels import by_name, reference

ODD, WHOLE = (37, 37), (256, 256)
STATIC = {
    "one": {"full": ops.StaticMask("full"), "causal": ops.StaticMask("causal"), "window": ops.StaticMask("causal", 7)},
    "packed": {"full": ops.StaticMask("full", segmented=True), "causal": ops.StaticMask("causal", segmented=True)},
    "padded": {"causal": ops.StaticMask("causal", segmented=True)},
}
BY_DEFAULT = ("causal", "packed")
NAMED = [
    pytest.param(mask, documents, marks=[pytest.mark.full] * ((mask, documents) != BY_DEFAULT))
    for documents, masks in STATIC.items()
    for mask in masks
]


@dataclasses.dataclass(frozen=True)
class Mask:
    """tokamax's mask, as far as it is used: intervals `B 1 T`, and a causal one by name."""

    k_start: Any = None
    k_end: Any = None
    is_causal: bool = False


def stand_in(q, k, v, *, mask, logits_scale, logits_soft_cap):
    shape, S = q.shape[:2], k.shape[1]
    start = jnp.zeros(shape, jnp.int32) if mask.k_start is None else mask.k_start[:, 0]
    end = jnp.full(shape, S, jnp.int32) if mask.k_end is None else mask.k_end[:, 0]
    if mask.is_causal:
        end = jnp.minimum(end, jnp.arange(shape[1])[None] + 1)
    return reference(q, k, v, k_start=start, k_end=end, scale=logits_scale, softcap=logits_soft_cap)[0]


@pytest.fixture(params=["stand-in", "tokamax"])
def kernel(request, monkeypatch):
    if request.param == "tokamax":
        pytest.importorskip("tokamax")
        return "xla"
    pytest.importorskip("absl")
    names = ("tokamax", "tokamax._src", "tokamax._src.ops", "tokamax._src.ops.attention")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, thing in (("api", {"IMPLEMENTATIONS": {"mosaic_gpu": stand_in}}), ("base", {"Mask": Mask})):
        monkeypatch.setitem(sys.modules, f"{names[-1]}.{name}", types.SimpleNamespace(**thing))
    return "mosaic_gpu"


def compare(kernel, lengths, mask, documents, static, softcap=None):
    case = cases.Case((4, 2), (8, 6), lengths, softcap, False, None)
    inputs = cases.arrays(case, jnp.float32)
    bounds = dict(zip(("k_start", "k_end"), cases.bounds(mask, documents, lengths), strict=True))

    def results(run, **more):
        call = lambda q, k, v: run(q, k, v, **bounds, scale=0.3, softcap=softcap, **more)[0]
        out, pull = jax.vjp(call, *(inputs[name] for name in "qkv"))
        return [out, *pull(inputs["d_out"])]

    known = static and ops.MaskHint(static)
    with jax.numpy_rank_promotion("allow"):  # tokamax's own code broadcasts
        got = jax.jit(lambda: results(by_name(tokamax_gpu.tokamax), mask_hint=known, kernel=kernel))()
    for result, want in zip(got, jax.jit(lambda: results(reference))(), strict=True):
        np.testing.assert_allclose(result, want, atol=1e-5, rtol=1e-5)


INTERVALS = [
    pytest.param(mask, documents, marks=[pytest.mark.full] * ((mask, documents) != ("prefix", "padded")))
    for mask in ("causal", "prefix", "both sides")
    for documents in cases.DOCUMENTS
]


@pytest.mark.parametrize(("mask", "documents"), INTERVALS)
def test_intervals_are_what_it_is_given(kernel, mask, documents):
    compare(kernel, ODD, mask, documents, None, softcap=2.0)


@pytest.mark.parametrize(("mask", "documents"), NAMED)
def test_named_masks_over_whole_rows_are_their_intervals(kernel, mask, documents):
    compare(kernel, WHOLE, mask, documents, dataclasses.replace(STATIC[documents][mask], aligned=True))


@pytest.mark.full
def test_beside_a_cache(kernel):
    compare(kernel, (18, 35), "causal", "packed", ops.StaticMask("causal", segmented=True))


def test_tiles_of_a_causal_mask_are_skipped_by_name():
    """Its backward kernels skip tiles of a causal mask by name, and none by intervals."""
    bounds = jnp.zeros((2, 256), jnp.int32), jnp.ones((2, 256), jnp.int32)
    named = lambda static: tokamax_gpu.named(*bounds, static)
    assert named(ops.StaticMask("causal", aligned=True)) == {"is_causal": True}
    assert named(ops.StaticMask("full", aligned=True)) == {"is_causal": False}
    assert named(ops.StaticMask("causal", segmented=True, aligned=True)).keys() == {"is_causal", "k_start"}
    assert named(ops.StaticMask("causal")).keys() == named(None).keys() == {"is_causal", "k_start", "k_end"}


class Hopper:
    """A mock of the device attributes that tokamax reads."""

    platform, compute_capability, device_kind, core_count, id = "gpu", "9.0", "NVIDIA H100", 132, 0


class Blackwell(Hopper):
    compute_capability, device_kind, core_count = "10.0", "NVIDIA B200", 148


@pytest.mark.parametrize("device", [Hopper, Blackwell])
@pytest.mark.parametrize("length", [1024, pytest.param(1000, marks=pytest.mark.full)])
def test_a_program_calls_its_kernels(length, device, monkeypatch):
    """Forward, dq, and dk with dv; soft-cap, packed documents and values of another width are in them."""
    pytest.importorskip("tokamax")
    if device is Blackwell and not tokamax_gpu.is_installed(tokamax_gpu.BLACKWELL):
        pytest.skip("needs tokamax 0.0.17")
    from jax.extend import backend

    gpu = device()
    monkeypatch.setattr(backend, "get_default_device", lambda: gpu)
    array = lambda heads, width: jax.ShapeDtypeStruct((1, length, heads, width), jnp.bfloat16)
    ends = jax.ShapeDtypeStruct((1, length), jnp.int32)
    known = ops.MaskHint(ops.StaticMask("causal", segmented=True, aligned=True))

    def both(q, k, v, start, end):
        more = {"k_start": start, "k_end": end, "scale": 0.1, "softcap": 30.0, "mask_hint": known}
        out, pull = jax.vjp(lambda *x: by_name(tokamax_gpu.tokamax)(*x, **more)[0], q, k, v)
        return pull(out)

    traced = jax.jit(both).trace(array(4, 192), array(2, 192), array(2, 128), ends, ends)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 3
