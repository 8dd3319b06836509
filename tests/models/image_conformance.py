"""Tests that families with images of any size must pass: `Conformance`, with images in every row."""

import dataclasses
import json
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import maxlib
from maxlib import nn, sharding
from maxlib.weights import HFConfig, family_of
from tests.models import parity
from tests.models.conformance import CLOSE, Conformance, _dtype, _logits, assert_close

SEQ, IMAGE, VIDEO = 24, 60, 59
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 57, "vision_end_token_id": 58}
# Images of several shapes by row, column and grid of patches: two in the first row of tokens, one begins the second.
GRIDS = [[1, 4, 6], [1, 2, 2], [1, 6, 4]]
PLACES = [(0, 2), (0, 11), (1, 0)]
TOWER = {
    "depth": 6,
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 25,
    "out_hidden_size": 32,
}
# Of one row of patches each row of tokens has its own images: what divides over devices.
COUNTS = [2, 1]


def tokens(vocab: int = 57) -> np.ndarray:
    """Two rows with text from `vocab` ids and the images' placeholders, one for each square of 2 x 2 patches."""
    found = parity.tokens(vocab, SEQ)
    for (row, start), (_, height, width) in zip(PLACES, GRIDS, strict=True):
        found[row, start : start + height * width // 4] = IMAGE
    return found


class ImageConformance(Conformance):
    """A case is `{"text": changes, "vision": changes}` of the two bases, and what else changes."""

    text_base: ClassVar[dict[str, Any]]
    vision_base: ClassVar[dict[str, Any]] = TOWER
    ids: ClassVar[dict[str, int]] = TOKENS
    grids: ClassVar[list[list[int]]] = GRIDS  # that make as many vectors as there are placeholders
    patch_dim: ClassVar[int] = 96
    offset: ClassVar[
        int
    ] = -3  # of positions behind all of the images from the number of tokens; 0 where they count these
    refused: ClassVar[dict[str, Any]] = {
        "text_config.hidden_act": "gelu",
        "vision_config.hidden_act": "gelu",
        "vision_config.in_channels": 1,
        "vision_config.out_hidden_size": 24,
        "text_config.model_type": "llama",
    }

    @classmethod
    def transformers_cases(cls) -> dict[str, tuple[Any, np.ndarray, str, list[list[int]]]]:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("torch")

        def make(text=(), vision=(), **top):
            parts = {"text_config": cls.text_base | dict(text), "vision_config": cls.vision_base | dict(vision)}
            return getattr(transformers, cls.config)(**parts, **cls.ids, **top)

        return {name: (make(**changes), tokens(), cls.dtype, cls.grids) for name, changes in cls.cases.items()}

    test_what_a_config_leaves_out_is_as_in_transformers = None
    test_both_spellings_are_read = None  # of the families in turn

    @pytest.mark.full
    def test_transformers_opens_the_export(self, name, made, tmp_path):
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        case, _, model = made(name)
        maxlib.save_pretrained(model, tmp_path / "export")
        written = json.loads((tmp_path / "export" / "config.json").read_text())
        if "text_config" in written:  # a default of theirs may lie outside of a tiny vocabulary
            written["text_config"].setdefault("pad_token_id", None)
            (tmp_path / "export" / "config.json").write_text(json.dumps(written))
        theirs, info = transformers.AutoModelForImageTextToText.from_pretrained(
            tmp_path / "export", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
        )
        theirs = theirs.to(getattr(torch, self.dtype))
        assert not any(info.values()), info
        ids = torch.from_numpy(case["tokens"]).long()
        with torch.no_grad():
            want = theirs(ids, **parity.seen(case, ids, theirs.dtype)).logits.float().numpy()
        assert_close(parity.logits(model, case["tokens"], parity.images(case)), want, 1e-4)

    def by_row(self, case: dict[str, Any], *rows: int) -> nn.vision.Patches:
        """The images of some rows of tokens, a row of patches for each."""
        found, ends = parity.images(case), np.cumsum([0, *(np.prod(grid) for grid in self.grids)])
        first = np.cumsum([0, *COUNTS])
        own = [range(first[row], first[row + 1]) for row in rows]
        pixels = [found.pixels[ends[i] : ends[i + 1]] for images in own for i in images]
        grids = [found.grids[i] for images in own for i in images]
        return nn.vision.pad_patches(np.concatenate(pixels), np.stack(grids), counts=[len(images) for images in own])

    def test_rows_of_patches_and_padding_change_nothing(self, made):
        case, _, model = made(next(iter(self.cases)))
        images = self.by_row(case, 0, 1)
        assert images.pixels.shape[:2] == (2, 64) and images.grids.shape == (2, 2, 3)
        assert_close(parity.logits(model, case["tokens"], images), case["logits"], 1e-4)

    @pytest.mark.full
    def test_packed_equals_separate(self, name, exact):
        """Two documents with images in one row, with padding behind."""
        case, _, model = exact(name)
        rows, images = case["tokens"], parity.images(case)
        alone = _logits(model, rows, images=images)
        row = np.concatenate([rows[0], rows[1], np.zeros(3, np.int32)])[None]
        segments = np.repeat(np.array([1, 2, 0], np.int32), [SEQ, SEQ, 3])[None]
        got = _logits(model, row, segments, images)[0, : 2 * SEQ]
        assert_close(got, alone.reshape(2 * SEQ, -1), CLOSE)

    @pytest.mark.full
    def test_prefill_and_decode_equal_the_full_pass(self, name, exact):
        """Prompts of different lengths with all of their images, more text, then token by token."""
        case, _, model = exact(name)
        rows, images = case["tokens"], parity.images(case)
        want, got, done = _logits(model, rows, images=images), np.zeros_like(case["logits"]), np.zeros(2, int)
        cache = model.init_cache(2, SEQ, dtype=_dtype(model), rope_length=SEQ)
        for new in [(14, 7), (3, 0), *[(1, 1)] * (SEQ - 17), *[(0, 1)] * 10]:
            at = np.minimum(done[:, None] + np.arange(max(new)), SEQ - 1)
            valid = np.arange(max(new)) < np.array(new)[:, None]
            seen = {"images": images} if new[0] == 14 else {}
            logits, cache = step(model, np.where(valid, np.take_along_axis(rows, at, 1), 0), valid, cache, seen)
            for row, n in enumerate(new):
                got[row, done[row] : done[row] + n] = np.asarray(logits)[row, :n]
            done += new
        assert list(done) == [SEQ, SEQ]
        # By M-RoPE a picture of 2 x 3 squares takes three positions for six tokens, and one of 3 x 2 likewise.
        np.testing.assert_array_equal(0 if cache.position_offset is None else cache.position_offset, self.offset)
        assert_close(got, want, CLOSE)

    @pytest.mark.full
    def test_a_second_image_in_a_later_call(self, exact):
        case, _, model = exact(next(iter(self.cases)))
        rows, found, cut = case["tokens"][:1], parity.images(case), 10
        want = _logits(model, rows, images=self.by_row(case, 0))[0]
        cache = model.init_cache(1, SEQ, dtype=_dtype(model), rope_length=SEQ)
        ends = np.cumsum([0, *(np.prod(grid) for grid in self.grids)])
        parts = [nn.vision.Patches(found.pixels[ends[n] : ends[n + 1]], found.grids[n : n + 1]) for n in range(2)]
        got = []
        for part, images in zip((rows[:, :cut], rows[:, cut:]), parts, strict=True):
            logits, cache = step(model, part, np.ones(part.shape, bool), cache, {"images": images})
            got.append(np.asarray(logits)[0])
        assert_close(np.concatenate(got), want, CLOSE)

    @pytest.mark.full
    def test_eight_devices_equal_one(self, exact):
        """Read onto data x fsdp x tensor by the rules; each device has the images of its rows."""
        case, directory, model = exact(next(iter(self.cases)))
        layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), self.rules)
        spread = maxlib.from_pretrained(directory, layout=layout, dtype=_dtype(model))
        rows, images = np.tile(case["tokens"], (4, 1)), self.by_row(case, *[0, 1] * 4)
        with sharding.use(layout):
            got = _logits(spread, rows, images=images)
        assert_close(got, np.tile(_logits(model, case["tokens"], images=parity.images(case)), (4, 1, 1)), CLOSE)

    # --- bad input ---

    def test_images_that_do_not_fit_are_refused(self, made):
        case, _, model = made(next(iter(self.cases)))
        rows, images = jnp.asarray(case["tokens"]), parity.images(case)
        changed = lambda **new: dataclasses.replace(images, **new)
        with pytest.raises(ValueError, match=r"hold \[13\] image placeholders .* make \[12\] vectors"):
            model(rows, images=changed(grids=np.array([[1, 4, 6], [0, 0, 0], [1, 6, 4]], np.int32)))
        with pytest.raises(ValueError, match="have 13 image placeholders, but the given images make 0"):
            model(rows)
        with pytest.raises(ValueError, match="multiples of 2"):
            model(rows, images=changed(grids=np.array([[1, 8, 3], [1, 2, 2], [1, 6, 4]], np.int32)))
        with pytest.raises(ValueError, match="1 frame"):
            model(rows, images=changed(grids=np.array([[2, 2, 6], [1, 2, 2], [1, 6, 4]], np.int32)))
        with pytest.raises(ValueError, match="only 40 were given"):
            model(rows, images=changed(pixels=images.pixels[:40]))
        with pytest.raises(ValueError, match=f"patches of {self.patch_dim} numbers"):
            model(rows, images=changed(pixels=images.pixels[:, :-6]))
        with pytest.raises(ValueError, match="must be nn.vision.Patches"):
            model.check_inputs(rows, images=images.pixels)
        if self.offset:
            with pytest.raises(ValueError, match="three rows, time, row and column"):
                model(rows, images=images, positions=jnp.zeros(rows.shape, jnp.int32))

    def test_placeholders_without_images_show_inside_jit(self, made):
        case, _, model = made(next(iter(self.cases)))
        fewer = np.array(case["tokens"])
        fewer[1] = 0
        assert np.isnan(parity.logits(model, fewer, parity.images(case))).any()

    def test_export_is_what_was_read(self, name, made, tmp_path):
        _, directory, model = made(name)
        maxlib.save_pretrained(model, tmp_path / "export")
        want, got = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "export"))
        assert got.keys() == want.keys()
        for tensor, value in want.items():
            assert got[tensor].tobytes() == value.tobytes(), tensor
        again = json.loads((tmp_path / "export" / "config.json").read_text())
        assert family_of(model).fields.read(HFConfig(again)) == model.cfg


@jax.jit
def step(model, tokens, valid, cache, seen):
    out = model(tokens, valid=valid, cache=cache, dtype=_dtype(model), **seen)
    return model.logits(out.hidden), out.cache
