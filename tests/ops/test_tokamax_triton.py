"""tokamax's grouped matmuls in Triton: run by Triton's interpreter, compiled for GPUs without one, and run on one."""

import functools
import json
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

from maxlib import ops
from maxlib.hardware import is_ampere_or_later
from maxlib.ops._grouped_matmul import tokamax_triton
from maxlib.ops._grouped_matmul.tokamax_triton import has_triton, tokamax
from tests.ops.hopper import no_gpu, on_a_gpu
from tests.ops.test_grouped_matmul import arrays, close, loop

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs tokamax 0.0.17, jax-triton and triton")
A100, H100, B200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200"
M, I, O = 308, 192, 320


@needs_triton
@no_gpu
def test_equal_a_loop_over_experts():
    """Experts without rows, rows of no expert that are NaN, tails of every size, and both orders of the weights."""
    run = [sys.executable, "-m", "tests.ops.triton_interpreter"]
    done = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 14
    for name, errors in differences.items():
        assert max(errors) < 1e-5, (name, errors)


def both(rows, weights, counts, d_out, **how):
    out, pull = jax.vjp(lambda rows, weights: ops.grouped_matmul(rows, weights, counts, **how), rows, weights)
    return out, *pull(d_out)


def shapes(dtype=jnp.bfloat16, lead=(), weight_dtype=None):
    array = lambda dtype, *shape: jax.ShapeDtypeStruct((*lead, *shape), dtype)
    weights = array(weight_dtype or dtype, 4, O, I)
    return array(dtype, 1000, I), weights, array(jnp.int32, 4), array(dtype, 1000, O)


def calls(run, kind, *arrays, axes=(1,), **mesh):
    """The kernels of a program for a GPU: of Triton, and JAX's."""
    device = AbstractDevice(kind, None, "gpu")
    place = AbstractMesh(axes, ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    run = jax.shard_map(run, mesh=place, **mesh) if mesh else run
    with jax.sharding.use_abstract_mesh(place):
        text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall("@triton_kernel_call", text)), text.count("@mosaic_gpu_v2(")


@needs_triton
@no_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_pass_is_a_kernel(dtype):
    assert calls(both, A100, *shapes(dtype)) == (3, 0)
    assert calls(both, B200, *shapes(dtype, weight_dtype=jnp.float32)) == (3, 0)
    assert calls(both, H100, *shapes()) == (0, 3)  # maxlib's own


@needs_triton
@no_gpu
def test_stages_of_a_pipeline_run_one_by_one():
    assert calls(jax.vmap(both), A100, *shapes(lead=(2,))) == (6, 0)


@needs_triton
@no_gpu
@pytest.mark.parametrize("check_vma", [False, True])
def test_shards_of_experts(check_vma):
    split = P("data")
    specs = {"in_specs": (split, P(), P(), split), "out_specs": (split, split, P())}
    assert calls(both, A100, *shapes(), axes=(8,), check_vma=check_vma, **specs) == (3, 0)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(tokamax_triton, "has_triton", lambda: True)


def explained(device, rows=((1000, I), jnp.bfloat16), **options):
    weights = jax.ShapeDtypeStruct((4, O, rows[0][1]), jnp.bfloat16)
    return ops.explain_grouped_matmul(jax.ShapeDtypeStruct(*rows), weights, device=device, **options)


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [(A100, "tokamax"), ("NVIDIA L40S", "tokamax"), (B200, "tokamax"), (H100, "mosaic_gpu"), ("Tesla T4", "tiled")],
)
def test_gpus_without_maxlibs_kernels_get_them(kind, chosen, installed):
    assert explained(("gpu", kind)).chosen == chosen


def test_where_they_are_not_installed_the_reason_says_how(monkeypatch):
    monkeypatch.setattr(tokamax_triton, "has_triton", lambda: False)
    choice = explained(("gpu", A100))
    assert choice.chosen == "tiled"
    assert "pip install 'maxlib[cuda]' on Python 3.12 or later" in choice.refused["tokamax"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(device=("gpu", "Tesla T4")), "since Ampere, not for Tesla T4"),
        (dict(device=("cpu", "cpu")), "runs on gpu, not on cpu"),
        (dict(rows=((8, I), jnp.float32)), "bfloat16 or float16, not in float32"),
        (dict(out_dtype=jnp.float32), "only returns the dtype of its rows"),
    ],
    ids=str,
)
def test_what_they_cannot_run_is_explained(change, reason, installed):
    assert reason in explained(**{"device": ("gpu", A100)} | change).refused["tokamax"]


def test_no_rows_at_all():
    rows, weights, d_out = arrays(0, 64, 128, 2)
    out, pull = jax.vjp(lambda *x: tokamax(*x, jnp.array([0, 0])), rows, weights)
    d_rows, d_weights = pull(d_out)
    assert out.shape == (0, 128) and d_rows.shape == (0, 64)
    np.testing.assert_array_equal(d_weights, np.zeros((2, 128, 64)))


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(on_a_gpu and not is_ampere_or_later(jax.devices()[0].device_kind), reason="needs Ampere or later")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("counts", [[101, 0, 77, 130], [1, 139, 3, 0], [0, 64, 0, 0]], ids=str)
def test_on_a_gpu_they_equal_a_loop(dtype, counts):
    rows, weights, d_out = arrays(M, I, O, 4, dtype)
    run = jax.jit(functools.partial(both, implementation="tokamax"))
    close(
        run(rows, weights, jnp.array(counts), d_out),
        loop(rows, weights, counts, d_out),
        4 * float(jnp.finfo(dtype).eps),
    )
