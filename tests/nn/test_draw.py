"""Diagrams of models: every parameter appears once, and equal layers are one block."""

import xml.etree.ElementTree as ET

import jax
import pytest
from flax import nnx

from maxlib import nn, ops
from maxlib.models import gemma3, lfm2, llama, qwen3_vl
from maxlib.nn._draw import Block, _block
from maxlib.nn.describe import scaled

ROPE = ops.Rope(8, max_length=64)
SMALL = dict(vocab=64, dim=16, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
LFM2 = lfm2.PRESETS["lfm2-350m"]
MODELS = {
    "llama": lambda: llama.Llama(llama.Config(num_layers=3, rope=ROPE, **SMALL), rngs=nnx.Rngs(0)),
    "gemma3": lambda: gemma3.Gemma3(
        gemma3.Config(num_layers=13, window=4, rope=ROPE, local_rope=ROPE, **SMALL), rngs=nnx.Rngs(0)
    ),
    "lfm2": lambda: lfm2.LFM2(LFM2, rngs=nnx.Rngs(0)),
}


def leaves(block: Block) -> int:
    """Parameters of the innermost blocks, each as often as it is repeated."""
    inside = sum(leaves(child) for child in block.inside)
    return block.repeat * (inside or block.parameters)


def part(block: Block, name: str) -> Block:
    return next(child for child in block.inside if child.name == name)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_hold_every_parameter(name):
    model = jax.eval_shape(MODELS[name])
    block = _block("", model)
    assert leaves(block) == nn.num_parameters(model) == block.parameters


def test_equal_layers_are_one_block_that_lists_them():
    local, full = part(_block("", jax.eval_shape(MODELS["gemma3"])), "layers").inside
    assert (local.repeat, full.repeat) == (11, 2)
    assert (local.lines[0], full.lines[0]) == ("layers 0-4, 6-10, 12", "layers 5, 11")
    assert "(Causal | BidirectionalBlocks) & SlidingWindow(4)" in part(local, "attn").lines


def test_parts_stand_in_the_order_in_which_they_run():
    conv, attention = part(_block("", jax.eval_shape(MODELS["lfm2"])), "layers").inside
    assert [p.name for p in conv.inside] == ["attn_norm", "conv", "mlp_norm", "mlp"]
    assert attention.repeat == LFM2.layer_types.count("full_attention")


@pytest.mark.full
def test_equal_neighbours_are_one_block():
    tower = _block(
        "", jax.eval_shape(lambda: qwen3_vl.Qwen3VL(qwen3_vl.PRESETS["qwen3-vl-2b"], rngs=nnx.Rngs(0)))
    ).inside[0]
    assert [layer.repeat for layer in part(tower, "layers").inside] == [24]
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
