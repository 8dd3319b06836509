"""The installed compilers know every set of flags, and flags set too late raise an error."""

import os
import subprocess
import sys

import pytest

from maxlib import sharding
from maxlib.distributed import xla_flags
from maxlib.distributed.xla_flags import SETS

APPLY = """
import sys
from maxlib.distributed import xla_flags
xla_flags.apply(*sys.argv[1:])
assert "jax" not in sys.modules
import jax
jax.jit(lambda x: x + 1)(1.0)
import os
print(os.environ["XLA_FLAGS"])
"""


def start(*names: str, **environment: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | environment
    return subprocess.run([sys.executable, "-c", APPLY, *names], env=env, capture_output=True, text=True, timeout=200)


def test_all_sets_for_cpus_and_gpus_start_together():
    """An unknown flag aborts the process."""
    names = [name for name, each in SETS.items() if each.platform != "tpu"]
    done = start(*names, XLA_FLAGS="--xla_gpu_enable_pipelined_all_reduce=false")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[0] == "--xla_gpu_enable_pipelined_all_reduce=false"  # the user's own stays
    assert set(words[1:]) == {word for name in names for word in str(SETS[name]).split()} - {
        "--xla_gpu_enable_pipelined_all_reduce=true"
    }


TPU = "from jax.experimental import topologies as t; t.get_topology_desc(platform='tpu', topology_name='v5e:2x2')"


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, chosen in SETS.items() if chosen.platform == "tpu"])
def test_libtpu_knows_a_set(name):
    pytest.importorskip("libtpu")
    env = os.environ | xla_flags.WITHOUT_TPU | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": str(SETS[name])}
    done = subprocess.run([sys.executable, "-c", f"import libtpu; {TPU}"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_too_late_is_an_error(monkeypatch):
    import jax

    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(RuntimeError, match="too late for the flags"):
        xla_flags.apply("gpu-overlap")
    assert os.environ["XLA_FLAGS"] == ""


def test_names_and_values_must_fit():
    with pytest.raises(ValueError, match="no set of XLA flags is named 'gpu-fast'; known sets are cpu-quick-compile, "):
        xla_flags.options("gpu-fast")
    with pytest.raises(ValueError, match="xla_tpu_enable_async_collective_fusion_fuse_all_gather=False, another of"):
        xla_flags.options("tpu-overlap", "tpu-memory")
    assert xla_flags.options("gpu-deterministic", "tpu-vmem") == {
        **SETS["gpu-deterministic"].flags,
        **SETS["tpu-vmem"].flags,
    }


def test_libtpu_gets_its_own_variable(monkeypatch):
    monkeypatch.setattr(xla_flags, "_started", lambda: False)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1024")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    xla_flags.apply("tpu-vmem", "tpu-overlap")
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x"
    assert os.environ["LIBTPU_INIT_ARGS"].split() == [
        "--xla_tpu_scoped_vmem_limit_kib=1024",
        *str(SETS["tpu-overlap"]).split(),
    ]


def test_the_command_shows_every_set(capsys):
    xla_flags.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [f"{name}: {flags.goal}" for name, flags in SETS.items()]
    assert all(flags in line for line, flags in zip(lines[1::2], map(str, SETS.values()), strict=True))


H100, V6E = ("gpu", "NVIDIA H100 80GB HBM3"), ("tpu", "TPU v6 lite")


@pytest.mark.parametrize(
    ("device", "mesh", "names"),
    [
        (H100, {"fsdp": 8}, ("gpu-overlap",)),
        (H100, {"fsdp": 1}, ()),
        (H100, {}, ()),
        (V6E, {}, ("tpu-gather",)),
        (V6E, {"fsdp": 8, "tensor": 1}, ("tpu-gather",)),
        (V6E, {"fsdp": 4, "tensor": 2}, ()),
        (V6E, {"data": 4, "model": 2}, ()),  # a mesh that was made elsewhere
        (V6E, {"data": 4, "model": 1}, ("tpu-gather",)),
        (("tpu", "TPU v5"), {"fsdp": 8}, ()),
        (("cpu", "cpu"), {"fsdp": 8}, ()),
    ],
)
def test_a_step_gets_the_sets_that_suit_its_device(device, mesh, names):
    assert xla_flags.automatic(device, mesh) == names
    assert xla_flags.automatic_options(device, mesh) == xla_flags.options(*names)


def test_every_other_axis_of_a_mesh_is_known_to_be_none_of_tensor_parallelism():
    assert {*sharding.MESH_AXES} - {"tensor"} == xla_flags._NO_TENSOR


def test_flags_in_the_environment_win_over_automatic_ones(monkeypatch):
    flag = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
    assert xla_flags.automatic_options(V6E, {}) == {flag: 1 << 20}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_tpu_scoped_vmem_limit_kib=1024 --{flag}=256")
    assert xla_flags.automatic_options(V6E, {}) == {}


def test_the_installed_compiler_knows_the_automatic_options_of_gpus():
    import jax

    options = xla_flags.automatic_options(H100, {"fsdp": 8})
    assert options["xla_gpu_enable_latency_hiding_scheduler"]
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1.0) == 2
