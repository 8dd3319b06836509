"""Sound of chats: frames and placeholders equal those of transformers, and rows keep both together."""

import json
import wave

import grain
import numpy as np
import pytest

from maxlib import data, nn, tokenization
from maxlib.models import qwen3_omni
from maxlib.tokenization import ChatTemplate
from tests.data.test_images import rgb

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RATE = 16_000


def sounds() -> list[np.ndarray]:
    """A tone, a sweep, noise, silence as short as a frame, and a click, of different lengths."""
    random, time = np.random.RandomState(0), np.arange(20_000) / RATE
    click = np.zeros(1600, np.float32)
    click[800] = 1
    tones = [0.5 * np.sin(2 * np.pi * 440 * time), np.sin(2 * np.pi * (50 + 2000 * time) * time)[:12_345]]
    noise = random.uniform(-1, 1, 7777), 1e-4 * random.standard_normal(4000)
    return [np.asarray(sound, np.float32) for sound in (*tones, *noise, np.zeros(161), click)]


def written(path, samples: np.ndarray, *, rate: int = RATE, channels: int = 1, width: int = 2):
    """A .wav file; what is read of it differs from `samples` by rounding only."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 2.0 ** (8 * width - 1)).astype(f"<i{width}").tobytes())
    return path


# --- one clip ---


def test_frames_are_those_of_transformers():
    """Of clips of different lengths in one batch, whose padding transformers masks."""
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.gemma4.feature_extraction_gemma4")
    want = module.Gemma4AudioFeatureExtractor()(sounds(), return_tensors="np")
    ours = data.AudioProcessor()
    clips = ours.join([ours(sound) for sound in sounds()])
    np.testing.assert_array_equal(clips.lengths, want["input_features_mask"].sum(axis=1))
    assert clips.lengths.min() == 1
    size = clips.frames.shape[1]
    np.testing.assert_allclose(clips.frames, want["input_features"][:, :size], rtol=0, atol=1e-5)
    assert not want["input_features_mask"][:, size:].any()
    got = nn.audio.pad_clips(want["input_features"], want["input_features_mask"])
    np.testing.assert_array_equal(got.lengths[:6], clips.lengths)
    np.testing.assert_allclose(got.frames[:6, :size], clips.frames, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bands", [80, pytest.param(128, marks=pytest.mark.full)])
def test_frames_of_whisper_are_those_of_transformers(bands, tmp_path):
    """And are what its model hears; transformers computes in float32."""
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.whisper.feature_extraction_whisper")
    fields = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bands, "n_fft": 400}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text("{}")
    ours = data.AudioProcessor.from_directory(tmp_path)
    for sound in (*sounds()[:3], np.random.RandomState(1).uniform(-1, 1, 480_000)):
        want = module.WhisperFeatureExtractor(feature_size=bands)(sound, sampling_rate=RATE, return_tensors="np")
        clips = ours(sound)
        np.testing.assert_allclose(clips.frames[0].T, want["input_features"][0], rtol=0, atol=2e-4)
        assert np.abs(clips.frames[0].T - want["input_features"][0]).mean() < 1e-5
        assert clips.lengths.tolist() == [3000] and ours.frame_dim == bands
    with pytest.raises(ValueError, match=r"1 to 480000 samples \(30 seconds\), got 480001"):
        ours(np.zeros(480_001))
    with pytest.raises(ValueError, match="without placeholders"):
        ours.placeholders(3000)


def test_samples_of_the_12b_model_are_those_of_transformers():
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.gemma4_unified.feature_extraction_gemma4_unified")
    want = module.Gemma4UnifiedAudioFeatureExtractor()(sounds(), return_tensors="np")
    ours = data.WaveformProcessor()
    clips = ours.join([ours(sound) for sound in sounds()])
    np.testing.assert_array_equal(clips.lengths, want["input_features_mask"].sum(axis=1))
    np.testing.assert_array_equal(clips.frames, want["input_features"])


def test_frames_of_qwen3_omni_are_those_of_transformers():
    """Of each clip by itself, in float64."""
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.whisper.feature_extraction_whisper")
    ours, theirs = data.Qwen3OmniAudioProcessor(), module.WhisperFeatureExtractor(feature_size=128)
    how = {"sampling_rate": RATE, "padding": True, "truncation": False, "return_attention_mask": True}
    for sound in (sound for sound in sounds() if len(sound) >= ours.min_samples):
        in_float32, got = theirs(sound, return_tensors="np", **how), ours(sound)
        assert got.lengths.tolist() == in_float32["attention_mask"].sum(axis=1).tolist()
        want = theirs._np_extract_fbank_features([sound.astype(np.float64)], "cpu")
        np.testing.assert_allclose(got.frames, want.swapaxes(1, 2), rtol=0, atol=1e-4)
        np.testing.assert_allclose(got.frames, in_float32["input_features"].swapaxes(1, 2), rtol=0, atol=1e-3)


def test_a_processor_of_qwen3_omni_is_read(tmp_path):
    ids = {"audio_token_id": 7, "audio_start_token_id": 5, "audio_end_token_id": 6, "image_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": ids}))
    fields = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "n_fft": 400}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    ours = data.AudioProcessor.from_directory(tmp_path)
    assert ours == data.Qwen3OmniAudioProcessor(audio_token=7, begin_token=5, end_token=6)
    lengths = np.arange(1, 420)
    want = qwen3_omni.PRESETS["qwen3-omni-30b-a3b"].audio.num_tokens(lengths)
    np.testing.assert_array_equal([ours.num_tokens(int(n)) for n in lengths], want)
    assert ours.placeholders(130) == [7] * 17


def test_files_and_arrays_are_read_alike(tmp_path):
    ours, sound = data.AudioProcessor(), 0.5 * sounds()[1]
    both = np.stack([sound + 0.25, sound - 0.25], axis=1)
    files = [written(tmp_path / "a.wav", sound), written(tmp_path / "b.wav", sound, width=4)]
    files += [written(tmp_path / "c.wav", both, channels=2), str(files[0])]
    want = ours(sound)
    for source in (sound.astype(np.float64), {"array": sound, "sampling_rate": RATE}):
        np.testing.assert_array_equal(ours(source).frames, want.frames)
    for source, tolerance in zip(files, (2e-4, 1e-5, 2e-4, 2e-4), strict=True):
        samples = ours._samples(source)
        np.testing.assert_allclose(samples, sound, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(ours(source).lengths, want.lengths)


def test_sound_that_cannot_be_read_is_refused(tmp_path):
    ours, sound = data.AudioProcessor(), sounds()[0]
    with pytest.raises(ValueError, match="must have 16000 samples per second, got 44100: resample it"):
        ours(written(tmp_path / "a.wav", sound, rate=44_100))
    with pytest.raises(ValueError, match="must have 16000 samples per second, got 8000"):
        ours({"array": sound, "sampling_rate": 8000})
    with pytest.raises(ValueError, match=r"floats from -1 to 1, `n`, got \(20000,\) of int16"):
        ours((sound * 1000).astype(np.int16))
    with pytest.raises(ValueError, match=r"one channel .* got \(2, 10000\)"):
        ours(sound.reshape(2, -1))
    with pytest.raises(ValueError, match=r"161 to 480000 samples \(30 seconds\), got 160"):
        ours(sound[:160])
    with pytest.raises(ValueError, match="got 480001: cut it"):
        ours(np.zeros(480_001, np.float32))
    with pytest.raises(ValueError, match=r"b\.wav: samples must have 16 or 32 bits, got 8"):
        ours(written(tmp_path / "b.wav", sound * 0, width=1))
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match=f"samples of a clip must be finite, got {wrong}"):
            ours(np.append(sound, np.float32(wrong)))
    cut = written(tmp_path / "d.wav", sound).read_bytes()[:-1]
    (tmp_path / "d.wav").write_bytes(cut)
    with pytest.raises(ValueError, match=r"d\.wav: the last sample is cut off: the file is damaged"):
        ours(tmp_path / "d.wav")
    (tmp_path / "c.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"c\.wav: sound must be an uncompressed \.wav file"):
        ours(tmp_path / "c.wav")


IDS = {"audio_token_id": 7, "boa_token_id": 8, "eoa_token_index": 9}


def directory(path, extractor: dict, config: dict, *, nested: bool = True):
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (path / name).write_text(json.dumps({"feature_extractor": extractor} if nested else extractor))
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_settings_are_read_from_a_directory(tmp_path):
    """As transformers writes them, in either file; other values than those that are computed are refused."""
    fields = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 64, "hop_length": 160}
    fields |= {"mel_floor": 0.001, "sampling_rate": RATE, "per_bin_mean": None, "padding_side": "right"}
    config = {"audio_config": {}, **IDS}
    for nested in (False, True):
        ours = data.AudioProcessor.from_directory(directory(tmp_path, fields, config, nested=nested))
        assert ours == data.AudioProcessor(audio_token=7, begin_token=8, end_token=9, num_bands=64)
    (tmp_path / "preprocessor_config.json").unlink()
    settings = {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor", "audio_samples_per_token": 320}
    ours = data.AudioProcessor.from_directory(directory(tmp_path, settings, config))
    assert ours == data.WaveformProcessor(audio_token=7, begin_token=8, end_token=9, num_samples=320)
    for name, value in {"hop_length": 80, "dither": 0.1, "per_bin_mean": [1.0], "sampling_rate": 8000}.items():
        with pytest.raises(ValueError, match=f"{name} must be"):
            data.AudioProcessor.from_directory(directory(tmp_path, fields | {name: value}, config))
    with pytest.raises(ValueError, match="feature_extractor_type must be one of Gemma4Audio.*, got 'Seamless"):
        other = {"feature_extractor_type": "SeamlessM4TFeatureExtractor"}
        data.AudioProcessor.from_directory(directory(tmp_path, other, config))
    with pytest.raises(ValueError, match="must have an audio_config"):
        data.AudioProcessor.from_directory(directory(tmp_path, fields, {"audio_config": None}))
    with pytest.raises(FileNotFoundError, match="its model reads no sound"):
        data.AudioProcessor.from_directory(tmp_path / "nowhere")


def test_defaults_are_those_of_transformers():
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.gemma4.feature_extraction_gemma4")
    theirs = json.loads(module.Gemma4AudioFeatureExtractor().to_json_string())
    assert {name: theirs[name] for name in data.AudioProcessor.fixed} == dict(data.AudioProcessor.fixed)


# --- chats ---


@pytest.fixture(scope="module")
def tokenizer():
    special = ("<user>", "<assistant>", "</s>", "<image>", "<audio>", "<boa>", "<eoa>")
    return tokenization.train_bpe(["what is this"] * 3, vocab_size=280, special_tokens=special)


@pytest.fixture(scope="module")
def processor(tokenizer):
    ids = {"begin_token": tokenizer.token_to_id("<boa>"), "end_token": tokenizer.token_to_id("<eoa>")}
    return data.AudioProcessor(audio_token=tokenizer.token_to_id("<audio>"), **ids, num_bands=8)


@pytest.fixture(scope="module")
def images(tokenizer):
    image = tokenizer.token_to_id("<image>")
    return data.ImageProcessor(image_token=image, patch_size=4, frames=1, min_pixels=64, max_pixels=4096)


def chat(*clips, image=None, answer: str = "A cat.") -> dict:
    parts = [{"type": "audio", "audio": clip} for clip in clips]
    parts = [*parts[:1], {"type": "text", "text": "What is this?"}, *parts[1:]]
    parts += [] if image is None else [{"type": "image", "image": image}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def chats() -> list[dict]:
    """Twelve chats with no, one or two clips, every fourth with an image, told apart by their answers."""
    noise = np.random.RandomState(0).uniform(-1, 1, 24 * 3000).astype(np.float32)
    clips = [noise[3000 * i : 3000 * i + 500 + 100 * i] for i in range(24)]
    image = lambda i: rgb(8, 16, seed=i) if i % 4 == 1 else None
    return [chat(*clips[2 * i : 2 * i + i % 3], image=image(i), answer=f"{'so ' * (i % 5)}{i}") for i in range(12)]


def tokenized(documents, tokenizer, processor, images=None):
    source = grain.MapDataset.source(documents)
    return data.tokenize_chats(source, tokenizer, ChatTemplate(TEMPLATE), images=images, audio=processor)


def test_placeholders_of_clips_are_no_targets(tokenizer, processor, tmp_path):
    """One for every four frames, between two tokens; files are found beside the chats."""
    sound = sounds()
    written(tmp_path / "a.wav", sound[0] * 0.5)
    record = chat("a.wav", sound[4]) | {"folder": str(tmp_path)}
    (document,) = tokenized([record], tokenizer, processor)
    assert document["audio"].lengths.tolist() == [124, 1]
    tokens, targets = document["tokens"], document["targets"]
    counts = [31, 1]
    ids = [processor.begin_token, processor.audio_token, processor.end_token]
    runs = [[ids[0], *[ids[1]] * n, ids[2]] for n in counts]
    text = [tokenizer.encode(part, add_special_tokens=False).ids for part in ("<user>", "What is this?", "</s>")]
    want = [*text[0], *runs[0], *text[1], *runs[1], *text[2]]
    assert tokens[: len(want)].tolist() == want
    assert (targets[: len(want)] == -1).all() and not np.isin(targets, ids).any() and (targets >= 0).any()


def test_counts_are_those_of_transformers(processor):
    """The processor's rule, two convolutions on the mask, for every length up to 200."""
    for length in range(1, 200):
        mask = np.ones(length)
        for _ in range(2):
            mask = mask[::2][: (len(mask) + 2 - 3) // 2 + 1]
        assert processor.placeholders(length).count(processor.audio_token) == int(mask.sum())


def test_chats_without_a_processor_and_wrong_templates_are_refused(tokenizer, processor):
    with pytest.raises(ValueError, match="the chat has 1 clips: pass audio="):
        tokenized([chat(sounds()[0])], tokenizer, None)[0]
    with pytest.raises(ValueError, match="an audio must be a file, under 'audio' or 'path', got 'https://a"):
        tokenized([chat("https://a.b/c.wav")], tokenizer, processor)[0]
    deaf = ChatTemplate(TEMPLATE.replace("<{{ p.type }}>", ""))
    with pytest.raises(ValueError, match="wrote 0 audio placeholders for 1 clips"):
        data.tokenize_chats(grain.MapDataset.source([chat(sounds()[0])]), tokenizer, deaf, audio=processor)[0]


def test_packed_rows_hold_every_clip_once(tokenizer, processor, images):
    """With the tokens that stand for it, in the order of its placeholders, beside images."""
    documents = list(tokenized(chats(), tokenizer, processor, images))
    room = {"audio": processor.blank(4, 20), "images": images.blank(40)}
    rows = list(data.pack(grain.MapDataset.source(documents), length=128, **room))
    assert len(rows) < len(documents)
    taken = []
    for row in rows:
        assert row["audio"].frames.shape == (4, 20, 8) and row["audio"].lengths.shape == (4,)
        first = 0
        for segment in range(1, row["segment_ids"].max() + 1):
            ids = row["tokens"][row["segment_ids"] == segment]
            document = next(candidate for candidate in documents if np.array_equal(candidate["tokens"], ids))
            for clip, length in zip(document["audio"].frames, document["audio"].lengths, strict=True):
                assert row["audio"].lengths[first] == length
                np.testing.assert_array_equal(row["audio"].frames[first, :length], clip[:length])
                assert not row["audio"].frames[first, length:].any()
                first += 1
            taken.append(ids.tobytes())
        assert not row["audio"].lengths[first:].any() and not row["audio"].frames[first:].any()
        vectors = sum(processor.num_tokens(length) for length in row["audio"].lengths.tolist())
        assert (row["tokens"] == processor.audio_token).sum() == vectors
    assert sorted(taken) == sorted(candidate["tokens"].tobytes() for candidate in documents)


def test_rows_without_room_are_refused(tokenizer, processor, images):
    documents = grain.MapDataset.source(list(tokenized(chats(), tokenizer, processor, images)))
    more = {"length": 128, "images": images.blank(40)}
    with pytest.raises(ValueError, match="128 tokens, 40 patches, 10 images, 1 clips and 20 frames of a clip, got"):
        list(data.pack(documents, audio=processor.blank(1, 20), **more))
    kept = list(data.pack(documents, audio=processor.blank(1, 20), overlong="drop", **more))
    assert 0 < sum(int((row["audio"].lengths > 0).sum()) for row in kept) < 12
    with pytest.raises(ValueError, match=r"has audio: pack it with audio=, such as AudioProcessor\.blank"):
        list(data.pack(documents, **more))
    with pytest.raises(ValueError, match="room for a clip of a frame"):
        processor.blank(0, 20)


def test_padded_rows_have_the_clips_of_their_document(tokenizer, processor):
    short = [record for i, record in enumerate(chats()) if i % 4 != 1]
    documents = tokenized(short, tokenizer, processor)
    blank = processor.blank(2, 20)
    for document, row in zip(documents, data.pad(documents, length=128, audio=blank), strict=True):
        count = len(document["audio"].lengths)
        assert row["audio"].frames.shape == blank.frames.shape
        np.testing.assert_array_equal(row["audio"].lengths, np.pad(document["audio"].lengths, (0, 2 - count)))
        size = document["audio"].frames.shape[1]
        np.testing.assert_array_equal(row["audio"].frames[:count, :size], document["audio"].frames)
    small = processor.blank(1, 20)
    assert 0 < len(list(data.pad(documents, length=128, overlong="drop", audio=small).to_iter_dataset())) < len(short)
    with pytest.raises(ValueError, match="must fit a row of 1 clips and 20 frames"):
        list(data.pad(documents, length=128, audio=small))
    with pytest.raises(ValueError, match="A document has audio: pad it with audio="):
        list(data.pad(documents, length=128))


def test_pairs_carry_their_clips(tokenizer, processor):
    messages = chat(sounds()[3])["messages"]
    pair = {"chosen": messages, "rejected": [messages[0], {"role": "assistant", "content": "A dog."}]}
    (document,) = data.pairs([pair], tokenizer, ChatTemplate(TEMPLATE), audio=processor)
    (row,) = data.pad(grain.MapDataset.source([document]), length=64, audio=processor.blank(1, 30))
    for half in ("chosen", "rejected"):
        np.testing.assert_array_equal(row[half]["audio"].lengths, [24])
