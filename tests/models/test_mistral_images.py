"""Mistral Small 3.1, Ministral 3 and Pixtral 12B against transformers, with images of several shapes.

Mistral Small 4 is in `test_mistral4`, but for its batches, which are here.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn
from maxlib.models import mistral
from maxlib.weights import HFConfig
from tests.models import parity, test_mistral
from tests.models.conformance import BASE, assert_close
from tests.models.image_conformance import GRIDS, IMAGE, ImageConformance

TEXT = BASE | {"model_type": "mistral", "head_dim": 10, "sliding_window": None}
MINISTRAL = test_mistral.TestMinistral3.base | {"model_type": "ministral3", "rope_parameters": test_mistral.SHARPENED}
TOWER = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 32,
    "hidden_act": "silu",
}


class Pixtral(ImageConformance):
    """Positions count tokens."""

    family = "mistral"
    text_base = TEXT
    vision_base = TOWER
    ids = {"image_token_index": IMAGE}
    patch_dim = 48
    offset = 0
    refused = {
        "text_config.hidden_act": "gelu",
        "text_config.model_type": "llama",
        "projector_hidden_act": "silu",
        "vision_feature_layer": -2,
        "vision_config.model_type": "clip_vision_model",
        "vision_config.num_channels": 1,
        "vision_config.head_dim": 8,
        "vision_config.hidden_act": "relu",
        "vision_config.hidden_size": 20,
    }


class TestMistral3(Pixtral):
    config = "Mistral3Config"
    cases = {
        "sees": {},
        "sees_tied_window_gelu_biases": {
            "text": {"tie_word_embeddings": True, "sliding_window": 5},
            "vision": {"hidden_act": "gelu", "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
            "tie_word_embeddings": True,
            "multimodal_projector_bias": True,
        },
        "sees_ministral3": {"text": MINISTRAL},
    }
    matters = {
        "text_config.rms_norm_eps": 0.1,
        "text_config.sliding_window": 6,
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "vision_config.hidden_act": "gelu",
    }


@pytest.mark.full
class TestLlava(Pixtral):
    """Pixtral 12B: each patch becomes a vector."""

    config = "LlavaConfig"
    grids = [[1, rows // 2, columns // 2] for _, rows, columns in GRIDS]
    cases = {"pixtral": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}}
    matters = {"vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}

    test_images_that_do_not_fit_are_refused = None  # its squares are of one patch


# --- batches as they come ---

# Heights and widths in pixels: of no image, of one and of two, and more text than image.
MIXED = [[], [(16, 24)], [(8, 8), (24, 16)], [(8, 40)]]


def prompts(case: dict) -> list[list[int]]:
    """A prompt for each row of MIXED, with marks between rows of an image as the processor puts them."""
    p, m = case["config"]["vision_config"]["patch_size"], case["config"].get("spatial_merge_size", 1)
    side, texts = p * m, parity.tokens(50, 8).tolist()
    lines = []
    for n, sizes in enumerate(MIXED):
        row = list(texts[n % 2][: 4 + n])
        for height, width in sizes:
            image = ([IMAGE] * (width // side) + [55]) * (height // side)
            row += [*image[:-1], 56, 3 + n]
        lines.append(row)
    return lines


def pictures(sizes: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels with padding, which is not zero here, and sizes."""
    random, sizes = np.random.RandomState(6), np.array(sizes)
    return random.standard_normal((len(sizes), 3, *sizes.max(axis=0))).astype(np.float32), sizes


@pytest.fixture(scope="module", params=[("mistral", "sees_ministral3"), ("mistral", "pixtral"), ("mistral4", "sees")])
def both(request, tmp_path_factory):
    """A case, and the model of either library."""
    transformers = pytest.importorskip("transformers")
    family, name = request.param
    case = parity.golden(family)[name]
    embed, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    values = parity.tensors(case["shapes"])
    # Small next to what the layers add, or every token would only repeat itself; and no placeholder is written.
    values[embed] *= np.float32(0.02)
    values[head if head in values else embed][IMAGE] = 0
    tables = {name: values[name] for name in (embed, head) if name in values}
    path = parity.directory(tmp_path_factory.mktemp(name), case, **tables)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    return case, theirs, maxlib.from_pretrained(path)


@pytest.mark.full
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_of_text_and_images_of_any_size_with_padding(side, both):
    import torch

    case, theirs, model = both
    rows, (pixels, sizes) = prompts(case), pictures([size for sizes in MIXED for size in sizes])
    longest = max(map(len, rows))
    pad = lambda row, filler: filler + row if side == "left" else row + filler
    ids = np.array([pad(row, [0] * (longest - len(row))) for row in rows], np.int32)
    real = np.array([pad([True] * len(row), [False] * (longest - len(row))) for row in rows])
    arguments = {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.from_numpy(sizes)}
    mask, at = torch.from_numpy(real).long(), torch.from_numpy(np.maximum(real.cumsum(axis=1) - 1, 0))
    with torch.no_grad():
        want = theirs(torch.from_numpy(ids).long(), attention_mask=mask, position_ids=at, **arguments).logits.numpy()
    images = model.cfg.vision.patches(pixels, sizes)
    got = np.asarray(
        model.logits(model(jnp.asarray(ids), images=images, valid=jnp.asarray(real), dtype=jnp.float32).hidden)
    )
    assert_close(got[real], want[real], 1e-4)
    # A row of patches for each row of tokens is the same.
    by_row = model.cfg.vision.patches(pixels, sizes, counts=[len(sizes) for sizes in MIXED])
    apart = np.asarray(
        model.logits(model(jnp.asarray(ids), images=by_row, valid=jnp.asarray(real), dtype=jnp.float32).hidden)
    )
    assert_close(apart[real], got[real])


