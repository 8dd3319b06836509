"""Hardware names and the targets they resolve to."""

import dataclasses
import subprocess
import sys

import pytest

from maxlib import ops, plan, sharding
from maxlib.models import llama
from maxlib.plan import _targets as targets
from maxlib.plan._program import mesh_of
from maxlib.plan._roofline import link_speeds


@pytest.mark.parametrize(
    ("name", "devices", "topology"),
    [
        ("v5e-256", 256, "v5e:16x16"),
        ("v5e-16", 16, "v5e:4x4"),
        ("v5e-8", 8, "v5e:2x4"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("v5p-128", 64, "v5p:4x4x4"),
        ("v5p-512", 256, "v5p:4x8x8"),
        ("v6e-64", 64, "v6e:8x8"),
        ("v5p:4x4x12", 192, "v5p:4x4x12"),
        ("v5e-256x2", 512, "v5e:16x16"),
        ("h100x8", 8, None),
        ("h100-16", 16, None),
        ("h200x3", 3, None),
        ("h200", 1, None),
        ("a100x8", 8, None),
        ("b200x16", 16, None),
        ("gb200x72", 72, None),
        ("h100-pcie-8", 8, None),
        ("h100-nvlx8", 8, None),
        ("v7x-8", 8, "tpu7x:2x2x1"),  # jax has two devices a chip
        ("tpu7x:4x4x4", 128, "tpu7x:4x4x4"),
        ("cpu", 8, None),
    ],
)
def test_names(name, devices, topology):
    target = plan.parse_target(name)
    assert (target.devices, target.topology) == (devices, topology)
    assert target.slices == (2 if name.endswith("x2") else 1)
    assert str(devices) in str(target)


def test_topologies_close_to_rings_where_the_hardware_does():
    wrap = lambda name: plan.parse_target(name).wrap
    assert wrap("v5p-128") == wrap("v5p:4x4x12") == (True, True, True) and wrap("v5p-8") == (False, False, False)
    assert wrap("v5e-256") == (True, True) and wrap("v5e-128") == (False, True) and wrap("v6e-64") == (False, False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v9-8", "no hardware is known as 'v9-8'; take v4-N"),
        ("v5p-7", "counts cores, 2 a chip"),
        ("v5e-12", "12 chips is no power of two; give the topology"),
        ("v5e-1024", "2 dimensions of at most 16 chips each; got 32x32"),
        ("v5p:4x4", "comes in 3 dimensions"),
        ("h100x12", "GPUs come in groups of 8; take up to 8 of one, or a multiple of 8, such as h100x16; got 12"),
        ("gb200x80", "groups of 72; .* such as gb200x144; got 80"),
        ("b300x8", "GPUs such as a100xN, .* b200xN, gb200xN, or cpu"),
    ],
)
def test_hardware_that_does_not_exist(name, words):
    with pytest.raises(ValueError, match=words):
        plan.parse_target(name)


@pytest.fixture
def without_libtpu(monkeypatch):
    monkeypatch.setattr("maxlib.plan._program.has_tpu_compiler", lambda: False)


