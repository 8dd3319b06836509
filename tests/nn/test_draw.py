"""Diagrams of models: every parameter appears once, and equal layers are one block."""

import dataclasses
import xml.etree.ElementTree as ET

import jax
import pytest
from flax import nnx

from maxlib import nn, ops
from maxlib.models import gemma3, gemma4, lfm2, llama, nemotron_h, qwen3_vl
from maxlib.nn._draw import Block, _block, _folded
from maxlib.nn.describe import scaled

ROPE = ops.Rope(8, max_length=64)
SMALL = dict(vocab=64, dim=16, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
MODELS = {
    "llama": lambda: llama.Llama(llama.Config(num_layers=3, rope=ROPE, **SMALL), rngs=nnx.Rngs(0)),
    "gemma3": lambda: gemma3.Gemma3(
        gemma3.Config(num_layers=13, window=4, rope=ROPE, local_rope=ROPE, **SMALL), rngs=nnx.Rngs(0)
    ),
    "lfm2": lambda: lfm2.LFM2(lfm2.PRESETS["lfm2-350m"], rngs=nnx.Rngs(0)),
}


def leaves(block: Block) -> int:
    """Parameters of the innermost blocks, each as often as it is repeated."""
    inside = sum(leaves(child) for child in block.inside)
    return block.repeat * (inside or block.parameters)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_hold_every_parameter(name):
    model = jax.eval_shape(MODELS[name])
    block = _block("", model)
    assert leaves(block) == nn.num_parameters(model) == block.parameters


def test_alike_layers_are_one_block():
    model = jax.eval_shape(MODELS["gemma3"])
    layers = next(child for child in _block("", model).inside if child.name == "layers")
    period = layers.inside[0]
    assert [block.repeat for block in period.inside] == [5, 1]  # five with a window, one without
    assert [(block.kind, block.repeat) for block in layers.inside] == [("period", 2), ("Block", 1)]
    assert "(Causal | BidirectionalBlocks) & SlidingWindow(4)" in period.inside[0].inside[1].lines


def test_layers_that_alternate_often_are_drawn_once_each():
    preset = lfm2.PRESETS["lfm2-350m"]
    layers = next(child for child in _block("", jax.eval_shape(MODELS["lfm2"])).inside if child.name == "layers")
    attention = [i for i, kind in enumerate(preset.layer_types) if kind == "full_attention"]
    assert [block.repeat for block in layers.inside] == [16 - len(attention), len(attention)]
    assert layers.inside[1].lines[0] == f"layers {', '.join(map(str, attention))}"
    assert layers.inside[0].lines[0].startswith("layers 0-1, 3-4, ")


def layers_of(model) -> Block:
    return next(child for child in _folded(_block("", jax.eval_shape(model))).inside if child.name == "layers")


def test_parts_that_an_earlier_layer_has_are_named_and_not_drawn_again():
    local, full = layers_of(MODELS["gemma3"]).inside[0].inside
    assert [part.name for part in local.inside] == [
        "attn_norm",
        "attn",
        "attn_post_norm, mlp_norm",
        "mlp",
        "mlp_post_norm",
    ]
    assert [part.name for part in full.inside] == ["attn"]  # its mask differs
    assert full.lines[-2:] == ("as above: attn_norm, attn_post_norm, mlp_norm", "mlp, mlp_post_norm")
    assert full.parameters == local.parameters


def test_parts_stand_in_the_order_in_which_they_run():
    names = lambda preset, model: [
        [p.name for p in b.inside] for b in layers_of(lambda: model(preset, rngs=nnx.Rngs(0))).inside
    ]
    assert names(lfm2.PRESETS["lfm2-350m"], lfm2.LFM2)[0] == ["attn_norm", "conv", "mlp_norm", "mlp"]
    assert names(nemotron_h.PRESETS["nemotron-3-nano-30b-a3b"], nemotron_h.NemotronH)[0] == ["norm", "mamba"]


@pytest.mark.full
def test_a_long_model_has_a_short_picture():
    """Equal layers of neighbouring groups are one block; a matrix with limits is a line."""
    cfg = dataclasses.replace(gemma4.PRESETS["gemma4-e2b"], audio=None)  # its encoder is not what repeats here
    model = jax.eval_shape(lambda: gemma4.Gemma4(cfg, rngs=nnx.Rngs(0)))
    picture = ET.fromstring(nn.draw(model).svg)
    assert float(picture.get("height")) < 1750
    block = _block("", jax.eval_shape(lambda: qwen3_vl.Qwen3VL(qwen3_vl.PRESETS["qwen3-vl-2b"], rngs=nnx.Rngs(0))))
    tower = block.inside[0]
    layers = next(part for part in tower.inside if part.name == "layers")
    assert [part.repeat for part in layers.inside] == [24]
    assert tower.inside[-1].name == "mergers0 ... mergers2" and tower.inside[-1].repeat == 3


def test_picture_is_well_formed_and_shown_by_notebooks():
    drawing = nn.draw(jax.eval_shape(MODELS["llama"]))
    root = ET.fromstring(drawing._repr_html_())
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "3 \N{MULTIPLICATION SIGN} Block" in texts and texts[0] == "Llama"
    boxes = [{k: float(r.get(k)) for k in ("x", "y", "width", "height")} for r in root.iter() if r.tag.endswith("rect")]
    assert all(box["x"] + box["width"] <= float(root.get("width")) for box in boxes)
    assert all(box["y"] + box["height"] <= float(root.get("height")) for box in boxes)


def test_large_numbers_have_a_suffix():
    assert [scaled(x) for x in (999, 1234567, 2e12, 2e15)] == ["999", "1.235 M", "2 T", "2000 T"]
