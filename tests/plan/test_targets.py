"""Names of hardware, and what they stand for."""

import pytest

from maxlib import plan
from maxlib.plan import _targets as targets


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
        ("h100x12", "GPUs come in hosts of 8; take up to 8 of one, or a multiple of 8, such as h100x16; got 12"),
    ],
)
def test_hardware_that_does_not_exist(name, words):
    with pytest.raises(ValueError, match=words):
        plan.parse_target(name)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'v5p-8: .* pip install "maxlib\[tpu\]"'):
        targets.devices_of(plan.parse_target("v5p-8"))


def test_without_the_plugin_for_cuda_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    assert not targets.has_gpu_compiler()
    with pytest.raises(ImportError, match=r'h100x8: .* pip install "maxlib\[cuda\]"'):
        targets.devices_of(plan.parse_target("h100x8"))
