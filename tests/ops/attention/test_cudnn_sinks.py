"""Sinks by cuDNN: on a CPU with stand-ins for its two kernels, and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.cudnn import fused_attention_stablehlo as theirs
from jax.sharding import PartitionSpec as P

from maxlib import ops
from maxlib.ops._attention import api, cudnn
from tests.ops.attention import cases, cudnn_emulator
from tests.ops.attention.kernels import by_name, reference

MASKS = {name: cases.MASKS[name] for name in ("full", "causal", "window")}
LENGTHS = (37, 37)


@pytest.fixture
def emulated(monkeypatch):
    with cudnn_emulator.on_a_cpu(monkeypatch):
        yield


def hint(mask):
    static = MASKS[mask].static
    return ops.MaskHint(ops.StaticMask(static.kind, static.window, aligned=True))


def results(run, inputs, mask, **more):
    """The output, and the gradients of q, k, v and sinks."""

    @jax.jit
    def both(inputs, start, end):
        call = lambda *x: run(*x[:3], sinks=x[3], k_start=start, k_end=end, scale=0.3, **more)[0]
        out, pull = jax.vjp(call, *(inputs[name] for name in ("q", "k", "v", "sinks")))
        return [out, *pull(inputs["d_out"])]

    return both(inputs, *cases.bounds(mask, "one", LENGTHS))


def by_cudnn(inputs, mask):
    return results(by_name(cudnn.cudnn), inputs, mask, mask_hint=hint(mask))


def truth(inputs, mask):
    exact = {name: np.asarray(x).astype(np.float64) for name, x in inputs.items() if x is not None}
    cases.bounds(mask, "one", LENGTHS)
    with jax.enable_x64(True):
        return [np.asarray(x) for x in results(reference, exact, mask)]


def errors(got, want):
    norm = lambda x: np.linalg.norm(np.asarray(x).astype(np.float64))
    return [norm(np.asarray(x).astype(np.float64) - y) / norm(y) for x, y in zip(got, want, strict=True)]


def given_for(heads, widths=(8, 8), dtype=jnp.float32, shift=0.0):
    inputs = cases.arrays(cases.Case(heads, widths, LENGTHS, None, True, None), dtype)
    return inputs | {"sinks": inputs["sinks"].astype(jnp.float32) + shift}


@pytest.mark.parametrize(
    ("heads", "widths", "mask", "shift"),
    [
        ((4, 2), (8, 8), "window", 0.0),
        ((4, 2), (16, 8), "causal", 4.0),  # keys and values of two widths; sinks that take most of the weight
        ((3, 3), (8, 8), "full", -30.0),  # sinks that take nothing
    ],
)
def test_values_and_gradients_are_those_of_the_definition(heads, widths, mask, shift, emulated):
    inputs = given_for(heads, widths, shift=shift)
    got = by_cudnn(inputs, mask)
    assert max(errors(got, truth(inputs, mask))) < 2e-6


def test_a_head_without_a_sink_is_plain_attention(emulated):
    """A sink of -inf takes no weight, and has no gradient."""
    inputs = given_for((4, 2))
    inputs["sinks"] = inputs["sinks"].at[1].set(-jnp.inf)
    *got, d_sinks = by_cudnn(inputs, "causal")
    *want, wanted = results(reference, inputs, "causal")
    assert max(errors(got, want)) < 2e-6 and d_sinks[1] == 0
    np.testing.assert_allclose(d_sinks, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checked", [True, False], ids=["vma", "no vma"])
def test_in_shard_map_every_device_has_its_rows_and_heads(checked, emulated):
    """Gradients of sinks are summed over the devices that hold rows."""
    inputs, mask = given_for((4, 2)), hint("window")
    mesh = jax.make_mesh(
        (2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    here = P("rows", None, "heads", None)
    names = ("q", "k", "v", "sinks")

    def run(q, k, v, *, sinks, k_start, k_end, scale):
        local = lambda q, k, v, sinks, start, end: by_name(cudnn.cudnn)(
            q, k, v, sinks=sinks, k_start=start, k_end=end, scale=scale, mask_hint=mask
        )[0]
        specs = (here, here, here, P("heads"), P("rows", None), P("rows", None))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=here, check_vma=checked)
        return mapped(q, k, v, sinks, k_start, k_end), None

    got = results(run, {name: inputs[name] for name in (*names, "d_out")}, "window")
    assert max(errors(got, truth(inputs, "window"))) < 2e-6


def test_on_a_mesh_jax_splits_rows_and_heads(emulated):
    """Outside of `shard_map`, by JAX's rules for its primitives."""
    inputs = given_for((4, 2))
    mesh = jax.make_mesh(
        (2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    place = lambda x: jax.device_put(
        x, jax.NamedSharding(mesh, P("heads") if x.ndim == 1 else P("rows", None, "heads"))
    )
    placed = {name: place(inputs[name]) for name in ("q", "k", "v", "sinks", "d_out")}
    got = by_cudnn(placed, "window")
    assert got[0].sharding.spec[:3] == ("rows", None, "heads")
    assert max(errors(got, truth(inputs, "window"))) < 2e-6


def test_the_output_can_be_kept_for_the_backward_pass(emulated):
    """With a policy that keeps the named results, the forward kernel runs once in a step; without it twice."""
    inputs, (start, end) = given_for((4, 2)), cases.bounds("causal", "one", LENGTHS)

    def loss(q):
        more = {"k_start": start, "k_end": end, "scale": 0.3, "mask_hint": hint("causal")}
        return by_name(cudnn.cudnn)(q, inputs["k"], inputs["v"], sinks=inputs["sinks"], **more)[0].sum()

    kept = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    for policy, calls in ((kept, 1), (None, 2)):
        step = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(inputs["q"]))
        assert step.count("= dot_product_attention_fwd_wrapper[") == calls, step


@pytest.mark.parametrize(("kind", "window"), [("causal", None), ("causal", 128), ("full", None)])
def test_a_gpu_program_calls_both_kernels(kind, window, monkeypatch):
    monkeypatch.setattr(theirs, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(api, "current_device", lambda: ("gpu", "NVIDIA H100"))
    # GPT-OSS's heads
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (64, 8))
    sinks, ends = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((2, 256), jnp.int32)
    mask = ops.StaticMask(kind, window, aligned=True)

    def both(q, k, v, sinks, start, end):
        run = lambda q, k, v, s: ops.attention(q, k, v, sinks=s, k_start=start, k_end=end, mask_hint=mask)
        return jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))(q, k, v, sinks)

    allowed = [export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{end}") for end in ("", "Backward")]
    exported = export.export(jax.jit(both), platforms=["cuda"], disabled_checks=allowed)
    text = exported(q, k, k, sinks, ends, ends).mlir_module()
    assert text.count("__cudnn$fmhaSoftmax(") == text.count("__cudnn$fmhaSoftmaxBackward(") == 1
    assert ("NO_MASK" if kind == "full" else "CAUSAL") in text.replace("PADDING_CAUSAL", "")
    assert f"sliding_window_length\\22: {window or 0}" in text
