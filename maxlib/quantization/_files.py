"""Files of models with quantized weights: config.json, safetensors, and quantization.json with the format of each
weight.
"""

import dataclasses
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import nn, sharding, weights
from maxlib._utils.files import read_json_object
from maxlib._utils.paths import dotted
from maxlib.nn import sites
from maxlib.quantization._apply import store
from maxlib.quantization._formats import Format
from maxlib.quantization._matmul import format_of
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
            generation_config.json, and the ids and the names of labels in its config.json are copied, as by
            `save_pretrained`. Without it and `generation`, the files do not record which id ends a text.
        tokenizer: A `tokenizers.Tokenizer` or a Hugging Face tokenizer, instead of that of `like`.
        generation: Entries of generation_config.json (`{"eos_token_id": 1}`), which extend or override those of `like`.
        overwrite: True replaces an existing directory.
        family: The model's family, needed only for models that are not registered.

    Raises:
        FileExistsError: when the directory exists and `overwrite` is False.
        ValueError: when the model has adapters.
    """
    layers = sites.find(model, sites.SITES)
    if adapted := [path for path, site in layers if isinstance(getattr(site, "matmul", None), nn.matmul.LowRank)]:
        raise ValueError(
            f"{adapted[0]} has an adapter, which `load` does not read: adapters.save writes the adapters, beside the model "
            "that adapters.base_model returns"
        )
    fields = (family or weights.family_of(model)).fields
    values = {path: v.get_value() for path, v in nn.variables(model).items()}
    headers = [files.Header(path, np.dtype(v.dtype), v.shape) for path, v in values.items()]
    source = None if like is None else weights.model_directory(like)
    with export.whole_directory(directory, overwrite=overwrite) as part:
        ids = export.write_companions(
            part, source=source, tokenizer=tokenizer, chat_template=None, generation=generation
        )
        export.write_json(
            part / "config.json", export.with_labels(export.with_ids(fields.write(model.cfg), ids), source)
        )
        if "eos_token_id" not in (generation or {}):
            export.add_end_of_turn(part, getattr(tokenizer, "eos_token_id", None))
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
    stored = {p: s for p, s in sites.find(model, sites.SITES) if isinstance(s.w, nn.quantized.QuantizedWeight)}
    formats = {path: dataclasses.asdict(cast(Format, format_of(site))) for path, site in stored.items()}
    dtypes = {path: np.dtype(site.w.dtype).name for path, site in stored.items()}
    layouts = nn.tree.groupings(model)
    return {"version": _VERSION, "formats": formats, "dtypes": dtypes, "layouts": layouts}


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
    try:
        formats = {name: Format(**format) for name, format in manifest["formats"].items()}
        dtypes = {name: _DTYPES[manifest["dtypes"][name]] for name in formats}
        layouts = {
            name: [(operator.index(period), operator.index(repeats)) for period, repeats in layout]
            for name, layout in manifest["layouts"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}. Write it again by quantization.save") from error
    return {"formats": formats, "dtypes": dtypes, "layouts": layouts}


_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


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
        format, dtype = manifest["formats"][name], manifest["dtypes"][name]
        as_saved = jax.tree.map(lambda a: a.astype(dtype), site)
        return nn.stack.map_layers(lambda layer: store(layer, format, name), as_saved)

    model = jax.tree_util.tree_map_with_path(lay_out, model, is_leaf=lambda x: isinstance(x, nn.Stack))
    return jax.tree_util.tree_map_with_path(quantize, model, is_leaf=lambda x: isinstance(x, sites.SITES))


def _differences(stored: Any, wanted: dict[str, Any]) -> list[str]:
    """Lists the differences between stored arrays and those of the model."""

    def described(array: Any) -> str:
        # Plain weights may be of any float dtype; bytes of another format would be other weights.
        dtype = np.dtype(array.dtype).name
        return f"{'floating' if dtype in _DTYPES else dtype} {tuple(array.shape)}"

    have = {path: described(tensor) for path, tensor in stored.items()}
    want = {path: described(variable.get_value()) for path, variable in wanted.items()}
    return [
        f"{path} is {have.get(path, 'missing')}, should be {want.get(path, 'absent')}"
        for path in sorted(have.keys() | want.keys())
        if have.get(path) != want.get(path)
    ]
