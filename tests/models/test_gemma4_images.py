"""Gemma 4 with images against transformers: its tower, the 12B model without one, and the attention masks."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxlib
from maxlib import nn, ops
from maxlib.models import _gemma4_vision as towers
from maxlib.models import gemma4
from maxlib.models.gemma4 import GLOBAL, LOCAL
from maxlib.nn.decoder._context import bidirectional_blocks
from tests.models import parity
from tests.models import test_gemma4 as text
from tests.models.conformance import CLOSE, assert_close
from tests.models.image_conformance import GRIDS, IMAGE, VIDEO, ImageConformance

AUDIO = 58
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO, "boi_token_id": 1, "eoi_token_id": 2}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 7,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
}
TEXT = text.TestGemma4.base | {"pad_token_id": 0, "use_bidirectional_attention": "vision", "num_hidden_layers": 4}
TEXT |= {"layer_types": [LOCAL, GLOBAL] * 2, "sliding_window": 4}


@pytest.mark.full  # by default sound, with images, is
class TestGemma4Images(ImageConformance):
    family = "gemma4"
    config = "Gemma4Config"
    text_base = TEXT
    vision_base = TOWER
    ids = IDS
    patch_dim = 48
    offset = 0
    # The first has all that E2B and E4B have, and sees images both ways besides.
    cases = {
        "images_shared_clipped": {
            "text": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 10},
            "vision": {"use_clipped_linears": True, "num_key_value_heads": 1},
        },
        "images_experts_standardized": {
            "text": text.TestGemma4.cases["experts"] | {"tie_word_embeddings": False},
            "vision": {"standardize": True, "num_attention_heads": 3, "num_key_value_heads": 3},
            "tie_word_embeddings": False,
        },
        "images_causal": {"text": {"use_bidirectional_attention": None, "attention_k_eq_v": True}},
    }
    rules = ImageConformance.rules | {"kv_heads": None}  # the first has one of them in its encoder
    matters = {
        "text_config.use_bidirectional_attention": None,
        "text_config.pad_token_id": 3,
        "vision_config.rms_norm_eps": 0.1,
        "vision_config.rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }
    refused = {"text_config.pad_token_id": None, "vision_config.pooling_kernel_size": 0, "vision_config.head_dim": 6}

    def test_images_see_both_ways_in_local_layers_only(self, made):
        """A change of its last token reaches the first token of an image through the local layers' masks."""
        case, _, model = made("images_shared_clipped")
        kinds = model.cfg.parts
        is_image = jnp.asarray(case["tokens"]) == IMAGE
        blocks = bidirectional_blocks(is_image)
        ctx = nn.make_context(*is_image.shape, bidirectional_blocks=blocks)
        ends = {kind: np.asarray(ctx.key_intervals(mask)[1]) for kind, (mask, _, _) in kinds.items()}
        causal = 1 + np.arange(is_image.shape[1])
        np.testing.assert_array_equal(ends[GLOBAL][0], causal)
        np.testing.assert_array_equal(ends[LOCAL][0], np.where(is_image[0], np.asarray(blocks[1][0]), causal))

    @pytest.mark.full
    def test_padding_on_either_side_changes_nothing(self, made):
        """A row of text and one with images, of different lengths, in the middle of their padding."""
        case, _, model = made("images_shared_clipped")
        rows, images = case["tokens"][:, :20].copy(), self.by_row(case, 0, 1)["images"]
        rows[1] = np.where(rows[1] == IMAGE, 7, rows[1])
        images = dataclasses.replace(images, grids=images.grids * np.array([1, 0])[:, None, None])
        want = parity.logits(model, rows, images)
        for left in (0, 3):
            wide = np.pad(rows, ((0, 0), (left, 5 - left)))
            valid = np.pad(np.ones(rows.shape, bool), ((0, 0), (left, 5 - left)))
            got = parity._logits(model, wide, {"images": images, "valid": valid})
            assert_close(got[:, left : left + 20], want, CLOSE)

    def test_sound_and_images_beyond_the_positions_are_refused(self, made):
        case, _, model = made("images_shared_clipped")
        rows, images = case["tokens"].copy(), parity.images(case)
        rows[1, 20] = AUDIO
        with pytest.raises(ValueError, match="1 audio placeholders, but this Gemma4 does not hear"):
            model.check_inputs(rows, images=images)
        with pytest.raises(ValueError, match="reads text and images only: call it without audio"):
            model.check_inputs(rows, images=images, audio=nn.audio.pad_clips([np.zeros((4, 8))]))
        wide = nn.vision.Patches(np.zeros((16, 48), np.float32), np.array([[1, 2, 8]]))
        with pytest.raises(ValueError, match="at most 7 rows and columns of patches"):
            model.check_inputs(np.array([[IMAGE] * 4]), images=wide)

    @pytest.mark.full
    def test_text_of_a_seeing_checkpoint_is_read_alone(self, made, tmp_path):
        case, directory, model = made("images_shared_clipped")
        blind = maxlib.from_pretrained(directory, vision=None)
        rows = case["tokens"] % 50
        assert blind.tower is None
        assert_close(parity.logits(blind, rows), parity.logits(model, rows), CLOSE)
        with pytest.raises(ValueError, match="reads text only"):
            blind.check_inputs(rows, images=parity.images(case))


