"""Tests that families with images of any size must pass: `InputConformance`, with images in every row."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn
from tests.models import parity
from tests.models.conformance import CLOSE, _dtype, _logits, assert_close
from tests.models.input_conformance import InputConformance, step

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
    ids = parity.tokens(vocab, SEQ)
    for (row, start), (_, height, width) in zip(PLACES, GRIDS, strict=True):
        ids[row, start : start + height * width // 4] = IMAGE
    return ids


class ImageConformance(InputConformance):
    """A case is `{"text": changes, "vision": changes}` of the two bases, and what else changes."""

    text_base: ClassVar[dict[str, Any]]
    vision_base: ClassVar[dict[str, Any]] = TOWER
    ids: ClassVar[dict[str, int]] = TOKENS
    grids: ClassVar[list[list[int]]] = GRIDS  # that make as many vectors as there are placeholders
    patch_dim: ClassVar[int] = 96
    prompts = 14, 7
    # By M-RoPE a picture of 2 x 3 squares takes three positions for six tokens, and one of 3 x 2 likewise.
    offset = -3

    @classmethod
    def transformers_cases(cls) -> dict[str, tuple[Any, np.ndarray, str, list[list[int]]]]:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("torch")

        def make(text=(), vision=(), **top):
            parts = {"text_config": cls.text_base | dict(text), "vision_config": cls.vision_base | dict(vision)}
            return getattr(transformers, cls.config)(**parts, **cls.ids, **top)

        return {name: (make(**changes), tokens(), cls.dtype, cls.grids) for name, changes in cls.cases.items()}

    def by_row(self, case: dict[str, Any], *rows: int) -> dict[str, Any]:
        """The images of some rows of tokens, a row of patches for each."""
        patches, ends = parity.images(case), np.cumsum([0, *(np.prod(grid) for grid in self.grids)])
        first = np.cumsum([0, *COUNTS])
        numbers = [range(first[row], first[row + 1]) for row in rows]
        pixels = [patches.pixels[ends[i] : ends[i + 1]] for images in numbers for i in images]
        grids = [patches.grids[i] for images in numbers for i in images]
        counts = [len(images) for images in numbers]
        return {"images": nn.vision.pad_patches(np.concatenate(pixels), np.stack(grids), counts=counts)}

    @pytest.mark.full
    def test_a_second_image_in_a_later_call(self, exact):
        case, _, model = exact(next(iter(self.cases)))
        rows, patches, cut = case["tokens"][:1], parity.images(case), 10
        want = _logits(model, rows, **self.by_row(case, 0))[0]
        cache = model.init_cache(1, SEQ, dtype=_dtype(model), rope_length=SEQ)
        ends = np.cumsum([0, *(np.prod(grid) for grid in self.grids)])
        parts = [nn.vision.Patches(patches.pixels[ends[n] : ends[n + 1]], patches.grids[n : n + 1]) for n in range(2)]
        got = []
        for part, images in zip((rows[:, :cut], rows[:, cut:]), parts, strict=True):
            logits, cache = step(model, part, np.ones(part.shape, bool), cache, {"images": images})
            got.append(np.asarray(logits)[0])
        assert_close(np.concatenate(got), want, CLOSE)

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
