"""Kernels of jax-linear-attention: the choice, layouts against the definitions, calls for CUDA, and runs on a GPU."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.ops._recurrent import jax_linear_attention as module
from maxlib.ops._recurrent import recurrence
from maxlib.ops._recurrent.jax_linear_attention import installed_version
from maxlib.plan._targets import devices_of, has_gpu_compiler, parse_target
from tests.ops import linear_attention_package as package
from tests.ops.hopper import gpu, no_gpu
from tests.ops.recurrences import GATED_DELTA, KDA, RECURRENCES, STARTS, VALID, close, in_float64

NAME = "jax_linear_attention"
H100, A100, B200 = package.H100, ("gpu", "NVIDIA A100-SXM4-80GB"), ("gpu", "NVIDIA B200")
# Autodiff makes the gradients of layouts and what devices exchange of all rules alike.
OTHERS = [pytest.param(rule, marks=pytest.mark.full) for rule in RECURRENCES.values() if rule is not GATED_DELTA]
mostly_full = pytest.mark.parametrize("rule", [GATED_DELTA, *OTHERS], ids=RECURRENCES)
needs_package = pytest.mark.skipif(installed_version() is None, reason="needs jax-linear-attention")


@pytest.fixture(params=RECURRENCES.values(), ids=RECURRENCES)
def rule(request):
    return request.param


@pytest.fixture
def ranks_promoted():
    """The package adds arrays of unequal ranks, which tests/conftest.py forbids."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(module, "installed_version", lambda: (0, 1, 0))


# ------------------------------------------------------------------------------------------------ the choice


def explained(rule, device=H100, dtype=jnp.bfloat16, tokens=2048, heads=(8, 16), widths=(128, 128), **options):
    """For keys and values of these widths; SSD has them in another order."""
    array = lambda heads, width: jax.ShapeDtypeStruct((2, tokens, heads, width), dtype)
    keys, values = array(heads[0], widths[0]), array(heads[1], widths[1])
    if rule.op == "ssd":
        return ops.explain_ssd(values, keys, device=device, **options)
    if rule is KDA:
        values = array(heads[0], widths[1])
    return ops.explain_gated_delta_rule(keys, values, by_channel=rule is KDA, device=device, **options)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (H100, None),
        (("gpu", "H200"), None),
        (("gpu", "GH200"), None),
        (A100, "for NVIDIA's Hopper .*, not for NVIDIA A100"),
        (B200, "for NVIDIA's Hopper .*, not for NVIDIA B200"),
        (("tpu", "v5p"), "runs on gpu, not on tpu"),
        (("cpu", "cpu"), "runs on gpu, not on cpu"),
    ],
    ids=str,
)
def test_hopper_gets_them_where_they_are_installed(rule, device, reason, installed):
    choice = explained(rule, device)
    assert choice.chosen == (NAME if reason is None else "chunked")
    assert re.search(reason or "^$", choice.refused.get(NAME, ""))
    assert explained(rule, device, tokens=8).chosen == "sequential"


def test_where_they_are_not_installed_the_reason_says_how(rule, monkeypatch):
    monkeypatch.setattr(module, "installed_version", lambda: None)
    assert explained(rule).chosen == "chunked"
    assert "pip install 'maxlib[linear-attention]' on Python 3.12" in explained(rule).refused[NAME]
    monkeypatch.setattr(module, "installed_version", lambda: (0, 2, 1))
    assert "needs version 0.1 of jax-linear-attention, not 0.2.1" in explained(rule).refused[NAME]


