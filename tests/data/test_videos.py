"""Videos of chats: frames, times, patches and text against the processors of transformers."""

import importlib.util
import json

import grain
import numpy as np
import pytest
from tokenizers import Tokenizer

from maxlib import data, tokenization
from maxlib.tokenization import ChatTemplate
from tests.data.test_images import chat as image_chat
from tests.data.test_images import rgb

SPECIAL = ("<user>", "<assistant>", "</s>", "<image>", "<video>", "<begin>", "<end>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% elif p.type == 'video' %}<video>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAMPLINGS = [(count, fps) for count in (4, 5, 7, 23, 48, 150, 301, 997) for fps in (12.0, 23.976, 24.0, 30.0)]
FIELDS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
FIELDS |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
CONFIG = {"video_token_id": 7, "vision_start_token_id": 8, "vision_end_token_id": 9}
GEMMA = {"video_token_id": 7, "boi_token_id": 8, "eoi_token_id": 9}
GEMMA |= {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2}}
KINDS = {
    "Qwen2VLVideoProcessor": ("qwen2_vl", FIELDS | {"size": {"shortest_edge": 256, "longest_edge": 1024}}, CONFIG),
    "Qwen3VLVideoProcessor": ("qwen3_vl", FIELDS | {"size": {"shortest_edge": 1024, "longest_edge": 8192}}, CONFIG),
    "Gemma4VideoProcessor": ("gemma4", {"patch_size": 4, "pooling_kernel_size": 2}, GEMMA),
}


def read(tmp_path, kind, **changes):
    """The processor of a directory, and transformers' module of its kind."""
    module, fields, config = KINDS[kind]
    fields = fields | {"video_processor_type": kind} | changes
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text(json.dumps(config))
    pytest.importorskip("torch")
    name = f"video_processing_{module}"
    if module == "gemma4" and importlib.util.find_spec("torchvision") is None:
        name = "image_processing_pil_gemma4"  # has the same function of sizes, and needs no torchvision
    theirs = pytest.importorskip(f"transformers.models.{module}.{name}")
    return data.VideoProcessor.from_directory(tmp_path), theirs


def film(frames: int, height: int = 16, width: int = 24) -> np.ndarray:
    return np.stack([rgb(height, width, seed=i) for i in range(frames)])


