"""Kernels of flash-linear-attention: the choice, runs in Triton's interpreter, machine code for GPUs, runs on one."""

import functools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.hardware import is_ampere_or_ada, is_ampere_or_later, is_hopper
from maxlib.ops import _jax_linear_attention
from maxlib.ops._fla import choice
from maxlib.ops._fla.launch import over_rows
from maxlib.ops._fla.tokens import per_group, per_head, summed
from tests.ops.hopper import no_gpu, on_a_gpu
from tests.ops.recurrences import GATED_DELTA, KDA, RECURRENCES, SSD
from tests.ops.test_jax_linear_attention import SIZES, check, compared, compiled, explained, shapes, state_of

NAME = "fla"
A100, L40S, H100 = ("gpu", "NVIDIA A100-SXM4-80GB"), ("gpu", "NVIDIA L40S"), ("gpu", "NVIDIA H100 80GB HBM3")
B200, RTX = ("gpu", "NVIDIA B200"), ("gpu", "NVIDIA GeForce RTX 5090")
needs_package = pytest.mark.skipif(bool(choice.lacking()), reason="needs fla-core, jax-triton and torch")


@pytest.fixture(params=RECURRENCES.values(), ids=RECURRENCES)
def rule(request):
    return request.param


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(choice, "lacking", lambda: ())
    monkeypatch.setattr(_jax_linear_attention, "installed_version", lambda: (0, 1, 0))


# ------------------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    ("device", "chosen", "reason"),
    [
        (A100, NAME, "^$"),
        (L40S, NAME, "^$"),
        (B200, NAME, "^$"),
        (RTX, NAME, "^$"),
        (H100, "jax_linear_attention", "is not for Hopper"),
        (("gpu", "Tesla T4"), "chunked", "since Ampere, not for Tesla T4"),
        (("tpu", "v5p"), "chunked", "runs on gpu, not on tpu"),
        (("cpu", "cpu"), "chunked", "runs on gpu, not on cpu"),
    ],
    ids=str,
)
def test_gpus_other_than_hopper_get_them(rule, device, chosen, reason, installed):
    found = explained(rule, device)
    assert found.chosen == chosen and re.search(reason, found.refused.get(NAME, ""))
    assert explained(rule, device, tokens=8).chosen == "sequential"


def test_where_they_are_not_installed_the_reason_says_how(rule, monkeypatch):
    versions = {"fla-core": (0, 7), "jax-triton": (0, 4, 1), "triton": (3, 7), "torch": ()}
    monkeypatch.setattr(choice, "version", versions.get)
    monkeypatch.setattr(choice, "lacking", choice.lacking.__wrapped__)
    found = explained(rule, A100)
    assert found.chosen == "chunked"
    assert "needs fla-core 0.6, triton 3.8, torch 2.7: pip install 'maxlib[fla]' on Python 3.12" in found.refused[NAME]


@pytest.mark.parametrize(
    ("rule", "change", "reason"),
    [
        *[(rule, dict(dtype=jnp.float32), "not in float32") for rule in RECURRENCES.values()],
        (GATED_DELTA, dict(widths=(320, 64)), "keys whose width is a multiple of 16 up to 256, not of 320"),
        (KDA, dict(widths=(64, 72)), "values whose width is a multiple of 16 up to 1024, not of 72"),
        (GATED_DELTA, dict(l2_norm=False), "keys of unit norm: pass l2_norm=True"),
        (SSD, dict(heads=(8, 40_000)), "at most 65535 heads of all rows together, not 80000"),
    ],
    ids=lambda one: one.op if hasattr(one, "op") else str(one),
)
def test_what_they_cannot_run_is_explained(rule, change, reason, installed):
    found = explained(rule, B200, **change)
    assert found.chosen == "chunked" and reason in found.refused[NAME]
    assert explained(rule, B200, **change, implementation=NAME).chosen is None


def test_arrays_that_vary_over_a_mesh_axis_are_refused(installed, monkeypatch):
    monkeypatch.setattr("maxlib.ops._kda.api.current_device", lambda: A100)
    x = jnp.ones((8, 70, 2, 64), jnp.bfloat16), jnp.ones((8, 70, 2))
    run = lambda q, beta: ops.kimi_delta_attention(q, q, q, q, beta, implementation=NAME)[0]
    with pytest.raises(ValueError, match="pass check_vma=False to jax.shard_map"):
        jax.shard_map(run, mesh=sharding.make_mesh(data=8), in_specs=P("data"), out_specs=P("data"))(*x)