# --- images ---


def test_processors_arrays_become_patches():
    """What a size leaves of a padded image is cut into squares of patches, channels first in each."""
    sees = mistral.Vision(patch_size=2, merge=2)
    pixels, sizes = pictures([(4, 8), (8, 4)])
    patches = sees.patches(pixels, sizes)
    np.testing.assert_array_equal(patches.grids, [[1, 2, 4], [1, 4, 2]])
    # The second square of the first image, the lower left of its patches.
    np.testing.assert_array_equal(patches.pixels[6], pixels[0, :, 2:4, 4:6].reshape(-1))
    with pytest.raises(ValueError, match="multiples of 4, got 4 x 6"):
        sees.patches(pixels, [(4, 6), (8, 4)])
    for wrong in ([(4, 8)], [(4, 12), (8, 4)]):
        with pytest.raises(ValueError, match="height and width of what an image has without padding"):
            sees.patches(pixels, wrong)
    with pytest.raises(ValueError, match="each of the 2 images to a row"):
        sees.patches(pixels, sizes, counts=[1, 2])


@pytest.mark.full
def test_the_processor_makes_sizes_that_the_model_takes():
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    module = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    sees = mistral.PRESETS["mistral-small-3.1-24b"].vision
    side = sees.patch_size * sees.merge
    make = module.PixtralImageProcessorPil(size={"longest_edge": sees.image_size}, patch_size=side)
    random = np.random.RandomState(4)
    images = [random.randint(0, 256, (3, *size)).astype(np.uint8) for size in [(60, 100), (200, 30)]]
    made = make(images=images, return_tensors="np", input_data_format="channels_first")
    patches = sees.patches(made["pixel_values"], made["image_sizes"])
    np.testing.assert_array_equal(patches.grids, [[1, 6, 8], [1, 16, 4]])


@pytest.mark.full
def test_each_image_sees_only_itself(both):
    """Whatever is beside it, and in whatever order: the vectors of an image are the same."""
    _, _, model = both
    pixels, sizes = pictures([(8, 8), (24, 16), (16, 24)])
    run = lambda *chosen: np.asarray(
        model.tower(model.cfg.vision.patches(pixels[[*chosen]], sizes[[*chosen]]).in_rows, dtype=jnp.float32)[0]
    )
    side = model.cfg.vision.patch_size * model.cfg.vision.merge
    few, many = ((sizes[n] // side).prod() for n in (0, 1))
    together = run(0, 1, 2)[0]
    assert_close(together[:few], run(0)[0, :few])
    assert_close(together[few : few + many], run(1)[0, :many])
    assert_close(run(2, 1)[0, many : 2 * many], run(1)[0, :many])


# --- text alone ---


@pytest.mark.parametrize("renamed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_text_of_a_model_that_sees_is_read_alone(renamed, tmp_path):
    """By the names of the releases, and by those that transformers has in memory."""
    case = parity.golden("mistral")["sees"]
    multimodal = maxlib.from_pretrained(parity.directory(tmp_path / "release", case))
    tensors = load_file(tmp_path / "release" / "model.safetensors")
    if renamed:
        text = lambda name: name.replace("language_model.model.", "model.language_model.").removeprefix(
            "language_model."
        )
        put = lambda name: text(name) if name.startswith("language_model") else f"model.{name}"
        tensors = {put(name): value for name, value in tensors.items()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(case["config"]))
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    again, text = (maxlib.from_pretrained(tmp_path / "other", **more) for more in ({}, {"vision": None}))
    want, blind = nn.variables(multimodal), nn.variables(text)
    assert text.tower is None and blind.keys() < want.keys()
    for model in (again, text):
        for name, value in nn.variables(model).items():
            np.testing.assert_array_equal(value.get_value(), want[name].get_value())
    with pytest.raises(ValueError, match="reads text only"):
        text.check_inputs(case["tokens"], images=parity.images(case))
    # Its export is a text model.
    maxlib.save_pretrained(text, tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["model_type"] == "mistral" and "vision_config" not in config
    assert maxlib.from_pretrained(tmp_path / "text").cfg == dataclasses.replace(multimodal.cfg, vision=None)
    rows = np.minimum(case["tokens"], 50)
    assert_close(parity.logits(text, rows), parity.logits(multimodal, rows))


# --- what the releases say ---


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Mistral3Config", "LlavaConfig"])
def test_what_a_config_leaves_out_is_as_in_transformers(kind):
    transformers = pytest.importorskip("transformers")
    text = {name: BASE[name] for name in (*mistral.FIELDS.required, "max_position_embeddings")} | {
        "model_type": "mistral"
    }
    least = {"text_config": text, "vision_config": {"model_type": "pixtral"}}
    least |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"} if kind == "LlavaConfig" else {}
    theirs = json.loads(getattr(transformers, kind)(**least).to_json_string(use_diff=False))
    short = least | {"model_type": theirs["model_type"], "tie_word_embeddings": theirs["tie_word_embeddings"]}
    config = HFConfig(theirs)
    assert mistral.FIELDS.read(HFConfig(short)) == mistral.FIELDS.read(config)
    config.done()


def test_sizes_of_encoders_that_cannot_be_are_refused():
    for wrong in ({"kind": "llama"}, {"act": "relu"}, {"num_heads": 3}, {"merge": 0}, {"kind": "llava"}):
        with pytest.raises(ValueError, match=r"kind must|num_heads|merge \(spatial_merge_size\)"):
            mistral.Vision(**wrong)
