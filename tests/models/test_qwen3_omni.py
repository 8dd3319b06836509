"""Qwen3-Omni's thinker against transformers: images, videos and sound, alone, together, and sound between frames."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib import inference, nn, sharding
from maxlib.models import qwen3_omni
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.input_conformance import InputConformance

SEQ = 48
IMAGE, VIDEO, AUDIO = 60, 59, 56
START, END, SOUND_START, SOUND_END = 57, 58, 54, 55
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "rope_parameters": ROPE,
}
VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 25,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0, 1],
}
HEARING = {
    "num_mel_bins": 14,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 22,
    "d_model": 16,
    "output_dim": 32,
    "downsample_hidden_size": 6,
    "n_window_infer": 200,  # 26 vectors
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "audio_start_token_id": SOUND_START,
    "audio_end_token_id": SOUND_END,
    "position_id_per_seconds": 5,
}
SEEN, FILM = [1, 4, 6], [3, 2, 4]  # an image of 2 x 3 squares, and a video of three frames of 1 x 2
PICTURE = [START, *[IMAGE] * 6, END]
VIDEO_ALONE = [START, *[VIDEO] * 6, END]
# Frames at 0, 3.5 and 7 positions, between vectors of sound at 0, 1, 2 ...: 130 frames make 17.
WITH_SOUND = [
    *[START, SOUND_START, VIDEO, VIDEO, *[AUDIO] * 4, VIDEO, VIDEO, *[AUDIO] * 3, VIDEO, VIDEO, *[AUDIO] * 10],
    *[SOUND_END, END],
]


def sound(vectors: int) -> list[int]:
    return [SOUND_START, *[AUDIO] * vectors, SOUND_END]


# Per case: parts of rows behind a few words each, and grids and clips in their order.
CASES = {
    # 230 frames are heard in two windows.
    "all": ([[*PICTURE, 7, *sound(30)], [*VIDEO_ALONE, 3, *sound(17)], []], [SEEN, FILM], [230, 130]),
    "sound_in_video": ([WITH_SOUND, PICTURE + sound(17), []], [FILM, SEEN], [130, 130]),
    "images": ([PICTURE, [], [*VIDEO_ALONE, 4, 5, *PICTURE]], [SEEN, FILM, SEEN], None),
    # Less than a second of each, heard as if alone.
    "sound": ([sound(6), [*sound(6), 9, *sound(6)], []], None, [45, 45, 45]),
}


def tokens(parts: list[list[int]]) -> np.ndarray:
    rows = np.random.RandomState(1).randint(0, 50, (3, SEQ)).astype(np.int32)
    for row, (start, part) in enumerate(zip((2, 1, 3), parts, strict=True)):
        rows[row, start : start + len(part)] = part
    return rows


class TestQwen3Omni(InputConformance):
    test_captured_values_are_those_of_transformers = None  # their class for such files has no forward
    family = "qwen3_omni"
    config = "Qwen3OmniMoeConfig"
    cases: ClassVar = {key: {} for key in CASES}
    prompts = 44, 38, 20
    offset = None
    matters: ClassVar = {
        "thinker_config.position_id_per_seconds": 9,
        "thinker_config.text_config.rms_norm_eps": 0.1,
        "thinker_config.text_config.num_experts_per_tok": 1,
        "thinker_config.text_config.rope_parameters": ROPE | {"mrope_section": [4, 0, 0]},
        "thinker_config.vision_config.deepstack_visual_indexes": [0, 2],
        "thinker_config.audio_config.n_window_infer": 100,
    }
    refused: ClassVar = {
        "thinker_config.audio_config.n_window_infer": 50,
        "thinker_config.audio_config.encoder_attention_heads": 3,
    }
    rules = sharding.FSDP_TP | {"vocab": None, "kv_heads": None, "expert": "data"}
    # A bias of keys adds one number to all scores of a query.
    zero_gradients = r"audio_tower.*k_proj\.bias"

    @classmethod
    def transformers_cases(cls) -> dict[str, tuple[Any, ...]]:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("torch")
        thinker = {"text_config": TEXT, "vision_config": VISION, "audio_config": HEARING, **TOKENS}
        config = transformers.Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
        return {name: (config, tokens(parts), cls.dtype, grids, clips) for name, (parts, grids, clips) in CASES.items()}

    def by_row(self, case: dict[str, Any], *rows: int) -> dict[str, Any]:
        """The images and clips of some rows of tokens, a row for each."""
        (images, clips), inputs = parity.inputs_of(case), {}

        def of(first: int) -> tuple[list[int], list[int]]:
            """Which of all are those of the rows, by the id that begins each, and how many each row has."""
            counts = (case["tokens"] == first).sum(axis=1)
            return [n for row in rows for n in np.split(np.arange(sum(counts)), np.cumsum(counts))[row]], counts[
                [*rows]
            ]

        if images is not None:
            chosen, counts = of(START)
            pixels = np.split(images.pixels, np.cumsum(np.prod(case["grids"], axis=1)))
            inputs["images"] = nn.vision.pad_patches(
                np.concatenate([pixels[n] for n in chosen] or [pixels[0][:0]]),
                np.array([case["grids"][n] for n in chosen]).reshape(-1, 3),
                counts=counts.tolist(),
                second_per_grid=[parity.SECONDS_PER_GRID] * len(chosen),
            )
        if clips is not None:
            chosen, counts = of(SOUND_START)
            frames = [clips.frames[n, : clips.lengths[n]] for n in chosen]
            counts, frames = (counts, frames) if frames else ([1, *counts[1:]], [clips.frames[0, :0]])
            inputs["audio"] = nn.audio.pad_clips(frames, counts=[*map(int, counts)])
        return inputs

    @pytest.mark.full
    def test_greedy_text_is_that_of_transformers(self, name, made):
        torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
        case, directory, model = made(name)
        how = {"attn_implementation": "eager", "experts_implementation": "eager"}
        theirs = parity.auto("qwen3_omni_moe").from_pretrained(directory, **how).thinker
        images, audio = parity.inputs_of(case)
        ids = torch.from_numpy(case["tokens"]).long()
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            want = theirs.generate(ids, **parity.seen(case, ids, theirs.dtype), **options)[:, SEQ:].tolist()
        ours = inference.Generator(model, dtype=jnp.float32)
        assert ours.generate(case["tokens"].tolist(), images=images, audio=audio, max_new_tokens=8) == want


@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_of_transformers(name):
    """Frames by seconds, sound between them by the same clock, text behind."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case = parity.golden("qwen3_omni")[name]
    config = transformers.Qwen3OmniMoeConfig(**case["config"]).thinker_config
    theirs = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.__new__(
        transformers.Qwen3OmniMoeThinkerForConditionalGeneration
    )
    torch.nn.Module.__init__(theirs)
    theirs.config, theirs.spatial_merge_size = config, 2
    ids = torch.from_numpy(case["tokens"]).long()
    arguments = parity.seen(case, ids, torch.float32)
    lengths = arguments["feature_attention_mask"].sum(dim=1) if "feature_attention_mask" in arguments else None
    want, _ = theirs.get_rope_index(
        ids,
        arguments.get("image_grid_thw"),
        arguments.get("video_grid_thw"),
        arguments["attention_mask"],
        arguments.get("use_audio_in_video", False),
        lengths,
        arguments.get("video_second_per_grid"),
    )
    images = parity.images(case)
    if images is None:
        got = np.broadcast_to(np.arange(SEQ)[None, :, None], (3, SEQ, 3))
    else:
        rows = jnp.asarray(case["tokens"])
        positions = jax.jit(nn.vision.mrope_positions, static_argnums=2)
        is_image, is_audio = (rows == IMAGE) | (rows == VIDEO), rows == AUDIO
        got = positions(is_image, images.grids, 2, times=images.in_rows.seconds * 5, is_audio=is_audio)
    np.testing.assert_allclose(np.asarray(got), want.permute(1, 2, 0).numpy(), rtol=0, atol=1e-5)


