"""Images of chats: patches and placeholders equal those of transformers, and packing keeps both together."""

import dataclasses
import errno
import importlib
import json
import sys
import types
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from maxlib import data, nn, tokenization, training
from maxlib.models import gemma4, mistral, qwen3_vl
from maxlib.tokenization import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = [(8, 16), (16, 8), (16, 16)]  # in pixels; patches have 4 x 4, of which 2 x 2 have one placeholder


def rgb(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def tokenizer():
    special = ("<user>", "<assistant>", "</s>", "<image>")
    return tokenization.train_bpe(["what is this"] * 3, vocab_size=280, special_tokens=special)


@pytest.fixture(scope="module")
def processor(tokenizer):
    image = tokenizer.token_to_id("<image>")
    return data.ImageProcessor(image_token=image, patch_size=4, frames=1, min_pixels=64, max_pixels=4096)


def chat(*images, answer: str = "A cat.") -> dict:
    """A chat with images before and after the question, or with text only."""
    parts = [{"type": "image", "image": image} for image in images]
    content = [*parts[:1], {"type": "text", "text": "What is this?"}, *parts[1:]] if images else "What is this?"
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def chats() -> list[dict]:
    """Twelve chats with no, one or two images of different sizes, told apart by their answers."""
    images = [rgb(*SIZES[i % 3], seed=i) for i in range(24)]
    return [chat(*images[2 * i : 2 * i + i % 3], answer=f"{'so ' * (i % 5)}{i}") for i in range(12)]


def tokenized(documents, tokenizer, processor, **options):
    source = grain.MapDataset.source(documents)
    return data.tokenize_chats(source, tokenizer, ChatTemplate(TEMPLATE), images=processor, **options)


# --- one image ---


@pytest.mark.parametrize(("size", "omni"), [((45, 70), False), ((7, 9), False), ((301, 40), True)])
def test_patches_are_those_of_transformers(size, omni, tmp_path):
    """Also in a directory of Qwen3-Omni, whose files describe sound too."""
    pytest.importorskip("torch")
    Image = pytest.importorskip("PIL.Image")
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    fields = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 32 * 48, "longest_edge": 128 * 128},
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.25, 0.2],
    }
    hears = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "n_fft": 400}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields | (hears if omni else {})))
    config = {"thinker_config": {"image_token_id": 7}} if omni else {"image_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, image = data.ImageProcessor.from_directory(tmp_path), rgb(*size)
    del fields["image_processor_type"]
    want = module.Qwen2VLImageProcessorPil(**fields)(images=[image.transpose(2, 0, 1)], return_tensors="np")
    Image.fromarray(image).save(tmp_path / "image.png")
    for source in (image, Image.fromarray(image), tmp_path / "image.png", str(tmp_path / "image.png")):
        got = ours(source)
        np.testing.assert_array_equal(got.grids, want["image_grid_thw"])
        np.testing.assert_allclose(got.pixels, want["pixel_values"], rtol=0, atol=1e-5)
    assert got.pixels.shape[1] == ours.patch_dim and ours.image_token == 7


@pytest.mark.parametrize("size", [(45, 70), (7, 9), (301, 40), (250, 300)])
def test_patches_of_glm4v_are_those_of_transformers(size, tmp_path):
    """Its files count the pixels of both frames; 7 x 9 are narrower than a square of patches."""
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.glm4v.image_processing_pil_glm4v")
    fields = {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 2 * 32 * 48, "longest_edge": 2 * 128 * 128},
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.25, 0.2],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 7}))
    got = data.ImageProcessor.from_directory(tmp_path)(image := rgb(*size))
    del fields["image_processor_type"]
    want = module.Glm4vImageProcessorPil(**fields)(images=[image.transpose(2, 0, 1)], return_tensors="np")
    np.testing.assert_array_equal(got.grids, want["image_grid_thw"])
    np.testing.assert_allclose(got.pixels, want["pixel_values"], rtol=0, atol=1e-5)


PLACES = "image", "image_break", "image_end"
WORDS = {"[IMG]": 60, "[IMG_BREAK]": 58, "[IMG_END]": 59}
SHAPES = [(64, 96), (45, 70), (7, 9), (301, 40), (200, 300), (31, 400), (1, 90)]