WITHOUT = """
import sys
import jax.numpy as jnp
from maxlib import models, nn, ops
x = jnp.ones((1, 100, 2, 128), jnp.bfloat16)
found = ops.explain_gated_delta_rule(x, x, device=("gpu", "NVIDIA A100-SXM4-80GB")).chosen
print(found, any(name in sys.modules for name in ("fla", "jax_triton", "torch")))
"""


def test_nothing_imports_the_packages_before_they_run(tmp_path):
    versions = {"fla_core": "0.6.0", "jax_triton": "0.4.1", "triton": "3.9.0", "torch": "2.9.0"}
    for name, version in versions.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    env = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == [NAME, "False"], done.stderr[-2000:]


def test_generations_by_name():
    assert all(map(is_ampere_or_ada, ["NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA GeForce RTX 4090", L40S[1]]))
    assert not any(map(is_ampere_or_ada, [B200[1], H100[1], RTX[1], "NVIDIA RTX PRO 6000 Blackwell", "Tesla T4"]))


# ------------------------------------------------------------------------------------------------ what is not a kernel


def test_sums_of_decays_end_with_a_document():
    decay = -np.random.default_rng(0).random((2, 100, 3)).astype(np.float32)
    starts = np.zeros((2, 100), bool)
    starts[0, [0, 10, 70]] = True
    sums = np.asarray(summed(jnp.asarray(decay), jnp.asarray(starts)), np.float64)
    assert sums.shape == (2, 128, 3)
    whole = np.where(starts[..., None], 0, decay)
    for begin, end in ((0, 10), (10, 64), (64, 70), (70, 100)):
        want = whole[0, begin:end].cumsum(0) - whole[0, begin]
        np.testing.assert_allclose(
            (sums[0, begin:end] - sums[0, begin]) * np.log(2), want, atol=3e-4
        )  # of sums near 320
    reaches = np.exp2((sums[0, :64, None] - sums[0, None, :64]).astype(np.float32))  # [query, key, head]
    assert (reaches[10:, :10] == 0).all() and (np.exp2(sums[0, :64].astype(np.float32)) == 0).all()
    np.testing.assert_allclose(sums[:, 100:], sums[:, [99] * 28], rtol=1e-6)  # padding keeps the state
    slope = jax.grad(lambda x: summed(x, jnp.asarray(starts))[:, :5].sum())(jnp.asarray(decay))
    want = np.pad(np.arange(5, 0, -1), (0, 95)) * np.log2(np.e)
    np.testing.assert_allclose(slope[1, :, 0], want, rtol=1e-5)
    assert slope[0, 0, 0] == 0  # what the first token forgets does not count


def test_what_heads_share_gets_the_sum_of_their_gradients():
    x = jnp.arange(24.0).reshape(1, 2, 3, 4)
    each = jax.random.normal(jax.random.key(0), (1, 2, 6, 4))
    want = jax.vjp(lambda x: per_head(x, 6), x)[1](each)[0]
    np.testing.assert_allclose(per_group(each, x), want, rtol=1e-6)


def test_mapped_rows_are_more_rows():
    run = over_rows(lambda x, y, none: (x.sum(1), x[:, 0] + y))
    x, y = jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(3.0)
    sums, first = jax.vmap(run, in_axes=(0, None, None))(x, y, None)
    np.testing.assert_array_equal(sums, x.sum(2))
    np.testing.assert_array_equal(first, x[:, :, 0] + y[None])


# ------------------------------------------------------------------------------------------------ values


full = pytest.mark.full


@needs_package
@no_gpu
@pytest.mark.parametrize(
    ("dtype", "cases"),
    [
        ("bfloat16", ["slow"]),
        pytest.param("bfloat16", ["fast", "very fast", "wide", "narrow"], marks=full),
        pytest.param("float16", ["slow", "very fast"], marks=full),
        pytest.param("float32", ["slow", "very fast"], marks=full),
    ],
    ids=["bfloat16", "bfloat16, other cases", "float16", "float32"],
)
def test_in_the_interpreter_they_equal_the_definition(rule, dtype, cases):
    """Outputs, states and gradients, with documents, padding, states, shared heads; decays down to exp(-150)."""
    command = [sys.executable, "-m", "tests.ops.fla_interpreter", rule.op, dtype, *cases]
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == cases
    for errors in found.values():
        check(errors)
        assert dtype != "float32" or max(errors.values()) < 5e-5, errors


# ------------------------------------------------------------------------------------------------ calls for CUDA


KERNELS = {"gated_delta_rule": (4, 10), "kimi_delta_attention": (5, 11), "ssd": (2, 6)}  # forward, and both passes


