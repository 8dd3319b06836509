"""Files of models with quantized weights: config.json, safetensors, and quantization.json with the format of each
weight.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxlib import nn, sharding, weights
from maxlib._utils.files import read_json_object
from maxlib._utils.paths import dotted
from maxlib.nn import sites
from maxlib.quantization._apply import store
from maxlib.quantization._formats import Format
from maxlib.quantization._matmul import Quantized
from maxlib.weights import buckets, export, files

MANIFEST = files.QUANTIZED
_VERSION = 2


def save(
    model: Any,
    directory: str | Path,
    *,
    like: str | Path | None = None,
    tokenizer: Any = None,
    generation: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    family: weights.Family | None = None,
) -> None:
    """Writes a model from `for_inference` atomically, with its quantized weights. Runs on one host.

        quantization.save(quantization.for_inference(model, "int8"), "small")

    Args:
        model: A model with quantized weights.
        directory: Where to write it; also "s3://bucket/model" or "gs://bucket/model".
        like: Directory of the original model, or its name on the hub: tokenizer, chat template, processors,
            generation_config.json and the ids in its config.json are copied, as by `save_pretrained`. Without it and
            `generation`, the files do not record which id ends a text.
        tokenizer: A `tokenizers.Tokenizer` or a Hugging Face tokenizer, instead of that of `like`.
        generation: Entries of generation_config.json (`{"eos_token_id": 1}`), which extend or override those of `like`.
        overwrite: True replaces an existing directory.
        family: The model's family, needed only for models that are not registered.

    Raises:
        FileExistsError: when the directory exists and `overwrite` is False.
    """
    fields = (family or weights.family_of(model)).fields
    values = {path: v.get_value() for path, v in nn.variables(model).items()}
    headers = [files.Header(path, np.dtype(v.dtype), v.shape) for path, v in values.items()]
    source = None if like is None else weights.model_directory(like)
    with export.whole_directory(directory, overwrite=overwrite) as part:
        ids = export.write_companions(
            part, source=source, tokenizer=tokenizer, chat_template=None, generation=generation
        )
        export.write_json(part / "config.json", fields.write(model.cfg) | ids)
        if "eos_token_id" not in (generation or {}):
            export.add_end_of_turn(part)
        export.write_json(part / MANIFEST, _manifest(model))
        shards = files.shard(headers, files.MAX_SHARD_BYTES)
        for name, members in shards.items():
            files.write_file(part / name, members, (np.asarray(values[header.name]) for header in members))
        if len(shards) > 1:
            files.write_index(part, shards)


def load(
    directory: str | Path,
    *,
    layout: sharding.Layout | None = None,
    family: weights.Family | None = None,
) -> Any:
    """Reads a model written by `save`.

        quantization.save(quantization.for_inference(model, "int8"), "smaller")
        model = quantization.load("smaller")

    Args:
        directory: Its directory; or its name in a bucket.
        layout: Placement over a mesh; None for one device.
        family: The model's family, needed only for models that are not registered.

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when the files are inconsistent.
    """
    directory = buckets.local(directory)
    manifest = _read(directory / MANIFEST)
    family, cfg = weights.read_model(directory, family=family)
    try:
        abstract = jax.eval_shape(lambda: _as_saved(family.model(cfg, rngs=nnx.Rngs(0)), manifest))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{directory / MANIFEST} does not fit the model of its config.json: {error}") from error
    wanted = nn.variables(abstract)
    stored = files.find_tensors(directory)
    if wrong := _differences(stored, wanted):
        raise ValueError(
            f"{directory} does not contain the model that its {MANIFEST} describes: {'; '.join(wrong[:10])}"
        )
    at = {path: None if layout is None else layout.sharding(path, v) for path, v in wanted.items()}
    arrays = {path: jax.device_put(np.array(stored[path].view()), at[path]) for path in wanted}
    return nn.combine(arrays, abstract)


def _manifest(model: Any) -> dict[str, Any]:
    """Returns the contents of quantization.json: the format and dtype of each weight, and the grouping of stacks."""
    formats, dtypes = {}, {}
    for path, site in sites.find(model, sites.SITES):
        if isinstance(site.w, nn.quantized.QuantizedWeight):
            rounds = (
                None if isinstance(site, nn.Embed) or not isinstance(site.matmul, Quantized) else site.matmul.format
            )
            formats[path] = dataclasses.asdict(rounds or Format(site.w.qtype, group=site.w.group))
            dtypes[path] = np.dtype(site.w.dtype).name
    return {"version": _VERSION, "formats": formats, "dtypes": dtypes, "layouts": nn.tree.groupings(model)}


def _read(path: Path) -> dict[str, Any]:
    """Reads quantization.json, with a `Format` for each weight."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must describe the stored weights; maxlib.from_pretrained reads plain ones")
    manifest = read_json_object(path)
    if manifest.get("version") != _VERSION:
        raise ValueError(
            f"{path} must be of version {_VERSION}, got {manifest.get('version')}: files of version 1 name layers in another "
            "way, so quantize the model again; later versions need a newer maxlib"
        )
    formats, dtypes, layouts = (manifest.get(name) for name in ("formats", "dtypes", "layouts"))
    if not (isinstance(formats, dict) and isinstance(dtypes, dict) and isinstance(layouts, dict)):
        raise ValueError(f"{path} must have formats, dtypes and layouts. Write it again.")
    try:
        made = {name: Format(**format) for name, format in formats.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has an invalid weight format: {error}") from error
    if made.keys() != dtypes.keys() or not all(dtype in _DTYPES for dtype in dtypes.values()):
        raise ValueError(f"{path} must give one of {_DTYPES} for each weight that has a format. Write it again.")
    if wrong := [name for name, layout in layouts.items() if not _is_layout(layout)]:
        raise ValueError(
            f"{path}: the layout of a stack must be pairs of a period and its repeats, got {layouts[wrong[0]]!r:.200}"
        )
    return {"formats": made, "dtypes": dtypes, "layouts": layouts}


_DTYPES = ["float32", "bfloat16", "float16"]


def _is_layout(layout: Any) -> bool:
    def is_group(group):
        return isinstance(group, list) and len(group) == 2 and all(type(n) is int and n > 0 for n in group)

    return isinstance(layout, list) and all(map(is_group, layout))


def _as_saved(model: Any, manifest: dict[str, Any]) -> Any:
    """Returns a model with this configuration, with groupings and formats as in the manifest."""

    def lay_out(path, node):
        if not isinstance(node, nn.Stack):
            return node
        layout = manifest["layouts"].get(dotted(path))
        if layout is None:
            raise ValueError(f"the layout of the layers {dotted(path)!r} is missing")
        slots = {i: slot for slot, layers in nn.stack.layers_by_slot(layout).items() for i, _ in layers}
        return node.restacked([slots.get(i) for i in range(len(node))])  # layers of a slot are stored together

    def quantize(path, site):
        name = dotted(path)
        if not isinstance(site, sites.SITES) or name not in manifest["formats"]:
            return site
        format, dtype = manifest["formats"][name], np.dtype(manifest["dtypes"][name])

        def make(site):
            return store(jax.tree.map(lambda a: a.astype(dtype), site), format, name)

        return nn.stack.map_layers(make, site)

    model = jax.tree_util.tree_map_with_path(lay_out, model, is_leaf=lambda x: isinstance(x, nn.Stack))
    return jax.tree_util.tree_map_with_path(quantize, model, is_leaf=lambda x: isinstance(x, sites.SITES))


def _differences(stored: Any, wanted: dict[str, Any]) -> list[str]:
    """Lists the differences between stored arrays and those of the model."""
    missing = [f"{path} is missing" for path in wanted if path not in stored]
    extra = [f"{name} is left over" for name in stored if name not in wanted]
    both = [(path, stored[path], v.get_value()) for path, v in wanted.items() if path in stored]
    shapes = [f"{path} is {a.shape}, should be {b.shape}" for path, a, b in both if a.shape != b.shape]
    # Plain weights may be of any float dtype; bytes of another format would be other weights.
    dtypes = [
        f"{path} is {a.dtype}, should be {b.dtype}"
        for path, a, b in both
        if a.dtype != b.dtype and not {a.dtype.name, np.dtype(b.dtype).name} <= {*_DTYPES}
    ]
    return missing + extra + shapes + dtypes