def directory(path, settings: dict, config: dict):
    """A directory with a tokenizer of one word per id."""
    words = {f"w{i}": i for i in range(64) if i not in WORDS.values()} | WORDS
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens([*WORDS])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    for name, fields in (settings | {"config.json": config}).items():
        (path / name).write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(("merge", "nested"), [(1, True), (2, False)])
def test_pixtral_is_transformers_own(tmp_path, monkeypatch, merge, nested):
    """Pixels, sizes and the tokens of an image, with settings as transformers 4 and 5 write them."""
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    images = {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 96}}
    named = images | {"image_processor_type": "PixtralImageProcessor"}
    places = {"patch_size": 8, "spatial_merge_size": merge}
    apart = {"preprocessor_config.json": named, "processor_config.json": places}
    settings = {"processor_config.json": places | {"image_processor": named}} if nested else apart
    config = {"model_type": "mistral3", "image_token_index": 60, "spatial_merge_size": merge}
    config |= {"vision_config": {"patch_size": 8}}
    ours = data.ImageProcessor.from_directory(directory(tmp_path, settings, config))
    pictures = [rgb(*size, seed=i) for i, size in enumerate(SHAPES)]
    make = module.PixtralImageProcessorPil(**images | {"patch_size": 8 * merge})  # as the processor around it asks for
    want = make(images=[image.transpose(2, 0, 1) for image in pictures], return_tensors="np")
    got = [ours(image) for image in pictures]
    cut = mistral.Vision(patch_size=8, merge=merge).patches(want["pixel_values"], want["image_sizes"])
    joined = ours.join(got)
    np.testing.assert_array_equal(joined.grids, np.asarray(cut.grids)[: len(pictures)])
    np.testing.assert_allclose(joined.pixels, cut.pixels[: len(joined.pixels)], rtol=0, atol=1e-5)
    # Its module takes a function of one that needs torchvision; this one has it, too.
    monkeypatch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", module)
    processor = importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    around = types.SimpleNamespace(
        **places, **{f"{name}_token": word for name, word in zip(PLACES, WORDS, strict=True)}
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for i, patches in enumerate(got):
        text = processor.replace_image_token(around, want, i)
        assert ours.placeholders(patches.grids[0]) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_gemma4_is_transformers_own(tmp_path, kind):
    """The 12B's patches are the squares of the other sizes'; its own processor needs torchvision."""
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    unified = kind == "gemma4_unified"
    name = "Gemma4UnifiedImageProcessor" if unified else "Gemma4ImageProcessor"
    fields = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    config = {"model_type": kind, "image_token_id": 60, "boi_token_id": 58, "eoi_token_id": 59}
    config |= {"vision_config": {"patch_size": 4, "pooling_kernel_size": 3}}
    settings = {"processor_config.json": {"image_processor": fields | {"image_processor_type": name}}}
    ours = data.ImageProcessor.from_directory(directory(tmp_path, settings, config))
    shape = {"patch_size": 4, "pool": 3}
    sees = (
        gemma4.UnifiedVision(**shape)
        if unified
        else gemma4.Vision(**shape, dim=16, num_heads=2, num_kv_heads=2, head_dim=8)
    )
    for i, size in enumerate(SHAPES):
        image = rgb(*size, seed=i)
        want = module.Gemma4ImageProcessorPil(**fields)(images=[image.transpose(2, 0, 1)], return_tensors="np")
        got = ours(image)
        cut = nn.vision.pad_patches_by_position(want["pixel_values"], want["image_position_ids"], merge=3)
        pixels, grid = np.asarray(cut.pixels)[: cut.grids[0].prod()], cut.grids
        if unified:  # squares of patches, their pixels row by row
            _, rows, columns = grid[0] // [1, 3, 3]
            pixels = pixels.reshape(-1, 3, 3, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(rows * columns, -1)
            grid = np.array([[1, rows, columns]])
        np.testing.assert_array_equal(got.grids, grid)
        np.testing.assert_allclose(got.pixels, pixels, rtol=0, atol=1e-5)
        assert got.pixels.shape[1] == sees.patch_dim and ours.merge == sees.merge
        count = want["num_soft_tokens_per_image"][0]
        assert ours.placeholders(got.grids[0]) == [58, *[60] * int(count), 59]


def test_settings_that_do_not_fit_the_model_are_refused(tmp_path):
    named = {"image_processor_type": "PixtralImageProcessor"}
    config = {"model_type": "mistral3", "image_token_index": 60, "vision_config": {"patch_size": 14}}
    read = lambda settings, config=config: data.ImageProcessor.from_directory(directory(tmp_path, settings, config))
    with pytest.raises(ValueError, match="spatial_merge_size must be 2, as the model's config.json says, got 1"):
        read({"preprocessor_config.json": named, "processor_config.json": {"spatial_merge_size": 1}})
    with pytest.raises(ValueError, match=r"the tokenizer must have \[BREAK\], which is one of an"):
        read({"preprocessor_config.json": named, "processor_config.json": {"image_break_token": "[BREAK]"}})
    with pytest.raises(ValueError, match=r"size.longest_edge must be a number of pixels, got \{'height': 3\}"):
        read({"preprocessor_config.json": named | {"size": {"height": 3}}, "processor_config.json": {}})
    named = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 8}
    with pytest.raises(ValueError, match="patch_size must be 16, as the model's config.json says, got 8"):
        read({"preprocessor_config.json": named}, {"model_type": "gemma4", "vision_config": {}})


def test_directories_of_other_processors_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="its model reads no images"):
        data.ImageProcessor.from_directory(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"image_processor_type": "SiglipImageProcessor"}))
    with pytest.raises(ValueError, match="must be one of Qwen2VLImageProcessor, .*, got 'SiglipImageProcessor'"):
        data.ImageProcessor.from_directory(tmp_path)
    with pytest.raises(ValueError, match="an image must be at most 8 times as long as wide"):
        data.PixtralImageProcessor(image_token=1, break_token=2, end_token=3, longest_edge=8).size(1, 90)
    path.write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "resample": 2}))
    with pytest.raises(ValueError, match="resample must be 3, got 2"):
        data.ImageProcessor.from_directory(tmp_path)
    path.write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "size": {"height": 3}}))
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 7}))
    with pytest.raises(ValueError, match=r"size.shortest_edge must be a number of pixels, got None"):
        data.ImageProcessor.from_directory(tmp_path)