@pytest.mark.full
class TestUnifiedImages(TestGemma4Images):
    config = "Gemma4UnifiedConfig"
    text_base: ClassVar = {
        name: value for name, value in TEXT.items() if not name.endswith("per_layer_input") and "expert" not in name
    }
    vision_base: ClassVar = {
        "mm_embed_dim": 24,
        "output_proj_dims": 24,
        "mm_posemb_size": 5,
        "patch_size": 2,
        "pooling_kernel_size": 2,
    }
    grids: ClassVar = [[1, height // 2, width // 2] for _, height, width in GRIDS]
    cases = {"images_unified": {"text": {"attention_k_eq_v": True, "num_global_key_value_heads": 1}}}
    matters = {"text_config.use_bidirectional_attention": None, "vision_config.rms_norm_eps": 0.5}
    refused = {"text_config.hidden_size_per_layer_input": 8}

    test_images_that_do_not_fit_are_refused = None
    test_images_see_both_ways_in_local_layers_only = None
    test_padding_on_either_side_changes_nothing = None
    test_sound_and_images_beyond_the_positions_are_refused = None
    test_text_of_a_seeing_checkpoint_is_read_alone = None


SEE = gemma4.Vision(
    dim=16, mlp_dim=20, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, patch_size=4, pool=3, num_positions=16
)


def test_heads_turn_by_column_then_row():
    """Their halves in quarters: the formula of `AxialNorm` and `ops.AxialRope` together, in float64."""
    H, x, y = 8, 3, 5
    head = np.random.RandomState(0).standard_normal(H)
    norm = towers.AxialNorm(H)
    with jax.enable_x64(True):
        turned = jax.jit(lambda head: ops.apply_rope(norm(head), *SEE.rope.tables(jnp.array([[[x, y]]]))))
        got = turned(head[None, None, None])[0, 0, 0]
    unit = head / np.sqrt((head**2).mean() + 1e-6)
    want = np.zeros(H)
    for axis, place in enumerate((x, y)):
        for i in range(H // 4):
            a, b = 4 * axis + i, 4 * axis + H // 4 + i
            angle = place * SEE.rope_theta ** (-2 * i / (H // 2))
            want[a] = unit[a] * np.cos(angle) - unit[b] * np.sin(angle)
            want[b] = unit[b] * np.cos(angle) + unit[a] * np.sin(angle)
    np.testing.assert_allclose(got.reshape(2, 2, 2).swapaxes(0, 1).reshape(H), want, rtol=0, atol=1e-5)


def test_patches_of_a_processor_are_put_in_squares():
    image = np.random.RandomState(3).rand(3, 24, 36).astype(np.float32)
    pixels, grid = SEE.cut(image)
    arrays = parity.by_position(nn.vision.Patches(pixels, grid), SEE.merge)
    shuffled = np.random.RandomState(4).permutation(arrays[0].shape[1])
    got = nn.vision.pad_patches_by_position(arrays[0][:, shuffled], arrays[1][:, shuffled], merge=3)
    np.testing.assert_array_equal(got.grids, grid)
    np.testing.assert_array_equal(got.pixels[: len(pixels)], pixels)
    with pytest.raises(ValueError, match="must be multiples of 12, got 24 x 34"):
        SEE.cut(image[:, :, :34])
    for bad in (arrays[1] + (arrays[1] == 2), arrays[1][:, :, :1], arrays[1] - 1):
        with pytest.raises(ValueError, match=r"must fill a grid whose sides are multiples of 3|`images patches 2`"):
            nn.vision.pad_patches_by_position(arrays[0], bad, merge=3)


@pytest.mark.full
def test_patches_are_those_of_the_processors():
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    module = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    image = np.random.RandomState(4).randint(0, 256, (3, 96, 144)).astype(np.uint8)
    make = module.Gemma4ImageProcessorPil(do_resize=False)
    theirs = make(images=[image], return_tensors="np")
    sees = gemma4.PRESETS["gemma4-31b"].vision
    got = nn.vision.pad_patches_by_position(theirs["pixel_values"], theirs["image_position_ids"], merge=sees.merge)
    pixels, grid = sees.cut(image.astype(np.float32) / 255)
    np.testing.assert_array_equal(got.grids, grid)
    np.testing.assert_allclose(got.pixels[: len(pixels)], pixels, rtol=0, atol=1e-6)


@pytest.mark.full
def test_joined_patches_are_those_of_the_processor():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    module = pytest.importorskip("transformers.models.gemma4_unified.image_processing_gemma4_unified")
    image = np.random.RandomState(4).randint(0, 256, (3, 96, 144)).astype(np.uint8)
    theirs = module.Gemma4UnifiedImageProcessor(do_resize=False)(images=[torch.from_numpy(image)], return_tensors="np")
    sees = gemma4.PRESETS["gemma4-12b"].vision
    got = nn.vision.pad_patches_by_position(theirs["pixel_values"], theirs["image_position_ids"], merge=sees.merge)
    pixels, grid = sees.cut(image.astype(np.float32) / 255)
    np.testing.assert_array_equal(got.grids, grid)
    np.testing.assert_allclose(got.pixels[: len(pixels)], pixels, rtol=0, atol=1e-6)


@pytest.mark.full
def test_frames_of_a_video_are_images(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case = parity.golden("gemma4")["images_shared_clipped"]
    path = parity.directory(tmp_path, case)
    theirs = transformers.Gemma4ForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    frames = nn.vision.Patches(np.random.RandomState(3).rand(16, 48).astype(np.float32), np.array([[1, 2, 4]] * 2))
    ids = parity.tokens(57, 12)[:1]
    ids[0, [3, 4, 7, 8]] = VIDEO
    pixels, positions = map(torch.from_numpy, parity.by_position(frames, 2))
    with torch.no_grad():
        want = theirs(
            torch.from_numpy(ids).long(),
            pixel_values_videos=pixels,
            video_position_ids=positions,
            num_frames_per_video=torch.tensor([2]),
            mm_token_type_ids=2 * (torch.from_numpy(ids) == VIDEO).int(),
        ).logits.numpy()
    got = parity.logits(maxlib.from_pretrained(path), ids, nn.vision.pad_patches(frames.pixels, frames.grids))
    assert_close(got, want, 1e-4)


def test_bounds_clip_what_goes_in_and_out():
    """And are no parameters."""
    layer = towers.Clipped(nn.Einsum("...D,FD->...F", (3, 2), ("mlp", "embed"), rngs=nnx.Rngs(0)))
    layer.linear.w[...] = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    x = jnp.array([[5.0, -2.0]])
    np.testing.assert_array_equal(layer(x), [[5.0, -2.0, 3.0]])  # without bounds
    layer.input_max[...], layer.output_min[...] = jnp.asarray(4.0), jnp.asarray(-1.0)
    np.testing.assert_array_equal(layer(x), [[4.0, -1.0, 2.0]])
    assert set(nn.partition(layer)[0]) == {"linear.w"}
