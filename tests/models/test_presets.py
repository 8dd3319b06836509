"""Presets: their config.json is read as what was written, and they have the published numbers of parameters."""

import json
from pathlib import Path

import jax
import pytest
from flax import nnx

from maxlib import nn
from maxlib.weights import HFConfig, families

BILLIONS = json.loads(Path(__file__).with_name("published.json").read_text())
every_family = pytest.mark.parametrize("family", families(), ids=lambda family: family.name)


@every_family
def test_presets_are_read_as_they_are_written(family):
    for name, cfg in family.presets.items():
        fields = HFConfig(json.loads(json.dumps(family.fields.write(cfg))))
        assert family.fields.read(fields) == cfg, name
        fields.done()


@pytest.mark.full
@every_family
def test_presets_have_the_published_size(family):
    close = 0.001 if family.name in ("llada", "sdar") else 0.0051
    for name, cfg in family.presets.items():
        model = jax.eval_shape(lambda cfg=cfg: family.model(cfg, rngs=nnx.Rngs(0)))
        count = nn.num_parameters(model) / 1e9
        assert abs(count - BILLIONS[name]) <= close, f"{name} has {count:.4f}B"


def test_every_preset_has_a_published_size():
    assert BILLIONS.keys() == {name for family in families() for name in family.presets}


@pytest.mark.parametrize("name", ["apertus", "cwm", "gpt_oss"])
def test_a_base_alone_keeps_the_released_scaling(name):
    """As transformers reads it; only `rope_parameters` or `rope_scaling` say otherwise."""
    (family,) = (family for family in families() if family.name == name)
    cfg = next(iter(family.presets.values()))
    config = {k: v for k, v in family.fields.write(cfg).items() if k not in ("rope_parameters", "rope_scaling")}
    assert "rope_theta" in config and family.fields.read(HFConfig(json.loads(json.dumps(config)))) == cfg