@pytest.mark.parametrize(
    ("rule", "change", "reason"),
    [
        *[(rule, dict(dtype=jnp.float32), "not in float32") for rule in RECURRENCES.values()],
        (KDA, dict(dtype=jnp.float16), "values in bfloat16, not in float16"),
        (GATED_DELTA, dict(widths=(96, 192)), "256 x 256 or 256 x 512, not of 96 x 192"),
        (KDA, dict(widths=(128, 256)), "128 x 64 or 128 x 128, not of 128 x 256"),
        (KDA, dict(heads=(3, 3), widths=(64, 64)), "heads of 64 in pairs, not 3"),
        (RECURRENCES["ssd"], dict(widths=(256, 64)), "not of 256 x 64"),
        (GATED_DELTA, dict(l2_norm=False), "keys of unit norm: pass l2_norm=True"),
        (KDA, dict(tokens=1 << 21), "at most 2097088 tokens"),
        (KDA, dict(axis_name="context"), "not of 128 x 256"),
    ],
    ids=lambda value: value.op if hasattr(value, "op") else str(value),
)
def test_what_they_cannot_run_is_explained(rule, change, reason, installed):
    choice = explained(rule, **change)
    assert choice.chosen == "chunked" and reason in choice.refused[NAME]
    assert explained(rule, **change, implementation=NAME).chosen is None


def test_arrays_that_vary_over_a_mesh_axis_are_refused(installed, monkeypatch):
    monkeypatch.setattr("maxlib.ops._recurrent.recurrence.current_device", lambda: H100)
    x = jnp.ones((8, 70, 2, 64), jnp.bfloat16), jnp.ones((8, 70, 2))
    run = lambda q, beta: ops.gated_delta_rule(q, q, q, q, beta, implementation=NAME)[0]
    with pytest.raises(ValueError, match="pass check_vma=False to jax.shard_map"):
        jax.shard_map(run, mesh=sharding.make_mesh(data=8), in_specs=P("data"), out_specs=P("data"))(*x)


# ------------------------------------------------------------------------------------------------ layouts


@pytest.fixture(params=["contract", pytest.param("reference", marks=needs_package)])
def stand_in(request, monkeypatch):
    """What the package computes by its documentation, and its own definition, in the place of its kernels."""
    package.install(monkeypatch, getattr(package, request.param))


@no_gpu
def test_arrays_reach_the_kernels_in_their_layout(rule, stand_in):
    """With documents, padding, a state before the first token, and heads that share keys or groups; and without."""
    x, state = rule.inputs(), rule.initial_state()
    for options in ((STARTS, VALID, state), (None, None, None)):
        want = rule.definition(**x, **dict(zip(("is_start", "valid", "state"), options, strict=True)))
        for ours, theirs in zip(rule.run(x, *options, NAME), want, strict=True):
            close(ours, theirs, rule.atol)


@no_gpu
@mostly_full
def test_gradients_return_in_ours(rule, stand_in):
    x = rule.inputs() | {"initial_state": rule.initial_state()}
    masks = {"is_start": jnp.asarray(STARTS), "valid": jnp.asarray(VALID)}

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, x):
        loss = lambda x: sum(jnp.sum(part**2) for part in rule(x, **masks, implementation=implementation))
        return jax.grad(loss)(x)

    with jax.enable_x64(True):
        want = jax.device_get(gradients("sequential", in_float64(x)))
    got = gradients(NAME, jax.tree.map(jnp.asarray, x))
    for name in x:
        close(got[name], want[name], 1e-4)


@no_gpu
@mostly_full
def test_devices_that_share_a_sequence_are_one(rule, stand_in):
    x, before, starts = rule.inputs(tokens=160), rule.initial_state(), np.pad(STARTS, ((0, 0), (0, 10)))
    tokens = P(None, "context")
    specs = {name: P() if part.ndim == 1 else tokens for name, part in x.items()}

    def local(x, starts, state):
        return rule(x, is_start=starts, initial_state=state, implementation=NAME, axis_name="context")

    ends = {"in_specs": (specs, tokens, P()), "out_specs": (tokens, P())}
    split = jax.shard_map(local, mesh=sharding.make_mesh(context=8), **ends, check_vma=False)
    for ours, theirs in zip(jax.jit(split)(x, starts, before), rule.run(x, starts, None, before), strict=True):
        close(ours, theirs, 2e-5)


# ------------------------------------------------------------------------------------------------ calls for CUDA