def test_images_of_other_kinds_are_refused(processor):
    with pytest.raises(ValueError, match="must be `H W 3` of uint8, got .* of float64"):
        processor(np.zeros((8, 8, 3)))
    with pytest.raises(ValueError, match="at most 200 times as long as wide, got 1 x 201"):
        processor(rgb(1, 201))
    with pytest.raises(ValueError, match="room for an image of 4 patches at least, got 3"):
        processor.blank(3)
    for wrong in ({"std": (0.5, 0.0, 0.5)}, {"std": (0.5, -1.0, 0.5)}, {"mean": (0.5, float("nan"), 0.5)}):
        with pytest.raises(ValueError, match="mean must be finite and std positive, got"):
            dataclasses.replace(processor, **wrong)


# --- tokens ---


def test_each_square_of_patches_has_a_placeholder(tokenizer, processor):
    """As Hugging Face's processor writes them: into the text, before it is tokenized."""
    documents = chats()
    for document, converted in zip(documents, tokenized(documents, tokenizer, processor), strict=True):
        content = document["messages"][0]["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        shapes = [part["image"].shape for part in parts if part["type"] == "image"]
        written = [part.get("text") or "<image>" * (np.prod(part["image"].shape[:2]) // 64) for part in parts]
        text = f"<user>{''.join(written)}</s><assistant>{document['messages'][1]['content']}</s>"
        assert converted["tokens"].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
        assert converted["images"].grids.tolist() == [[1, height // 4, width // 4] for height, width, _ in shapes]
        learned = [t for t in converted["targets"].tolist() if t >= 0]
        answer = tokenizer.decode(learned, skip_special_tokens=False)
        assert answer == f"{document['messages'][1]['content']}</s>"
        at = np.flatnonzero(converted["targets"] >= 0)
        np.testing.assert_array_equal(converted["targets"][at], converted["tokens"][at + 1])


def test_files_lie_beside_the_chats(tokenizer, processor, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    (tmp_path / "images").mkdir()
    Image.fromarray(image := rgb(16, 8)).save(tmp_path / "images" / "1.png")
    lines = [json.dumps(chat(name)) for name in ("images/1.png", str(tmp_path / "images" / "1.png"), "none.png")]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    chats = data.tokenize_chats(
        data.chats(tmp_path / "chats.jsonl"), tokenizer, ChatTemplate(TEMPLATE), images=processor
    )
    for i in range(2):
        np.testing.assert_array_equal(chats[i]["images"].pixels, processor(image).pixels)
    with pytest.raises(ValueError, match=r"chats.jsonl: byte \d+: FileNotFoundError.*none.png"):
        chats[2]


def test_photographs_are_turned_upright_as_in_transformers(processor, tmp_path):
    """A camera that is held sideways writes how to turn the pixels."""
    from PIL import Image
    from transformers.image_utils import load_image

    photograph = Image.fromarray(rgb(24, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    photograph.save(tmp_path / "photograph.png", exif=exif)
    upright = load_image(str(tmp_path / "photograph.png")).convert("RGB")
    assert upright.size == photograph.size[::-1]
    for image in (tmp_path / "photograph.png", Image.open(tmp_path / "photograph.png")):
        np.testing.assert_array_equal(processor(image).pixels, processor(upright).pixels)


def test_failing_disks_are_no_bad_records(tokenizer, processor, tmp_path, monkeypatch):
    (tmp_path / "broken.png").write_bytes(b"no image")
    bad = data.SkipBadRecords(limit=2)
    read = bad.guard(
        tokenized([chat(str(tmp_path / name)) for name in ("broken.png", "none.png")], tokenizer, processor)
    )
    assert read[0] is None and read[1] is None and len(bad) == 2
    failing = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr("PIL.Image.open", failing)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read[1]
    assert caught.value.__notes__ == ["While reading chat 1."]


def test_chats_whose_images_do_not_fit_are_refused(tokenizer, processor):
    read = lambda document, images=processor: tokenized([document], tokenizer, images)[0]
    with pytest.raises(ValueError, match="the chat has 1 images: pass images="):
        read(chat(rgb(8, 8)), None)
    with pytest.raises(ValueError, match="wrote 1 image placeholders for 0 images"):
        read(chat(answer="<image>"))
    with pytest.raises(ValueError, match="must be a file, under 'image' or 'path', got 'https://x/y.png'"):
        read(chat("https://x/y.png"))
    film = {"role": "user", "content": [{"type": "video", "path": "x.mp4"}]}
    with pytest.raises(ValueError, match="the chat has 1 videos: pass videos="):
        read({"messages": [film, {"role": "assistant", "content": "ok"}]})


# --- rows ---


def rows_of(documents, processor, *, length=32, patches=40, **options) -> list:
    return list(data.pack(documents, length=length, images=processor.blank(patches), **options))


def pieces(rows, image_token: int):
    """Tokens, targets and patches of each document in its row."""
    for row in rows:
        ends = np.cumsum(row["images"].grids.prod(axis=1))
        begin = taken = 0
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            begin = taken
            patches = 4 * int((row["tokens"][inside] == image_token).sum())
            taken += patches
            images = [i for i, end in enumerate(ends) if begin < end <= taken and row["images"].grids[i].any()]
            assert sum(row["images"].grids[i].prod() for i in images) == patches
            yield (
                row["tokens"][inside],
                row["targets"][inside],
                row["images"].pixels[begin:taken],
                row["images"].grids[images],
            )
        assert not row["images"].pixels[taken:].any() and ends[-1] == taken


def test_rows_hold_every_document_with_its_images(tokenizer, processor):
    documents = list(tokenized(chats(), tokenizer, processor))
    rows = rows_of(grain.MapDataset.source(documents), processor, bins=3)
    shapes = {(row["images"].pixels.shape, row["images"].grids.shape, row["tokens"].shape) for row in rows}
    assert shapes == {((40, 48), (10, 3), (32,))} and "positions" not in rows[0]
    packed = {tuple(tokens): rest for tokens, *rest in pieces(rows, processor.image_token)}
    assert len(packed) == len(documents) > len(rows)
    for document in documents:
        targets, pixels, grids = packed[tuple(document["tokens"])]
        np.testing.assert_array_equal(targets, document["targets"])
        np.testing.assert_array_equal(pixels, document["images"].pixels)
        np.testing.assert_array_equal(grids, document["images"].grids)


def test_what_does_not_fit_a_row_is_an_error_or_dropped(tokenizer, processor):
    documents = tokenized(chats(), tokenizer, processor)
    with pytest.raises(ValueError, match=r"must fit a row of 32 tokens, 16 patches and 4 images, got \d+, \d+ and 2"):
        rows_of(documents, processor, patches=16)
    loader = data.Loader(
        lambda part: data.pack(documents[part], length=32, images=processor.blank(16), overlong="drop"),
        batch_size=2,
        num_shards=1,
    )
    batches = list(loader)
    fit = [document for document in documents if len(document["images"].pixels) <= 16]
    assert loader.metrics()["data/dropped_documents"] == len(documents) - len(fit) > 0
    assert sum((batch["targets"] >= 0).sum() for batch in batches) == sum((d["targets"] >= 0).sum() for d in fit)
    with pytest.raises(ValueError, match="cannot be split"):
        rows_of(documents, processor, strategy="concat_then_split")
    with pytest.raises(ValueError, match="pack it with images="):
        list(data.pack(documents, length=32))
    first = next(i for i, document in enumerate(documents) if len(document["images"].grids))
    with pytest.raises(ValueError, match="pad it with images="):
        data.pad(documents, length=512)[first]


def tiny_config(processor) -> qwen3_vl.Config:
    vision = qwen3_vl.Vision(
        dim=16, mlp_dim=16, num_layers=1, num_heads=2, patch_size=4, frames=1, num_positions=16,
        image_token=processor.image_token, video_token=277, start_token=278, end_token=279,
    )  # fmt: skip
    return qwen3_vl.Config(
        vocab=280, num_layers=1, dim=32, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=16,
        rope=qwen3_vl.Rope(16, 10_000.0, max_length=64), sections=(4, 2, 2), vision=vision,
    )  # fmt: skip


@pytest.mark.full
def test_a_batch_has_the_loss_and_the_gradient_of_its_chats(tokenizer, processor):
    """Packed rows with images, and rows of padding, against every chat by itself."""
    model = qwen3_vl.Qwen3VL(tiny_config(processor), rngs=nnx.Rngs(0))
    params, rest = nn.partition(model)

    @jax.jit
    @jax.value_and_grad
    def step(params, batch):
        return training.NextToken()(nn.combine(params, rest), batch, dtype=jnp.float32, remat="full")[0]

    def total(batches):
        losses, gradients = zip(*(step(params, batch) for batch in batches), strict=True)
        return float(sum(losses)), jax.tree.map(lambda *of: np.sum(of, axis=0), *gradients)

    documents = list(tokenized(chats(), tokenizer, processor))
    source = grain.MapDataset.source(documents)
    rows = lambda part: data.pack(source[part], length=32, images=processor.blank(40))
    batches = list(data.Loader(rows, batch_size=4, num_shards=1))
    got, gradients = total(batches)

    def alone(document) -> dict:
        """Puts the chat into its own row, with three empty rows, so that all chats share one program."""
        images, size, blank = document["images"], len(document["tokens"]), processor.blank(40)
        blank.pixels[: len(images.pixels)], blank.grids[: len(images.grids)] = images.pixels, images.grids
        pad = lambda x, fill: np.pad([x], ((0, 3), (0, 32 - size)), constant_values=fill).astype(np.int32)
        row = {"tokens": pad(document["tokens"], 0), "targets": pad(document["targets"], -1)}
        row["segment_ids"] = pad(np.ones(size), 0)
        return row | {"images": jax.tree.map(lambda x: np.stack([x, *[0 * x] * 3]), blank)}

    want, expected = total(map(alone, documents))
    assert got == pytest.approx(want, rel=1e-5)
    for path, value in expected.items():
        np.testing.assert_allclose(gradients[path], value, atol=1e-5 * np.abs(value).max() + 1e-9, err_msg=path)
    assert any(path.startswith("tower") and np.abs(value).max() > 1e-3 for path, value in gradients.items())
    blind = [{**batch, "images": jax.tree.map(np.array, batch["images"])} for batch in batches]
    for batch in blind:
        batch["images"].pixels[:] = 0
    assert abs(total(blind)[0] - want) > 1e-3 * want