# As libtpu 0.0.42 describes them: the places of the first devices of the mesh, and the hosts of these.
PLACES = {
    ("v5e-16", "fsdp=-1"): ([(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 1, 0)], [0, 0, 1, 1, 1]),
    ("v5e-8", "fsdp=4,tensor=2"): ([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 3, 0)], [0, 0, 0, 0, 1]),
    ("v5p-128", "fsdp=-1"): ([(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0)], [0, 4, 8, 12, 0]),
    ("v5p-64", "fsdp=-1,tensor=2"): ([(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 0, 2)], [0, 0, 2, 2, 4]),
    ("v6e-8", "fsdp=-1"): ([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 3, 0)], [0, 0, 0, 0, 1]),
    ("v7x-8", "fsdp=-1"): ([(0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 1, 0)], [0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize(("name", "degrees"), PLACES)
def test_places_without_libtpu_are_those_of_libtpu(name, degrees):
    devices = targets.absent_devices(plan.parse_target(name))
    mesh = sharding.make_mesh(**sharding.parse_degrees(degrees), devices=devices)
    first = mesh.devices.ravel()[:5]
    assert ([device.coords for device in first], [device.process_index for device in first]) == PLACES[name, degrees]


@pytest.mark.parametrize("name", ["v5e-16", "v5p-128", "v6e-8x2"])
def test_places_are_those_of_the_installed_libtpu(name):
    """In a process of its own, as one describes one topology only."""
    pytest.importorskip("libtpu")
    code = f"""if True:
        from maxlib.plan import _targets as targets
        target = targets.parse_target({name!r})
        found, want = (
            [(tuple(d.coords), d.core_on_chip, d.process_index, d.device_kind) for d in devices(target)]
            for devices in (targets.absent_devices, targets.devices_of)
        )
        assert found == want, (found, want)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


# Over v5e's two dimensions of 90 GB/s each, v5p's three of 180, v6e's two of 180; between slices 3.1 GB/s a v5e chip.
@pytest.mark.parametrize(
    ("name", "degrees", "speeds"),
    [
        ("v5e-256", {"fsdp": -1, "tensor": 4}, {"fsdp": 180, "tensor": 90}),
        ("v5p-128", {"fsdp": 8, "tensor": 8}, {"fsdp": 360, "tensor": 360}),
        ("v5p-128", {"fsdp": -1}, {"fsdp": 540}),
        ("v6e-64", {"fsdp": 16, "tensor": 4}, {"fsdp": 360, "tensor": 180}),
        ("v5e-16x2", {"fsdp": -1, "dcn": {"data": -1}}, {"data": 3.1, "fsdp": 180}),
    ],
)
def test_tpus_are_linked_as_their_topologies_are(name, degrees, speeds, without_libtpu):
    job = plan.Job("llama3.2-1b", name, layout=sharding.Layout(degrees, sharding.FSDP_TP))
    links = link_speeds(mesh_of(job), plan.parse_target(name))
    assert {axis: links[axis] / 1e9 for axis in speeds} == speeds


def test_tpus_are_estimated_without_libtpu(without_libtpu):
    layout = sharding.Layout({"fsdp": -1, "tensor": 4}, sharding.FSDP_TP)
    got = plan.plan(plan.Job("llama3.2-1b", "v5e-256", layout=layout, sequence=4096))
    assert not got.compiled and got.estimate is not None and got.peak == got.analytic.total
    assert "not compiled: libtpu is not installed; install it: pip install" in str(got)


def test_moments_on_the_host_are_estimated_without_libtpu(without_libtpu):
    strategies = {False: sharding.FSDP, True: sharding.FSDP | sharding.OFFLOAD_OPTIMIZER}
    degrees = {"fsdp": -1, "dcn": {"data": -1}}
    job = lambda away: plan.Job("llama3.1-8b", "v5e-16x2", layout=sharding.Layout(degrees, strategies[away]))
    kept, away = (plan.estimated(job(on_host)) for on_host in (False, True))
    assert away.host == pytest.approx(kept.optimizer, rel=1e-3) and away.peak < kept.peak - 0.9 * away.host
    assert kept.estimate and away.estimate and away.estimate.network == pytest.approx(kept.estimate.network)


def test_twice_the_chips_hold_half_of_the_weights(without_libtpu):
    """And a step takes as long, since each chip has a sequence of its own."""
    job = plan.Job("llama3.1-8b", "v5p-32", sequence=4096, remat="full")
    few, many = plan.estimated(job), plan.estimated(dataclasses.replace(job, target="v5p-64"))
    assert few.parameters == pytest.approx(2 * many.parameters, rel=1e-3)
    assert few.estimate and many.estimate and few.estimate.compute == pytest.approx(many.estimate.compute)


@pytest.mark.parametrize(
    ("name", "other"), [("v5e:3x4", "v5e:2x4"), ("v5p:5x5x5", "v5p:4x4x4"), ("v6e:1x1", "v6e:2x2")]
)
def test_without_libtpu_a_topology_that_does_not_exist_is_refused(name, other):
    with pytest.raises(ValueError, match=f"{name}: there is no topology {name}, .* take for example {other}"):
        targets.absent_devices(plan.parse_target(name))


def test_without_the_plugin_for_cuda_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    assert not targets.has_gpu_compiler()
    with pytest.raises(ImportError, match=r'h100x8: .* pip install "maxlib\[cuda\]"'):
        targets.devices_of(plan.parse_target("h100x8"))


def test_gpus_without_a_description_are_estimated_and_the_plan_says_so():
    """At the data sheets' rates; 72 GPUs of a rack are joined by NVLink, others in hosts of eight."""
    job = plan.Job("llama3.2-1b", "b200x8", sequence=4096)

    def estimate(name):
        got = plan.plan(dataclasses.replace(job, target=name))
        assert not got.compiled and "needs a description of a GPU that is not there" in str(got) and got.estimate
        return got.estimate

    b200, a100, l40s, rack = map(estimate, ("b200x8", "a100x8", "l40sx8", "gb200x64"))
    assert a100.compute / b200.compute == pytest.approx(2250 / 312)
    # fsdp gathers over NVLink, or over PCIe where there is none.
    assert l40s.network / b200.network == pytest.approx(9e11 / 3.2e10)
    assert rack.network == pytest.approx(b200.network * (63 / 64) / (7 / 8))
    assert estimate("b200x64").network > 2 * rack.network


@pytest.mark.full
def test_fp8_counts_by_its_own_peak_where_there_are_units_for_it():
    """A plan multiplies in FP8 what the format rounds, if the device has units for what comes to them."""
    sizes = dict(num_layers=2, dim=512, mlp_dim=1536, num_heads=4, num_kv_heads=2, head_dim=128)
    job = plan.Job(llama.Config(vocab=512, **sizes, rope=ops.Rope(128)), "b200", sequence=256)

    def planned(target, quantization):
        got = plan.estimated(dataclasses.replace(job, target=target, quantization=quantization))
        assert got.estimate is not None and got.costs is not None
        in_bfloat16 = got.costs.flops / got.target.chip.flops
        return got.estimate.compute / in_bfloat16, sum(got.costs.narrow.values()) / got.costs.flops, str(got)

    # All but attention's products and the head, twice as fast.
    time, share, report = planned("b200", "fp8_block")
    assert 0.5 < share < 0.95 and "at their peak of 4500 TFLOP/s" in report
    assert time == pytest.approx(1 - share / 2)
    assert planned("h100", "fp8_block")[:2] == (1, 0)  # whose blocks are multiplied in bfloat16
    time, same, report = planned("a100", "fp8")
    assert time == pytest.approx(1) and same == pytest.approx(share) and "there are no units" in report


def test_two_devices_a_chip_are_described():
    pytest.importorskip("libtpu")
    devices = targets.devices_of(plan.parse_target("v7x-8"))
    assert len(devices) == 8 and {device.device_kind for device in devices} == {"TPU7x"}