def shapes(rule, tokens=1000, heads=(4, 8), widths=(128, 128)):
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((2, tokens, *shape), dtype)
    (K, N), (HK, HV), wide = heads, widths, jnp.float32
    if rule.op == "ssd":
        rates = {"dt": array(N, dtype=wide), "a": jax.ShapeDtypeStruct((N,), wide)}
        return {"x": array(N, HV), "b": array(K, HK), "c": array(K, HK), **rates}
    K, decay = (N, (N, HK)) if rule is KDA else (K, (N,))
    rates = {"log_decay": array(*decay, dtype=wide), "beta": array(N, dtype=wide)}
    return {"q": array(K, HK), "k": array(K, HK), "v": array(N, HV), **rates}


def calls(run, *arrays, axes=(1,)):
    """The number of kernels in a program for an H100."""
    device = AbstractDevice(H100[1], None, "gpu")
    place = AbstractMesh(axes, ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(place):
        text = jax.jit(run(place)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"custom_call @mosaic_gpu_v2\(", text))


SIZES = {  # heads of keys and values, widths
    "Qwen3-Next": (GATED_DELTA, (2, 4), (128, 128)),
    "heads of 64": (GATED_DELTA, (2, 2), (64, 64)),
    "OLMo-like, wide": (GATED_DELTA, (2, 2), (256, 512)),
    "Kimi Linear": (KDA, (4, 4), (128, 128)),
    "Kimi, heads of 64": (KDA, (2, 2), (64, 64)),
    "Nemotron-H": (RECURRENCES["ssd"], (2, 8), (128, 64)),
    "Mamba-2, one group": (RECURRENCES["ssd"], (1, 4), (64, 64)),
}
# Forward, and both passes: the kernels in the order of the package's files.
KERNELS = {"gated_delta_rule": (2, 6), "kimi_delta_attention": (4, 10), "ssd": (1, 6)}


@needs_package
@no_gpu
def test_programs_for_hopper_call_the_kernels(rule, ranks_promoted):
    x = shapes(rule)
    forward = lambda x: rule(x)[0].astype(jnp.float32).sum()
    assert calls(lambda place: forward, x) >= KERNELS[rule.op][0]
    assert calls(lambda place: jax.grad(forward), x) >= KERNELS[rule.op][1]
    stages = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), x)
    assert calls(lambda place: jax.vmap(jax.grad(forward)), stages) >= KERNELS[rule.op][1]
    specs = {name: P() if part.ndim == 1 else P("data") for name, part in x.items()}
    split = lambda place: jax.shard_map(
        jax.grad(forward), mesh=place, in_specs=(specs,), out_specs=specs, check_vma=False
    )
    assert calls(split, x, axes=(2,)) >= KERNELS[rule.op][1]


@pytest.mark.full
@needs_package
@no_gpu
@pytest.mark.skipif(not has_gpu_compiler(), reason="needs jax's plugin for CUDA")
def test_kernels_become_machine_code(rule, monkeypatch, ranks_promoted):
    """Of both passes, with documents and a state; XLA compiles for an H100 that is not there."""
    monkeypatch.setattr(recurrence, "current_device", lambda: H100)
    here = jax.sharding.SingleDeviceSharding(devices_of(parse_target("h100x1"))[0])
    x = shapes(rule, 300, *next(sizes for known, *sizes in SIZES.values() if known is rule))
    state = jax.eval_shape(functools.partial(state_of, rule), x)
    inputs = x, state, {"is_start": jax.ShapeDtypeStruct((2, 300), bool)}
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), inputs)

    def loss(x, state, masks):
        out, last = rule(x, **masks, initial_state=state, implementation=NAME)
        return out.astype(jnp.float32).sum() + (last**2).sum()

    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*placed).lower(lowering_platforms=("cuda",))
    assert lowered.compile({"xla_gpu_autotune_level": 0}).memory_analysis().temp_size_in_bytes > 0


# ------------------------------------------------------------------------------------------------ values