def test_videos_without_times_are_refused(tmp_path):
    case = parity.golden("qwen3_omni")["images"]
    model = maxlib.from_pretrained(parity.directory(tmp_path, case))
    images = parity.images(case)
    with pytest.raises(ValueError, match="times of frames"):
        model.check_inputs(case["tokens"], images=nn.vision.Patches(images.pixels, images.grids))


def test_the_thinker_is_read_alone_and_as_released(tmp_path):
    """The release has fields of other models, and spells M-RoPE in `rope_scaling`."""
    case = parity.golden("qwen3_omni")["all"]
    thinker = case["config"]["thinker_config"]
    want = qwen3_omni.FIELDS.read(HFConfig(case["config"]))
    text = {name: value for name, value in thinker["text_config"].items() if name != "rope_parameters"}
    text |= {"rope_theta": 1e4, "rope_scaling": {"interleaved": True, **ROPE, "type": "default"}}
    text["rope_scaling"].pop("rope_theta")
    vision = thinker["vision_config"] | {"apply_vit_abs_pos_embed": True, "in_chans": 3, "image_size": 768}
    released = thinker | {"text_config": text, "vision_config": vision, "seconds_per_chunk": 2}
    for config in (thinker, case["config"] | {"thinker_config": released, "talker_config": {"hidden_size": 8}}):
        hf = HFConfig(config)
        assert qwen3_omni.FIELDS.read(hf) == want
        hf.done()
    alone = {name.removeprefix("thinker."): shape for name, shape in case["shapes"].items()}
    model = maxlib.from_pretrained(parity.directory(tmp_path, {"config": thinker, "shapes": alone}))
    assert model.cfg == want
