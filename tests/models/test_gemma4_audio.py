"""Gemma 4 with sound against transformers: its conformer, the 12B model without one, beside images and text."""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib import inference, nn, sharding, training
from maxlib.models.gemma4 import GLOBAL, LOCAL
from maxlib.nn.audio import Clips
from maxlib.training._batch_checks import check_first_batch
from maxlib.training._step import make_gradient
from tests.models import parity
from tests.models import test_gemma4_images as seeing
from tests.models.conformance import CLOSE, assert_close
from tests.models.image_conformance import IMAGE
from tests.models.input_conformance import InputConformance
from tests.models.test_gemma4_images import AUDIO, IDS

SEQ = 24
# Frames of each clip: two in the first row of tokens, one in the second, behind an image; the third is text.
CLIPS, COUNTS = [29, 9, 21], [2, 1, 0]
GRIDS = [[1, 2, 4]]
TOWER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "conv_kernel_size": 3,
    "attention_chunk_size": 3,
    "attention_context_left": 4,
    "attention_context_right": 0,
    "attention_logit_cap": 3.0,
    "output_proj_dims": 20,
}
UNIFIED = {"audio_embed_dim": 12}
TEXT = {"num_hidden_layers": 2, "layer_types": [LOCAL, GLOBAL]}
VISION = seeing.TOWER | {"num_hidden_layers": 1}


def tokens(vectors: list[int], image: bool) -> np.ndarray:
    """Three rows of text, the first two with the placeholders of clips, the second also with those of an image."""
    ids = np.random.RandomState(1).randint(0, 57, (3, SEQ)).astype(np.int32)
    for (row, start), count in zip([(0, 1), (0, 14), (1, 6)], vectors, strict=True):
        ids[row, start : start + count] = AUDIO
    ids[1, 2 : 2 + 2 * image] = IMAGE
    return ids