def random(rule, tokens, heads, widths, slow, seed=0):
    """Inputs as layers give them: in bfloat16, with rates in float32; log decays down to about -4 slow."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    made = {}
    for name, like in shapes(rule, tokens, heads, widths).items():
        x = jax.random.normal(next(keys), like.shape)
        x = -slow * jax.nn.softplus(x) if name in ("log_decay", "a") else x
        x = {"beta": jax.nn.sigmoid, "dt": jax.nn.softplus}.get(name, lambda x: x)(x)
        made[name] = x.astype(like.dtype)
    return made


def results(rule, implementation, x, state, masks, weights):
    """Outputs, the last state, and gradients of every input and of the first state."""

    def loss(x, state):
        out, last = rule(x, **masks, initial_state=state, implementation=implementation)
        return jnp.sum(out.astype(weights.dtype) * weights) + jnp.sum(last**2), (out, last)

    gradients, (out, last) = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, state)
    return {"out": out, "state": last, "d_state": gradients[1]} | {f"d_{name}": x for name, x in gradients[0].items()}


compiled = jax.jit(results, static_argnums=(0, 1))


def errors(got, want):
    """Of every array, the norm of the difference by the norm of the array."""
    far = lambda a, b: np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-12)
    return {name: far(got[name], want[name]) for name in want}


def state_of(rule, x):
    if rule.op == "ssd":
        (B, _, N, HV), HK = x["x"].shape, x["b"].shape[-1]
        return jax.random.normal(jax.random.key(8), (B, N, HV, HK))
    (B, _, N, HV), HK = x["v"].shape, x["k"].shape[-1]
    return jax.random.normal(jax.random.key(8), (B, N, HK, HV))


def compared(rule, run, tokens, heads, widths, slow, *, documents=True):
    x = random(rule, tokens, heads, widths, slow)
    rng = np.random.default_rng(1)
    starts, valid = rng.random((2, tokens)) < 3 / tokens, np.ones((2, tokens), bool)
    starts[0, 0], valid[0, -7:], valid[1, 40:70] = True, False, False
    masks = {"is_start": jnp.asarray(starts), "valid": jnp.asarray(valid)} if documents else {}
    state, weights = state_of(rule, x), rng.normal(size=x["x" if rule.op == "ssd" else "v"].shape)
    got = jax.device_get(run(x, state, masks, jnp.asarray(weights, jnp.float32)))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (x, state))
        want = compiled(rule, "sequential", *wide, masks, jnp.asarray(weights))
        return errors(got, jax.device_get(want))


TOLERANCE = {"out": 1e-2, "state": 1e-2}  # operands in bfloat16; of gradients, which pass through twice as many, double


def check(differences):
    assert all(error < TOLERANCE.get(name, 2e-2) for name, error in differences.items()), differences


@pytest.mark.full
@needs_package
@no_gpu
@pytest.mark.parametrize("slow", [0.05, 10.0, 40.0])
def test_kimi_in_the_interpreter(slow):
    """Kernels of both passes, with log decays down to -150: nothing overflows."""
    command = [sys.executable, "-m", "tests.ops.linear_attention_interpreter", str(slow)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]


@gpu
@needs_package
@pytest.mark.parametrize("slow", [0.05, 10.0, 40.0])
@pytest.mark.parametrize(("rule", "heads", "widths"), SIZES.values(), ids=SIZES)
def test_on_a_gpu_they_equal_the_definition(rule, heads, widths, slow, ranks_promoted):
    """Outputs, states and gradients, with documents, padding and states before the first token; strong decays too."""
    if slow != 0.05 and heads[1] < 4:
        pytest.skip("once for each operation")
    check(compared(rule, functools.partial(compiled, rule, NAME), 300, heads, widths, slow))


@gpu
@needs_package
def test_on_a_gpu_long_rows_are_cut_into_pieces(rule, ranks_promoted):
    """Few heads and many tokens: the package's kernels work on pieces of a row at a time."""
    differences = compared(rule, functools.partial(compiled, rule, NAME), 2100, (2, 2), (64, 64), 0.01)
    check(differences)
    check(compared(rule, functools.partial(compiled, rule, NAME), 2100, (2, 2), (64, 64), 0.01, documents=False))