def calls(run, kind, *arrays, axes=(1,)):
    """The number of Triton's kernels in a program for a GPU that is not there."""
    device = AbstractDevice(kind, None, "gpu")
    place = AbstractMesh(axes, ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(place):
        text = jax.jit(run(place)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall("@triton_kernel_call", text))


@needs_package
@no_gpu
@pytest.mark.parametrize("kind", [A100[1], B200[1]])
def test_programs_call_the_kernels(rule, kind):
    x = shapes(rule)
    forward = lambda x: sum((part.astype(jnp.float32) ** 2).sum() for part in rule(x))
    assert calls(lambda place: forward, kind, x) == KERNELS[rule.op][0]
    assert calls(lambda place: jax.grad(forward), kind, x) == KERNELS[rule.op][1]
    stages = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), x)
    assert calls(lambda place: jax.vmap(jax.grad(forward)), kind, stages) == KERNELS[rule.op][1]
    specs = {name: P() if part.ndim == 1 else P("data") for name, part in x.items()}
    split = lambda place: jax.shard_map(
        jax.grad(forward), mesh=place, in_specs=(specs,), out_specs=specs, check_vma=False
    )
    assert calls(split, kind, x, axes=(2,)) == KERNELS[rule.op][1]


@pytest.mark.full
@needs_package
@no_gpu
@pytest.mark.parametrize(("kind", "capability"), [(A100[1], 80), (L40S[1], 89), (B200[1], 100), (RTX[1], 120)], ids=str)
@pytest.mark.parametrize("widths", [(128, 128), (256, 256), (96, 192)], ids=str)
def test_kernels_become_machine_code(rule, kind, capability, widths, monkeypatch, tmp_path):
    """By NVIDIA's assembler; and none needs more shared memory than Ada and consumers' GPUs have, 99 KiB."""
    from jax_triton import triton_lib

    capabilities = types.SimpleNamespace(get_gpu_info=lambda: types.SimpleNamespace(compute_capability=capability))
    monkeypatch.setattr(triton_lib, "gpu_info", capabilities)
    made, compile_one = [], triton_lib.compile_ttir_to_ptx_inplace
    kept = lambda *given: made.append(compile_one(*given)) or made[-1]
    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", kept)
    x = shapes(rule, 300, (2, 4), widths)
    state = jax.eval_shape(functools.partial(state_of, rule), x)

    def loss(x, state, starts):
        out, last = rule(x, is_start=starts, initial_state=state, implementation=NAME)
        return out.astype(jnp.float32).sum() + (last**2).sum()

    given = x, state, jax.ShapeDtypeStruct((2, 300), bool)
    jax.clear_caches()
    calls(lambda place: jax.grad(loss, argnums=(0, 1)), kind, *given)
    assert len(made) >= KERNELS[rule.op][1] - 1  # a kernel that runs twice may be one program
    for kernel in made:
        assert kernel.shared_mem_bytes <= 99 * 1024, (kernel.name, kernel.shared_mem_bytes)
        assert assembled(kernel.binary, tmp_path) == 0, kernel.name


def assembled(ptx: str, folder: Path) -> int:
    """Assembles a program, and returns the exit status."""
    from triton import knobs

    (folder / "kernel.ptx").write_text(ptx)
    target = re.search(r"\.target (\w+)", ptx)[1]
    tool = knobs.nvidia.ptxas_blackwell if target.startswith("sm_1") else knobs.nvidia.ptxas
    command = [tool.path, f"-arch={target}", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True).returncode


# ------------------------------------------------------------------------------------------------ on a GPU


def gpu(test):
    """Marks a test that runs on an NVIDIA GPU since Ampere, other than Hopper."""
    kind = jax.devices()[0].device_kind
    other = on_a_gpu and (is_hopper(kind) or not is_ampere_or_later(kind))
    return pytest.mark.gpu(needs_package(pytest.mark.skipif(other, reason="for Ampere, Ada and Blackwell")(test)))


@gpu
@pytest.mark.parametrize("slow", [0.05, 10.0, 40.0])
@pytest.mark.parametrize(("rule", "heads", "widths"), SIZES.values(), ids=SIZES)
def test_on_a_gpu_they_equal_the_definition(rule, heads, widths, slow):
    """Outputs, states and gradients, with documents, padding and states before the first token; strong decays too."""
    check(compared(rule, functools.partial(compiled, rule, NAME), 300, heads, widths, slow))


@gpu
def test_on_a_gpu_runs_are_equal(rule):
    """To the last bit: a race between a kernel's warps would show."""
    run = functools.partial(compiled, rule, NAME)
    first = compared(rule, run, 2100, (4, 8), (128, 128), 0.01)
    check(first)
    assert all(compared(rule, run, 2100, (4, 8), (128, 128), 0.01) == first for _ in range(5))
