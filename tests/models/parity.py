"""Small models with reproducible weights, and their results in transformers and maxlib.

A golden file holds, per case, the config, the names and shapes of the weights, tokens, transformers' logits, and of
the gradient of every weight its norm and one projection. `python -m tests.models.parity [family ...]` writes them anew.
"""

import functools
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn

GOLDEN = Path(__file__).parent / "golden"
EMBEDDING = re.compile(r"(?<!patch_)embed|\bw[tp]e\b")  # GPT-2's names differ from all others
NORM = re.compile(r"norm|LayerNorm|\bln_|layer_scalar|router\.scale|per_expert_scale")  # and other factors about one
SECONDS_PER_GRID = 0.7  # between frames of videos
FROM_CONFIG = "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"  # of Qwen3.8-Flash-Next
MASKED, SEQ2SEQ = ("bert", "roberta", "modernbert"), ("t5", "t5gemma")  # values of model_type
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.npz"))


def tensors(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Weights by name, float32, of a size that keeps activations near one. `RandomState` never changes its stream."""
    random = np.random.RandomState(0)
    values = {}
    for name in sorted(shapes):
        noise = random.standard_normal(shapes[name]).astype(np.float32)
        wide = 1.0 if EMBEDDING.search(name) else np.float32((shapes[name] or [1])[-1]) ** -0.5
        # asarray: a sum with an array of no axes is a number.
        values[name] = np.asarray(1 + 0.1 * noise if NORM.search(name) else noise * np.float32(wide))
        if name.endswith(("put_min", "put_max")):  # bounds of Gemma 4's encoder, which a part of all numbers exceeds
            values[name] = np.asarray(np.float32(-1.2 if name.endswith("min") else 1.2) + 0.1 * noise)
        if name.endswith("A_log"):  # rates about 0.05: a state that keeps hundreds of tokens
            values[name] = np.float32(np.log(0.05)) + 0.3 * noise
        if name.endswith("tid2eid"):  # experts of each id, of DeepSeek V4
            values[name] = _experts(*shapes[name], experts=shapes[name.replace("tid2eid", "weight")][0])
    return values


def _experts(vocab: int, top_k: int, *, experts: int) -> np.ndarray:
    """Different experts for each id."""
    first = np.random.RandomState(4).randint(0, experts, (vocab, 1))
    return (first + np.arange(top_k) * (experts // top_k)) % experts


def tokens(vocab: int, seq: int) -> np.ndarray:
    return np.random.RandomState(1).randint(0, vocab, (2, seq)).astype(np.int32)


def directory(path: Path, case: dict[str, Any], **changes: np.ndarray) -> Path:
    """A Hugging Face directory, made without transformers."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(case["config"]))
    save_file(tensors(case["shapes"]) | changes, path / "model.safetensors", metadata={"format": "pt"})
    return path


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A config of transformers 5 as transformers 4 wrote it."""
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)  # OLMo 3: what it says is of these layers, the others are not scaled
    top = {name: value for name, value in rope.items() if name in ("rope_theta", "partial_rotary_factor")}
    scaling = {name: value for name, value in rope.items() if name not in top}
    rest = {name: value for name, value in config.items() if name != "rope_parameters"}
    return rest | {
        **top,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
    }


def images(case: dict[str, Any]) -> nn.vision.Patches | None:
    """The images of a case that has grids: noise, which any Python can make again."""
    if (grids := case.get("grids")) is None:
        return None
    vision = multimodal(case)["vision_config"]
    joined = vision["pooling_kernel_size"] if "mm_embed_dim" in vision else 1  # patches that a processor joins
    frames = vision.get("temporal_patch_size", vision.get("patch_temporal", 1))
    size = 3 * frames * (joined * vision["patch_size"]) ** 2
    grids = np.array(grids, np.int32)
    pixels = np.random.RandomState(2).standard_normal((grids.prod(axis=1).sum(), size)).astype(np.float32)
    if case["config"]["model_type"] == "qwen3_omni_moe":  # with videos, whose frames have times
        return nn.vision.pad_patches(pixels, grids, second_per_grid=[SECONDS_PER_GRID] * len(grids))
    return nn.vision.Patches(pixels, grids)


def multimodal(case: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes encoders and placeholders."""
    return case["config"].get("thinker_config", case["config"])


def audio(case: dict[str, Any]) -> nn.audio.Clips | None:
    """The sound of a case that has lengths of clips: noise, also in the padding. Whisper hears one for each row."""
    if case["config"]["model_type"] == "whisper":
        shape = 2, 1, 2 * case["config"]["max_source_positions"], case["config"]["num_mel_bins"]
        frames = np.random.RandomState(3).standard_normal(shape).astype(np.float32)
        return nn.audio.Clips(frames, np.full(shape[:2], shape[2], np.int32))
    if (lengths := case.get("clips")) is None:
        return None
    hears = multimodal(case)["audio_config"]
    widths = hears.get("audio_embed_dim"), hears.get("num_mel_bins"), *hears.get("subsampling_conv_channels", ())
    width = next(width for width in widths if width is not None)
    frames = np.random.RandomState(3).standard_normal((len(lengths), max(lengths) + 3, width)).astype(np.float32)
    return nn.audio.Clips(frames, np.array(lengths, np.int32))


def source(case: dict[str, Any]) -> nn.Source | None:
    """What the encoder of a case reads: tokens, in the second row with padding on both sides."""
    if case["config"]["model_type"] not in SEQ2SEQ:
        return None
    ids = np.random.RandomState(4).randint(0, case["config"]["vocab_size"], (2, 17)).astype(np.int32)
    return nn.Source(ids, valid=(np.arange(17) >= np.array([[0], [3]])) & (np.arange(17) < np.array([[17], [15]])))


def inputs_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """The images and the sound of a case; of an encoder-decoder its source too."""
    return (images(case), audio(case)) if (read := source(case)) is None else (None, None, read)


def by_position(patches: nn.vision.Patches, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches of each image row by row, with padding, and their columns and rows, as Gemma 4's processors give them."""
    sizes = patches.grids.prod(axis=1)
    shape = len(sizes), sizes.max() + merge**2
    pixels, positions = np.zeros((*shape, patches.pixels.shape[1]), np.float32), np.full((*shape, 2), -1)
    for i, pixels_of_image in enumerate(np.split(patches.pixels[: sizes.sum()], np.cumsum(sizes)[:-1])):
        _, height, width = patches.grids[i]
        # [y, x, m, m, C] -> [y, m, x, m, C]
        squares = pixels_of_image.reshape(height // merge, width // merge, merge, merge, -1)
        pixels[i, : sizes[i]] = squares.swapaxes(1, 2).reshape(sizes[i], -1)
        positions[i, : sizes[i]] = np.stack(np.divmod(np.arange(sizes[i]), width)[::-1], axis=1)
    return pixels, positions


def projection(name: str, gradient: np.ndarray) -> np.ndarray:
    """Norm of a gradient, and its product with a random direction."""
    direction = np.random.RandomState(len(name)).standard_normal(gradient.shape)
    return np.array([np.linalg.norm(gradient), np.vdot(direction, gradient)])


# --- transformers ---------------------------------------------------------------------------------------------------


def theirs(
    config: Any,
    tokens: np.ndarray,
    dtype: str = "float32",
    grids: list[list[int]] | None = None,
    clips: list[int] | None = None,
) -> dict[str, Any]:
    """Computes the contents of a golden file with transformers, for `config` in `dtype`.

    `grids` are those of images, and `clips` lengths of clips of sound, whose placeholders are among the tokens.
    """
    import torch

    how = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others are not for float64
    sees = grids is not None or clips is not None
    model = auto(config.model_type, sees=sees).from_config(config, **how).eval()
    model = model.to(getattr(torch, dtype))
    state = tensors_of(model)
    shapes = {name: list(index.shape) for name, index in stored(model, _numbered(state)).items()}
    _fill(model, state, tensors(shapes))
    for (
        module
    ) in model.modules():  # the row of padding stands for images in Gemma 4, and gets a gradient like any other
        if (sees or config.model_type in (*MASKED, "whisper", "t5gemma")) and isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    ids = torch.from_numpy(tokens).long()
    case = {"config": json.loads(config.to_json_string(use_diff=False)), "grids": grids, "clips": clips}
    logits = forward(model)(**arguments(case, ids, model.dtype)).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = stored(model, {name: _gradient(name, t) for name, t in state.items()})
    return case | {
        "shapes": shapes,
        "tokens": tokens,
        "logits": logits.detach().float().numpy(),
        "gradients": {name: projection(name, g.detach().numpy()) for name, g in gradients.items()},
    }


def _gradient(name: str, tensor: Any) -> Any:
    """A gradient; what is not trained stands for itself, as in our export of gradients."""
    if tensor.grad is None and re.search(r"^thinker.*\.(visual|audio_tower)\.", name):
        return tensor.detach() * 0  # of an encoder that reads nothing
    return tensor if tensor.grad is None else tensor.grad


def forward(model: Any) -> Any:
    """The part of a model that computes logits: of Qwen3-Omni, the thinker."""
    return getattr(model, "thinker", model)


def auto(model_type: str, *, sees: bool = False) -> Any:
    """Their class that makes models of a type."""
    import transformers

    if model_type in (*MASKED, *SEQ2SEQ, "whisper"):
        name = (
            "ForMaskedLM" if model_type in MASKED else "ForSpeechSeq2Seq" if model_type == "whisper" else "ForSeq2SeqLM"
        )
        return getattr(transformers, f"AutoModel{name}")
    if model_type == "qwen3_omni_moe":
        return transformers.AutoModelForMultimodalLM
    # They list Mistral 4's text among models that see.
    sees = sees or model_type == "mistral4"
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def arguments(case: dict[str, Any], ids: Any, dtype: Any) -> dict[str, Any]:
    """Returns all arguments of transformers' models for a case; in encoder-decoders `ids` are the decoder's."""
    import torch

    if case["config"]["model_type"] == "whisper":
        frames = torch.from_numpy(audio(case).frames[:, 0].swapaxes(1, 2).copy()).to(dtype)
        return {"input_features": frames, "decoder_input_ids": ids}
    if (read := source(case)) is None:
        return {"input_ids": ids, **seen(case, ids, dtype)}
    tokens, valid = torch.from_numpy(read.tokens).long(), torch.from_numpy(read.valid).long()
    # T5Gemma takes its padding token for padding, where no mask says that it is real.
    real = {"decoder_attention_mask": torch.ones_like(ids)} if case["config"]["model_type"] == "t5gemma" else {}
    return {"input_ids": tokens, "attention_mask": valid, "decoder_input_ids": ids, **real}


def seen(case: dict[str, Any], ids: Any, dtype: Any) -> dict[str, Any]:
    """Returns the arguments of transformers' models for the images and the sound of a case."""
    import torch

    if case["config"]["model_type"] == "qwen3_omni_moe":
        return seen_by_omni(case, ids, dtype)
    if (pictures := images(case)) is None:
        return heard(case, ids, dtype)
    if case["config"]["model_type"].startswith("gemma4"):
        return seen_by_gemma(case, pictures, ids, dtype) | heard(case, ids, dtype)
    if case["config"]["vision_config"]["model_type"] == "pixtral":  # which takes images, padded to a common size
        pixels, sizes = put_together(case, pictures)
        return {"pixel_values": torch.from_numpy(pixels).to(dtype), "image_sizes": torch.from_numpy(sizes).long()}
    if case["config"]["model_type"] == "kimi_k25":  # whose patches lie row by row
        patches = [pixels.reshape(-1, *pixels.shape[2:]) for pixels in row_by_row(pictures, 2)]
        size = case["config"]["vision_config"]["patch_size"]
        pixels = torch.from_numpy(np.concatenate(patches).reshape(-1, 3, size, size)).to(dtype)
        return {"pixel_values": pixels, "image_grid_thw": torch.from_numpy(pictures.grids).long()}
    if case["config"]["model_type"] == "muse_glimmer":  # likewise
        patches = np.concatenate([pixels.reshape(-1, pixels.shape[2]) for pixels in row_by_row(pictures, 2)])
        return {
            "pixel_values": torch.from_numpy(patches).to(dtype),
            "image_grid_thw": torch.from_numpy(pictures.grids).long(),
        }
    pixels, grids = torch.from_numpy(pictures.pixels).to(dtype), torch.from_numpy(pictures.grids).long()
    kinds = (ids == case["config"]["image_token_id"]).int()
    return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}


def seen_by_omni(case: dict[str, Any], ids: Any, dtype: Any) -> dict[str, Any]:
    """The same of Qwen3-Omni, which takes videos apart from images, and all frames of a row together."""
    import torch

    config, arguments = multimodal(case), {"attention_mask": torch.ones_like(ids)}
    if (pictures := images(case)) is not None:
        grids = np.array(case["grids"])
        pixels = np.split(pictures.pixels, np.cumsum(grids.prod(axis=1)))[: len(grids)]
        for name, size, chosen in (("", "image", grids[:, 0] == 1), ("_videos", "video", grids[:, 0] > 1)):
            if chosen.any():
                patches = np.concatenate([x for x, use in zip(pixels, chosen, strict=True) if use])
                arguments[f"pixel_values{name}"] = torch.from_numpy(patches).to(dtype)
                arguments[f"{size}_grid_thw"] = torch.from_numpy(grids[chosen]).long()
        arguments["video_second_per_grid"] = torch.full((len(grids),), SECONDS_PER_GRID)
        starts = ids[:, :-1] == config["vision_start_token_id"]
        arguments["use_audio_in_video"] = bool((starts & (ids[:, 1:] == config["audio_start_token_id"])).any())
    if sound := heard(case, ids, dtype):
        arguments["input_features"] = sound["input_features"].swapaxes(1, 2)
        arguments["feature_attention_mask"] = sound["input_features_mask"].long()
    return arguments


def heard(case: dict[str, Any], ids: Any, dtype: Any) -> dict[str, Any]:
    """The same of sound: frames, and which of them are real."""
    import torch

    if (clips := audio(case)) is None:
        return {}
    mask = np.arange(clips.frames.shape[1]) < clips.lengths[:, None]
    frames = torch.from_numpy(clips.frames).to(dtype)
    return {"input_features": frames, "input_features_mask": torch.from_numpy(mask)}


def put_together(case: dict[str, Any], pictures: nn.vision.Patches) -> tuple[np.ndarray, np.ndarray]:
    """Images put together again patch by patch, and their heights and widths."""
    p, m = case["config"]["vision_config"]["patch_size"], case["config"].get("spatial_merge_size", 1)
    pixels, sizes, patches = [], np.asarray(pictures.grids)[:, 1:] * p, iter(np.asarray(pictures.pixels))
    for height, width in sizes:
        image = np.zeros((3, *sizes.max(axis=0)), np.float32)
        squares = [(y, x) for y in range(0, height, p * m) for x in range(0, width, p * m)]
        for y, x in [(y + p * a, x + p * b) for y, x in squares for a in range(m) for b in range(m)]:
            image[:, y : y + p, x : x + p] = next(patches).reshape(3, p, p)
        pixels.append(image)
    return np.stack(pixels), sizes


def row_by_row(patches: nn.vision.Patches, merge: int) -> list[np.ndarray]:
    """Patches of each image by row and column."""
    sizes = patches.grids.prod(axis=1)
    images = np.split(patches.pixels[: sizes.sum()], np.cumsum(sizes)[:-1])
    grids = [(height // merge, width // merge) for _, height, width in patches.grids]
    # [y, x, m, m, C] -> [y, m, x, m, C]
    squares = [image.reshape(*grid, merge, merge, -1) for image, grid in zip(images, grids, strict=True)]
    return [x.swapaxes(1, 2).reshape(len(x) * merge, x.shape[1] * merge, -1) for x in squares]


def seen_by_gemma(case: dict[str, Any], patches: nn.vision.Patches, ids: Any, dtype: Any) -> dict[str, Any]:
    """The same of Gemma 4, whose patches lie row by row, and come with their places."""
    import torch
    import transformers

    unified = case["config"]["model_type"] == "gemma4_unified"
    kinds = (ids == case["config"]["image_token_id"]).int()
    merge = 1 if unified else case["config"]["vision_config"]["pooling_kernel_size"]
    pixels, positions = map(torch.from_numpy, by_position(patches, merge))
    arguments = {"pixel_values": pixels.to(dtype), "image_position_ids": positions, "mm_token_type_ids": kinds}
    if not unified:
        return arguments
    # The masks of its `generate`, like those of Gemma 4: without them images would see both ways in global layers, too.
    without = {"attention_mask": None, "past_key_values": None, "position_ids": None, "mm_token_type_ids": kinds}
    config = transformers.AutoConfig.for_model(**case["config"])
    config._attn_implementation = "eager"
    make = transformers.Gemma4UnifiedForConditionalGeneration.create_masks_for_generate
    return arguments | {"attention_mask": make(config, torch.zeros((*ids.shape, 1), dtype=dtype), **without)}


def tensors_of(model: Any) -> dict[str, Any]:
    """Parameters and what else is stored; a tied head is listed once, and what follows from the config is not."""
    kept = {name for name in model.state_dict() if not name.endswith(FROM_CONFIG)}
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}


def stored(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors as files have them: transformers keeps experts in one tensor that files store one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    named = dict(revert_weight_conversion(model, tensors))
    if model.config.model_type == "qwen3_vl_moe":  # transformers reads experts either way; releases have the other one
        named = {name: t.transpose(1, 2) if ".experts." in name else t for name, t in named.items()}
    if model.config.model_type == "kimi_k25":  # transformers writes some names that no release has
        renames = (".model.blocks.", ".model.layers."), ("encoder.patch_embed", "patch_embed"), ("model.mm_", "mm_")
        named = {functools.reduce(lambda n, pair: n.replace(*pair), renames, name): t for name, t in named.items()}
    if model.config.model_type == "kimi_linear":  # transformers writes dense layers under the name of the experts
        named = {re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): t for name, t in named.items()}
    return named


def _numbered(tensors: dict[str, Any]) -> dict[str, Any]:
    """For each value its number among all."""
    import torch

    ends = np.cumsum([t.numel() for t in tensors.values()])
    return {
        name: torch.arange(end - t.numel(), end).reshape(t.shape)
        for end, (name, t) in zip(ends, tensors.items(), strict=True)
    }


def _fill(model: Any, tensors: dict[str, Any], values: dict[str, np.ndarray]) -> None:
    """Gives `model` stored values, wherever it keeps them."""
    import torch

    places = _numbered(tensors)
    flat = np.empty(sum(t.numel() for t in tensors.values()), np.float32)
    for name, index in stored(model, places).items():
        flat[index.numpy()] = values[name]  # ids of experts, too: small integers are exact in float32
    for name, tensor in tensors.items():
        tensor.data.copy_(torch.from_numpy(np.asarray(flat[places[name].numpy()])))


# --- ours -----------------------------------------------------------------------------------------------------------


# Half the time to compile; what is compared takes no time to run.
QUICK = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, compiler_options=QUICK)
def _loss_and_gradients(params, rest, tokens, seen):
    def loss(params):
        model = nn.combine(params, rest)
        logits = model.logits(model(tokens, dtype=jnp.float32, **seen).hidden)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(), logits

    gradients, logits = jax.grad(loss, has_aux=True)(params)
    return logits, gradients


def ours(
    model: Any, tokens: np.ndarray, scratch: Path, images: Any = None, audio: Any = None, source: Any = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and gradients under their names: the export maps them as it maps weights."""
    params, rest = nn.partition(model)
    logits, gradients = _loss_and_gradients(params, rest, jnp.asarray(tokens), _given(images, audio, source))
    maxlib.save_pretrained(nn.combine(gradients, rest), scratch)
    stored = load_file(scratch / "model.safetensors")
    return np.asarray(logits), {name: g for name, g in stored.items() if not name.endswith(FROM_CONFIG)}


@functools.partial(jax.jit, compiler_options=QUICK)
def _logits(model, tokens, seen):
    return model.logits(model(tokens, dtype=jnp.float32, **seen).hidden)


def logits(model: Any, tokens: np.ndarray, images: Any = None, audio: Any = None, source: Any = None) -> np.ndarray:
    return np.asarray(_logits(model, jnp.asarray(tokens), _given(images, audio, source)))


def _given(images: Any, audio: Any = None, source: Any = None) -> dict[str, Any]:
    """Text models' calls have no images and no sound at all."""
    return {name: x for name, x in {"images": images, "audio": audio, "source": source}.items() if x is not None}


# --- golden files ---------------------------------------------------------------------------------------------------


@functools.cache
def golden(family: str) -> dict[str, dict[str, Any]]:
    with np.load(GOLDEN / f"{family}.npz") as file:
        meta = json.loads(str(file["meta"]))
        for name, case in meta.items():
            rows = file[f"{name}/gradients"]
            case["tokens"], case["logits"] = file[f"{name}/tokens"], file[f"{name}/logits"]
            case["gradients"] = dict(zip(sorted(case["shapes"]), rows, strict=True))
    return meta


def transformers_cases(family: str) -> dict[str, tuple[Any, ...]]:
    """The cases of a family's classes of conformance tests, in the table and in all of its files."""
    cases = {}
    for file in ("families", family, f"{family}_images", f"{family}_audio"):
        if (GOLDEN.parent / f"test_{file}.py").exists():
            module = importlib.import_module(f"tests.models.test_{file}")
            for name, tests in vars(module).items():
                if name.startswith("Test") and getattr(tests, "family", None) == family:
                    cases |= tests.transformers_cases()
    return cases


def write(family: str) -> None:
    cases = {name: theirs(*case) for name, case in transformers_cases(family).items()}
    arrays: dict[str, Any] = {
        "meta": json.dumps(
            {n: {k: c[k] for k in ("config", "shapes", "grids", "clips") if c[k]} for n, c in cases.items()}
        )
    }
    for name, case in cases.items():
        arrays |= {f"{name}/{key}": case[key] for key in ("tokens", "logits")}
        arrays[f"{name}/gradients"] = np.stack([case["gradients"][n] for n in sorted(case["shapes"])])
    np.savez_compressed(GOLDEN / f"{family}.npz", **arrays)


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        write(family)