class TestGemma4Audio(InputConformance):
    """A case is `{"text": changes, "audio": changes}` of the bases; `"vision": None` for a model that does not see."""

    family = "gemma4"
    config = "Gemma4Config"
    text_base: ClassVar[dict[str, Any]] = seeing.TEXT | TEXT
    audio_base: ClassVar[dict[str, Any]] = TOWER
    vision_base: ClassVar[dict[str, Any]] = VISION
    prompts = 18, 13, 4
    rules = sharding.FSDP_TP | {"vocab": None, "kv_heads": None}
    vectors: ClassVar[list[int]] = [8, 3, 6]  # of each clip
    clips: ClassVar[list[int]] = CLIPS
    grids: ClassVar[list[list[int]]] = GRIDS
    cases: ClassVar = {
        "audio_and_images": {},
        # Attention to a later frame, in chunks that are no longer than what comes before them; a vector per layer.
        "audio_alone": {
            "text": {"hidden_size_per_layer_input": 10},
            "vision": None,
            "audio": {
                "attention_chunk_size": 2,
                "attention_context_left": 6,
                "attention_context_right": 2,
                "use_clipped_linears": False,
                "residual_weight": 0.3,
            },
        },
    }
    matters: ClassVar = {
        "audio_config.attention_chunk_size": 8,  # which also says which distances have a key
        "audio_config.attention_context_left": 3,
        "audio_config.attention_context_right": 2,
        "audio_config.attention_logit_cap": 1.0,
        "audio_config.residual_weight": 0.7,
        "audio_config.rms_norm_eps": 0.1,
        "audio_config.gradient_clipping": 0.5,
    }
    refused: ClassVar = {
        "text_config.pad_token_id": None,
        "audio_config.subsampling_conv_channels": [6, 4],
        "audio_config.num_attention_heads": 3,
    }

    @classmethod
    def transformers_cases(cls) -> dict[str, tuple[Any, ...]]:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("torch")

        def make(text=(), vision=(), audio=()):
            sees = vision is not None
            parts = {"text_config": cls.text_base | dict(text), "audio_config": cls.audio_base | dict(audio)}
            parts |= {"vision_config": cls.vision_base | dict(vision) if sees else None}
            config = getattr(transformers, cls.config)(**parts, **IDS)
            return config, tokens(cls.vectors, sees), cls.dtype, cls.grids if sees else None, cls.clips

        return {name: make(**changes) for name, changes in cls.cases.items()}

    def by_row(self, case: dict[str, Any], *rows: int) -> dict[str, Any]:
        """The images and clips of some rows of tokens, a row for each."""
        (images, audio), first = parity.inputs_of(case), np.cumsum([0, *COUNTS])
        clips_of_rows = [range(first[row], first[row + 1]) for row in rows]
        width = audio.frames.shape[-1]
        frames = [audio.frames[i, : audio.lengths[i]] for clips in clips_of_rows for i in clips]
        frames = frames or [np.zeros((0, width))]  # no clip at all: one of no frames
        counts = (
            [len(clips) for clips in clips_of_rows] if sum(map(len, clips_of_rows)) else [1, *[0] * (len(rows) - 1)]
        )
        inputs = {"audio": nn.audio.pad_clips(frames, counts=counts)}
        if images is None:
            return inputs
        pixels = np.concatenate([images.pixels if row == 1 else images.pixels[:0] for row in rows])
        grids = np.concatenate([images.grids if row == 1 else images.grids[:0] for row in rows])
        return inputs | {"images": nn.vision.pad_patches(pixels, grids, counts=[int(row == 1) for row in rows])}

    # --- training and generation ---

    @pytest.mark.full
    def test_training_reads_sound(self, name, made):
        """The loss is that of transformers' logits, also in microbatches, and a step lowers it."""
        case, _, model = made(name)
        targets = np.concatenate([case["tokens"][:, 1:], np.full((3, 1), -1)], axis=1).astype(np.int32)
        batch = {"tokens": case["tokens"], "targets": targets} | self.by_row(case, 0, 1, 2)
        check_first_batch(batch, model)
        batch = jax.tree.map(jnp.asarray, batch)
        scores = case["logits"].astype(np.float64)[:, :-1]
        scores = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
        want = -np.take_along_axis(scores, case["tokens"][:, 1:, None], 2).mean()
        params, rest = nn.partition(model)

        @functools.partial(jax.jit, static_argnames="microbatches")
        def gradients(params, microbatches=1):
            gradient = make_gradient(training.NextToken(), dtype=jnp.float32, microbatches=microbatches)
            return gradient(params, rest, batch, jax.random.key(0))

        slope, mean, _ = gradients(params)
        np.testing.assert_allclose(mean, want, rtol=1e-5)
        in_parts, mean, _ = gradients(params, microbatches=3)
        np.testing.assert_allclose(mean, want, rtol=1e-5)
        heard = {path: np.asarray(g) for path, g in slope.items() if path.startswith("audio_tower")}
        assert len(heard) > 1 or self.config == "Gemma4UnifiedConfig"
        for path, g in heard.items():
            assert np.abs(g).max() > 0, path
            np.testing.assert_allclose(in_parts[path], g, rtol=0, atol=1e-4 * np.abs(g).max(), err_msg=path)
        size = sum(np.square(g).sum() for g in heard.values())
        moved = {path: w - 1e-2 / size * slope[path] if path in heard else w for path, w in params.items()}
        assert gradients(moved)[1] < want - 1e-3

    @pytest.mark.full
    def test_greedy_text_is_that_of_transformers(self, name, made):
        """Prompts of two lengths with sound, with a cache and without, together and on an engine's slots."""
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        case, directory, model = made(name)
        how = {"attn_implementation": "eager"}
        theirs = transformers.AutoModelForImageTextToText.from_pretrained(directory, **how)
        rows = [case["tokens"][0, :18].tolist(), case["tokens"][1, :13].tolist(), case["tokens"][2, :5].tolist()]
        ours, by_row = inference.Generator(model, dtype=jnp.float32), [self.by_row(case, row) for row in range(3)]
        images, audio = parity.inputs_of(case)
        got = ours.generate(rows, images=images, audio=audio, max_new_tokens=8)
        engine = inference.LocalEngine(model, slots=2, capacity=48, dtype=jnp.float32)
        media = {"audio": [by_row[0]["audio"], by_row[1]["audio"], None]}
        media |= {} if images is None else {"images": [None, by_row[1]["images"], None]}
        assert [completion.tokens for (completion,) in engine.generate(rows, max_new_tokens=8, **media)] == got
        for i, row in enumerate(rows[:2]):
            ids = torch.tensor([row])
            options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            with torch.no_grad():
                text = theirs.generate(ids, attention_mask=torch.ones_like(ids), **self.seen(case, i, ids), **options)
            assert got[i] == text[0, len(row) :].tolist()
            # Without a cache all scores of the text at once, up to a placeholder.
            new = np.array(list(itertools.takewhile(lambda token: token < AUDIO, got[i])), np.int32)
            inputs = self.by_row(case, i)
            scores = parity.logits(
                model, np.append(row, new)[None].astype(np.int32), inputs.get("images"), inputs["audio"]
            )
            np.testing.assert_array_equal(scores[0, len(row) - 1 :].argmax(axis=1)[: len(new)], new)

    @staticmethod
    def seen(case: dict[str, Any], row: int, ids: Any) -> dict[str, Any]:
        """What transformers takes for one row."""
        arguments, first = parity.seen(case, ids, None), np.cumsum([0, *COUNTS])
        names = ("pixel_values", "image_position_ids", "mm_token_type_ids") if row == 1 else ()
        features = {
            name: arguments[name][first[row] : first[row + 1]] for name in ("input_features", "input_features_mask")
        }
        return features | {name: arguments[name] for name in names if name in arguments}

    # --- bad input ---

    def test_sound_that_does_not_fit_is_refused(self, made):
        case, _, model = made(next(iter(self.cases)))
        rows, (images, audio) = case["tokens"], parity.inputs_of(case)
        call = lambda **changes: model.check_inputs(rows, images=images, audio=dataclasses.replace(audio, **changes))
        with pytest.raises(ValueError, match=r"hold \[17\] audio placeholders .* make \[16\] vectors"):
            call(lengths=np.array([29, 9, 17], np.int32))
        with pytest.raises(ValueError, match="between 0 and the 32 frames given"):
            call(lengths=np.array([29, 9, 33], np.int32))
        with pytest.raises(ValueError, match=r"frames of 8 numbers .* shapes \(3, 32, 6\) and \(3,\)"):
            call(frames=audio.frames[..., :6])
        with pytest.raises(ValueError, match="for each of the 3 rows of tokens"):
            other = Clips(np.zeros((2, 2, 32, 8), np.float32), np.zeros((2, 2), np.int32))
            model.check_inputs(rows, images=images, audio=other)
        with pytest.raises(ValueError, match="must be nn.audio.Clips .*, got ndarray"):
            model.check_inputs(rows, images=images, audio=audio.frames)
        with pytest.raises(ValueError, match="have 17 audio placeholders, but no audio was given"):
            model.check_inputs(rows, images=images)

    @pytest.mark.full
    def test_placeholders_without_sound_show_inside_jit(self, made):
        case, _, model = made("audio_alone")
        bad = lambda rows, audio: [bool(np.isnan(row).any()) for row in parity.logits(model, rows, None, audio)]
        clips, rows = parity.audio(case), case["tokens"]
        assert bad(rows, None) == [True, True, False]
        fewer = np.where(np.arange(3)[:, None] == 1, rows % 50, rows)
        assert bad(fewer, clips) == [True, False, False]
        assert bad(fewer, self.by_row(case, 0, 1, 2)["audio"]) == [False, False, False]
        more = rows.copy()
        more[2, 5] = AUDIO
        assert bad(more, self.by_row(case, 0, 1, 2)["audio"]) == [False, False, True]

    @pytest.mark.full
    def test_a_checkpoint_is_read_without_its_encoders(self, made, tmp_path):
        case, directory, model = made(next(iter(self.cases)))
        rows = case["tokens"] % 50
        for encoders in ({"vision": None}, {"audio": None}, {"vision": None, "audio": None}):
            part = maxlib.from_pretrained(directory, **encoders)
            assert [getattr(part, name) is None for name in ("tower", "audio_tower")] == [
                name in encoders for name in ("vision", "audio")
            ]
            assert_close(parity.logits(part, rows), parity.logits(model, rows), CLOSE)
            maxlib.save_pretrained(part, tmp_path / "-".join(encoders))
            again = maxlib.from_pretrained(tmp_path / "-".join(encoders))
            assert again.cfg.encoders == part.cfg.encoders
        with pytest.raises(ValueError, match="reads text only"):
            part.check_inputs(rows, audio=parity.audio(case))


@pytest.mark.full
class TestUnifiedAudio(TestGemma4Audio):
    config = "Gemma4UnifiedConfig"
    text_base: ClassVar = seeing.TestUnifiedImages.text_base | TEXT
    audio_base: ClassVar = UNIFIED
    vision_base: ClassVar = seeing.TestUnifiedImages.vision_base
    clips: ClassVar = [8, 3, 6]
    grids: ClassVar = [[1, 1, 2]]
    cases: ClassVar = {"audio_unified": {}}
    matters: ClassVar = {"audio_config.rms_norm_eps": 0.5}

    test_sound_that_does_not_fit_is_refused = None
