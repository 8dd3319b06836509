"""maxlib's kernels of recurrences for TPUs: in Pallas's interpreter against float64, and lowered for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from maxlib import ops, plan, sharding
from maxlib.kernels.recurrent.chunk import Form, inverse
from maxlib.kernels.recurrent.tiles import MosaicTpuTiles, Shares
from maxlib.observability import forward_flops
from maxlib.ops._recurrent import recurrence
from maxlib.plan._targets import has_tpu_compiler
from tests.ops.recurrences import GATED_DELTA, SSD, in_float64
from tests.plan import jobs

NAME, B, T, KEY, VALUE = "mosaic_tpu", 2, 150, 128, 256  # two chunks of 128, the second one a part
STARTS = np.zeros((B, T), bool)
STARTS[0, [0, 5, 70, 71, 128]] = STARTS[1, [64, 140]] = True  # within a chunk, at its border, two in a chunk
VALID = np.ones((B, T), bool)
VALID[0, 90:128] = VALID[1, 145:] = False
MASKS = {"is_start": STARTS, "valid": VALID}
RULES = {"delta": GATED_DELTA, "ssd": SSD}


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(recurrence, "current_device", lambda: ("tpu", "TPU v5p"))


@pytest.fixture
def interpreted(on_tpu, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


def inputs(rule, dtype="float32", heads=(1, 2), slow=0.05, value=VALUE):
    """Inputs of key heads, or groups, and of value heads, and a state before the first token."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    K, N = heads
    keys, values = (draw(B, T, K, KEY) for _ in "qk"), draw(B, T, N, value)
    q, k, v = (np.asarray(jnp.asarray(a, dtype)) for a in (*keys, values))
    rate = draw(B, T, N)
    if rule is SSD:
        x = {"x": v, "b": k, "c": q, "dt": np.log1p(np.exp(rate)), "a": -slow * np.exp(draw(N)), "d": draw(N)}
        return x | {"initial_state": draw(B, N, value, KEY)}
    x = {"q": q, "k": k, "v": v, "log_decay": -slow * np.log1p(np.exp(rate)), "beta": 2 / (1 + np.exp(-draw(B, T, N)))}
    return x | {"initial_state": draw(B, N, KEY, value)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def results(rule, implementation, x, masks):
    """Outputs, the last state, and gradients of all inputs."""

    def loss(x):
        out, state = rule(x, **masks, implementation=implementation)
        weights = np.random.default_rng(3).integers(-9, 10, out.shape).astype(np.float32)  # exact in bfloat16
        return jnp.sum(out * weights) + jnp.sum(state**2), (out, state)

    gradients, (out, state) = jax.grad(loss, has_aux=True)(x)
    return {"out": out, "state": state} | gradients


def errors(rule, x):
    """Of every result, the norm of the difference from float64 by the norm."""
    got = jax.device_get(results(rule, NAME, x, MASKS))
    with jax.enable_x64(True):
        want = jax.device_get(results(rule, "sequential", in_float64(x), MASKS))
    far = lambda a, b: np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
    return {name: far(got[name], want[name]) for name in want}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_it_is_the_definition(rule, interpreted):
    """Values and gradients, with documents, padding, steps up to 2, and a state before the first token."""
    off = errors(rule, inputs(rule))
    assert max(off.values()) < 3e-6, off


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_matmuls_in_bfloat16_keep_the_gradients_of_gates(rule, interpreted):
    """Results in bfloat16 are rounded once; sums and what is float32 keep 16 digits."""
    x = inputs(rule, "bfloat16")
    with ops.tile_sizes(MosaicTpuTiles(columns=256)):  # two programs share a key head
        off = errors(rule, x)
    narrow = {"out", "x", "b", "c", "q", "k", "v"}
    assert all(error < (4e-3 if name in narrow else 4e-4) for name, error in off.items()), off


@pytest.mark.full
@pytest.mark.parametrize("slow", [3e-3, 40.0])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_fast_and_slow_decays(rule, slow, interpreted):
    off = errors(rule, inputs(rule, heads=(2, 4), slow=slow, value=64))
    assert max(off.values()) < 1e-5, off


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_devices_that_share_rows_heads_and_tokens_are_one(rule, interpreted):
    x = inputs(rule, heads=(4, 8), value=128)
    x = {name: a[:, :144] if a.ndim > 1 and a.shape[1] == T else a for name, a in x.items()}
    by_head = {"a": P("tensor"), "d": P("tensor"), "initial_state": P("fsdp", "tensor")}
    specs = {name: by_head.get(name, P("fsdp", "context", "tensor")) for name in x}
    starts = jnp.asarray(STARTS[:, :144])

    def local(x, starts):
        return rule(x, is_start=starts, implementation=NAME, axis_name="context")

    ends = {
        "in_specs": (specs, P("fsdp", "context")),
        "out_specs": (P("fsdp", "context", "tensor"), P("fsdp", "tensor")),
    }
    split = jax.shard_map(local, mesh=sharding.make_mesh(fsdp=2, context=2, tensor=2), **ends, check_vma=False)
    loss = lambda run: lambda x: sum(jnp.sum(a**2) for a in run(x, starts))
    alone = lambda x, starts: rule(x, is_start=starts, implementation="chunked")
    for got, want in zip(
        *(jax.tree.leaves(jax.jit(jax.value_and_grad(loss(run)))(x)) for run in (split, alone)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_the_inverse_of_a_triangle():
    """Also of keys that all point the same way, for which a power series would overflow."""
    for lower in (np.random.default_rng(0).normal(size=(128, 128)) * 0.3, np.full((128, 128), 0.9)):
        lower = np.tril(lower, -1).astype(np.float32)
        want = np.linalg.inv(np.eye(128) + lower.astype(np.float64))
        for exact, most in ((True, 1e-6), (False, 5e-5)):
            got = jax.jit(functools.partial(inverse, Form(True, True, 1.0, exact)))(lower)
            assert np.abs(got - want).max() < most * np.abs(want).max()


def test_heads_are_shared_among_programs():
    assert Shares.of(16, 32, 128, 1024) == Shares(key_heads=4, heads=2, unit=2, splits=1, programs=4)
    assert Shares.of(8, 128, 64, 1024) == Shares(key_heads=1, heads=16, unit=4, splits=1, programs=8)
    assert Shares.of(1, 48, 64, 1024) == Shares(key_heads=1, heads=16, unit=4, splits=3, programs=3)
    assert Shares.of(4, 4, 2048, 1024) == Shares(key_heads=1, heads=1, unit=1, splits=1, programs=4)
    assert Shares.of(1, 2, 256, 256) == Shares(key_heads=1, heads=1, unit=1, splits=2, programs=2)
    assert Shares.of(8, 8, 64, 1024) is None


# ------------------------------------------------------------------------------------------------ the choice


def explained(rule, device=("tpu", "v5p"), dtype=jnp.bfloat16, widths=(128, 128), heads=(8, 16), **options):
    keys, values = (jax.ShapeDtypeStruct((2, 2048, *size), dtype) for size in zip(heads, widths, strict=True))
    if rule is SSD:
        return ops.explain_ssd(values, keys, device=device, **options)
    return ops.explain_gated_delta_rule(keys, values, device=device, **options)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_it_runs_by_name_where_it_can(rule):
    assert explained(rule).chosen == "chunked"
    assert explained(rule).refused[NAME] == "runs only by name: no TPU has run it yet"
    choice = explained(rule, implementation=NAME)
    assert choice.chosen == NAME and choice.tiles == MosaicTpuTiles()
    for change, reason in (
        ({"dtype": jnp.float16}, "takes values in bfloat16 or float32, not in float16"),
        ({"widths": (96, 128)}, "keys whose width is a multiple of 128, not 96"),
        ({"widths": (128, 96)}, "a multiple in each key head's heads, not 2 of 96"),
        ({"device": ("gpu", "H100")}, "runs on tpu, not on gpu"),
    ):
        choice = explained(rule, **change, implementation=NAME)
        assert choice.chosen is None and reason in choice.refused[NAME]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_programs_for_tpus_call_a_kernel_in_each_pass(rule, on_tpu):
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs(rule, "bfloat16").items()}
    loss = lambda x: rule(x, implementation=NAME)[0].astype(jnp.float32).sum()
    stages = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), x)  # of a pipeline
    for run, arrays in ((jax.grad(loss), x), (jax.vmap(jax.grad(loss)), stages)):
        text = jax.jit(run).trace(arrays).lower(lowering_platforms=("tpu",)).as_text()
        assert [text.count(f"recurrence_{name}") > 0 for name in ("forward", "backward")] == [True, True]
        assert text.count("@tpu_custom_call(") == 2
    assert forward_flops(loss, x) == forward_flops(lambda x: rule(x, implementation="chunked")[0].sum(), x)


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.full
def test_a_plan_from_shapes_needs_no_tpu():
    """Although layers name a kernel for TPUs: only the program that is compiled has it."""
    estimates = [plan.estimated(plan.Job(model, "v5p-8", sequence=256)) for model in (jobs.recurrent, plain)]
    assert estimates[0].peak == estimates[1].peak and estimates[0].model_flops == estimates[1].model_flops


def plain():
    return jobs.recurrent("chunked")


@pytest.mark.full
@pytest.mark.skipif(not has_tpu_compiler(), reason="needs libtpu")
def test_a_compiled_plan_counts_the_kernels():
    kernels, chunked = (plan.plan(plan.Job(model, "v5p-8", sequence=1024)) for model in (jobs.recurrent, plain))
    assert kernels.costs and chunked.costs
    assert kernels.costs.bytes < 0.8 * chunked.costs.bytes
    assert 0.8 * chunked.costs.flops < kernels.costs.flops < 2 * chunked.costs.flops