class Bare:
    """Takes methods of a processor of transformers, which cannot be made without torchvision."""

    def __init__(self, cls, **attributes):
        self.__dict__ = {"cls": cls, "options": {name: attributes[name] for name in ("num_frames", "fps")}} | attributes

    def sample(self, count, fps):
        from transformers.video_utils import VideoMetadata

        indices = self.cls.sample_frames(self, metadata=VideoMetadata(total_num_frames=count, fps=fps), **self.options)
        return np.asarray(indices).tolist()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Qwen2VLVideoProcessor", {"do_sample_frames": True, "fps": 2.0}),
        ("Qwen2VLVideoProcessor", {"do_sample_frames": True, "fps": 0.7, "min_frames": 6, "max_frames": 17}),
        ("Qwen2VLVideoProcessor", {"do_sample_frames": True, "num_frames": 4}),
        ("Qwen2VLVideoProcessor", {}),
        ("Qwen3VLVideoProcessor", {"fps": 2.0}),
        ("Qwen3VLVideoProcessor", {"fps": 3.0, "min_frames": 6, "max_frames": 17}),
        ("Qwen3VLVideoProcessor", {"num_frames": 4}),
    ],
    ids=str,
)
def test_frames_are_those_of_transformers(kind, options, tmp_path):
    ours, module = read(tmp_path, kind, **options)
    usual = {"min_frames": 4, "max_frames": 768, "temporal_patch_size": 2, "num_frames": None, "fps": None}
    theirs = Bare(getattr(module, kind), **usual | options)
    for count, fps in SAMPLINGS:
        if kind.startswith("Qwen2") and not options:  # takes all frames without a choice
            assert ours.sample(count, fps).tolist() == list(range(count))
        else:
            assert ours.sample(count, fps).tolist() == theirs.sample(count, fps), (count, fps)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_transformers(kind, tmp_path):
    changes = {"cap_pixels_per_frame": True, "max_video_tokens": 12}
    for capped in ({}, {} if kind.startswith("Gemma4") else changes):
        ours, module = read(tmp_path, kind, **capped)
        for count, height, width in [(4, 45, 70), (9, 7, 30), (31, 301, 40), (2, 16, 24), (60, 200, 300)]:
            if kind.startswith("Gemma4"):
                want = module.get_aspect_ratio_preserving_size(height, width, 4, 70 * 4, 2)
            else:
                low, high = KINDS[kind][1]["size"].values()
                if capped and kind.startswith("Qwen2"):
                    high = max(min(high, int(12 * 64 * 0.9) * 2 // count), int(low * 1.05))
                elif capped:
                    high = max(min(12 * 64, high // count), int(low * 1.05)) * count
                sizes = {"min_pixels": low, "max_pixels": high, "factor": 8}
                several = {} if kind.startswith("Qwen2") else {"num_frames": count, "temporal_factor": 2}
                want = module.smart_resize(height=height, width=width, **several, **sizes)
            assert ours.frame_size(count, height, width) == tuple(want), (count, height, width)


@pytest.mark.parametrize("frames", [4, 5])
@pytest.mark.parametrize("kind", ["Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"])
def test_patches_are_those_of_transformers(kind, frames, tmp_path):
    """Of frames that keep their size."""
    torch = pytest.importorskip("torch")

    ours, module = read(tmp_path, kind)
    got = ours(film(frames))
    mean, std = (np.asarray(KINDS[kind][1][name], np.float32) for name in ("image_mean", "image_std"))
    pixels = ((film(frames) / np.float32(255) - mean) / std).transpose(0, 3, 1, 2)[None]
    cut = getattr(module, kind).patchify
    want, *grid = cut(None, torch.from_numpy(pixels), patch_size=4, merge_size=2, temporal_patch_size=2)
    np.testing.assert_allclose(got.pixels, want[0], rtol=0, atol=1e-6)
    assert grid == [3 if frames == 5 else 2, 4, 6] == [len(got.grids), *got.grids[0, 1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_processors_agree(kind, tmp_path):
    """Where torchvision is: choice, sizes, pixels (which it rounds differently) and grids of resized frames."""
    pytest.importorskip("torchvision")
    options = (
        {"fps": 2.0}
        if kind.startswith("Qwen3")
        else {"num_frames": 6} | ({"do_sample_frames": True} if kind.startswith("Qwen2") else {})
    )
    ours, module = read(tmp_path, kind, **options)
    theirs = getattr(module, kind)(**KINDS[kind][1] | options)
    frames = film(31, 45, 70)
    metadata = {"total_num_frames": 31, "fps": 10.0, "width": 70, "height": 45, "duration": 3.1}
    want = theirs(videos=[frames], video_metadata=[metadata], return_tensors="np", return_metadata=True)
    got, times = ours.frames_of(data.Video(frames, 10.0))
    np.testing.assert_allclose(times, np.array(want["video_metadata"][0].frames_indices) / 10)
    if kind.startswith("Gemma4"):
        from maxlib.nn import vision

        their = vision.pad_patches_by_position(want["pixel_values_videos"], want["video_position_ids"], merge=2)
        pixels, grids, near = their.pixels, their.grids, 2 / 255
    else:
        pixels, grids, near = want["pixel_values_videos"], want["video_grid_thw"], 2 / 255 / 0.2
        assert [len(got.grids), *got.grids[0, 1:]] == grids[0].tolist()
    assert np.abs(got.pixels - pixels[: len(got.pixels)]).max() <= near
    assert np.abs(got.pixels - pixels[: len(got.pixels)]).mean() < near / 4


def test_gemma_spaces_frames_evenly_and_writes_minutes_and_seconds():
    videos = data.Gemma4VideoProcessor(image_token=7, begin_token=8, end_token=9, num_frames=4)
    assert videos.sample(9, 24.0).tolist() == [0, 2, 4, 6] and videos.sample(3, 24.0).tolist() == [0, 1, 2]
    assert videos.text(np.array([0.9, 61.5]), "<{}>".format) == "00:00 <8><7><9> 01:01 <8><7><9>"


def test_files_directories_and_arrays_are_one_video(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    processor = data.VideoProcessor(
        image_token=7, patch_size=4, min_pixels=256, max_pixels=1024, fps=None, num_frames=4
    )
    frames = film(9)
    for i, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"{i:03}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    want, times = processor.frames_of(frames)
    np.testing.assert_allclose(times, np.array([0, 2, 4, 6]) / 24)
    for video in (tmp_path, str(tmp_path), data.Video(frames), data.Video(sorted(tmp_path.glob("*.png")))):
        got, at = processor.frames_of(video)
        np.testing.assert_array_equal(got.pixels, want.pixels)
        np.testing.assert_array_equal(at, times)
    with pytest.raises(ValueError, match="frames of a video must have one size"):
        processor([rgb(8, 8), rgb(8, 16)])
    with pytest.raises(ValueError, match="must have frames, got none"):
        processor.frames_of(np.zeros((0, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="4 frames must be chosen of a video, which has 3"):
        processor.frames_of(film(3))


def test_files_are_decoded(tmp_path):
    """Losslessly: its frames, at its rate."""
    av = pytest.importorskip("av")
    processor = data.VideoProcessor(image_token=7, patch_size=4, min_pixels=256, max_pixels=1024, fps=5.0)
    frames = film(20)
    with av.open(str(tmp_path / "film.mkv"), "w") as file:
        stream = file.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 24, 16, "bgr0"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))
    got, times = processor.frames_of(tmp_path / "film.mkv")
    want, _ = processor.frames_of(data.Video(frames, 10.0))
    np.testing.assert_array_equal(got.pixels, want.pixels)
    np.testing.assert_allclose(times, np.arange(0, 20, 2) / 10)


# --- chats ---


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenization.train_bpe(["what is this <0.5 seconds>"] * 3, vocab_size=300, special_tokens=SPECIAL)


def processors(tokenizer):
    ids = {name: tokenizer.token_to_id(f"<{name}>") for name in ("image", "video", "begin", "end")}
    sizes = {"patch_size": 4, "min_pixels": 64, "max_pixels": 8192}
    images = data.ImageProcessor(image_token=ids["image"], **sizes)
    plain = data.VideoProcessor(image_token=ids["video"], fps=None, **sizes)
    timed = data.Qwen3VideoProcessor(
        image_token=ids["video"], begin_token=ids["begin"], end_token=ids["end"], fps=None, **sizes
    )
    return images, plain, timed


def conversation():
    """A picture, a video, another picture, and an answer with a video."""
    messages = image_chat(rgb(8, 16), rgb(16, 8, seed=5))["messages"]
    messages[0]["content"].insert(1, {"type": "video", "video": data.Video(film(4, 8, 16), fps=2.0)})
    shown = [
        {"type": "text", "text": "See: "},
        {"type": "video", "video": film(5, 16, 8)},
        {"type": "text", "text": "ok"},
    ]
    return {"messages": [messages[0], {"role": "assistant", "content": shown}]}


@pytest.mark.parametrize("kind", [1, 2], ids=["plain", "timed"])
def test_chats_have_images_and_frames_in_their_order(tokenizer, kind):
    images, videos = processors(tokenizer)[0], processors(tokenizer)[kind]
    template = ChatTemplate(TEMPLATE)
    source = grain.MapDataset.source([conversation()])
    row = data.tokenize_chats(source, tokenizer, template, images=images, videos=videos)[0]
    short, long = "<video>" * 2, "<video>" * 2
    if kind == 1:
        first, second = short * 2, long * 3
    else:
        wrap = lambda times, text: "".join(f"<{t} seconds><begin>{text}<end>" for t in times)
        first, second = wrap(("0.2", "1.2"), short), wrap(("0.0", "0.1", "0.2"), long)
    text = f"<user><image><image>{first}What is this?<image><image></s><assistant>See: {second}ok</s>"
    assert row["tokens"].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert [tuple(g) for g in row["images"].grids[:, 1:]] == [(2, 4)] * 3 + [(4, 2)] * 4
    pieces = [images(rgb(8, 16)), videos(film(4, 8, 16)), images(rgb(16, 8, seed=5)), videos(film(5, 16, 8))]
    np.testing.assert_array_equal(row["images"].pixels, np.concatenate([p.pixels for p in pieces]))
    # The whole answer is learned, times too, but for placeholders.
    learned = tokenizer.decode([t for t in row["targets"].tolist() if t >= 0], skip_special_tokens=False)
    assert learned == f"See: {second}ok</s>".replace("<video>", "")
    packed = next(iter(data.pack(grain.MapDataset.source([row]), length=128, images=images.blank(120))))
    np.testing.assert_array_equal(packed["images"].pixels[: len(row["images"].pixels)], row["images"].pixels)


def test_videos_that_do_not_fit_are_refused(tokenizer, tmp_path):
    images, plain, _ = processors(tokenizer)
    made = lambda document, **options: data.tokenize_chats(
        grain.MapDataset.source([document]), tokenizer, ChatTemplate(TEMPLATE), **options
    )[0]
    with pytest.raises(ValueError, match="the chat has 2 videos: pass videos="):
        made(conversation(), images=images)
    with pytest.raises(ValueError, match="the chat has 2 images: pass images="):
        made(conversation(), videos=plain)
    with pytest.raises(ValueError, match="wrote 1 video placeholders for 0 videos"):
        made(image_chat(answer="<video>"), videos=plain)
    with pytest.raises(ValueError, match="choose frames by fps or by num_frames"):
        data.VideoProcessor(image_token=7, num_frames=4)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="its model reads no videos"):
        data.VideoProcessor.from_directory(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": "InternVL"}))
    with pytest.raises(ValueError, match="video_processor_type must be one of .*, got 'InternVL'"):
        data.VideoProcessor.from_directory(tmp_path)
