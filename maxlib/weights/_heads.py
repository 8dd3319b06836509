"""Families whose head gives numbers instead of tokens: classifiers, reward models, and sentence-transformers.

The backbone is that of a registered family; only the head's names and what config.json says about it differ.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn
from maxlib._utils.files import read_json_object
from maxlib.weights._loading import load
from maxlib.weights._saving import write_weights
from maxlib.weights._table import Absent, Copy, Ignore, Renamed, Table, Weight
from maxlib.weights.export import write_json

MODULES = "modules.json"  # the parts of a sentence-transformers model
_CLASSIFIER = re.compile(r"For(Sequence|Token)Classification$")
_POOLING = {"first": "cls", "last": "lasttoken", "mean": "mean"}
_ACTIVATIONS = {"torch.nn.modules.linear.Identity": None, "torch.nn.modules.activation.Tanh": jnp.tanh}
_DENSE = [Weight("linear.weight", "w"), Weight("linear.bias", "b")]


@dataclass(frozen=True)
class _HeadFields:
    """The fields of a family's config.json under another class of transformers.

    Args:
        fields: Those of the family.
        architecture: From the name of the family's class to that of the class with the head.
        labels: Number of labels; None for an embedding.
    """

    fields: Any
    architecture: Callable[[str], str]
    labels: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "fields":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.fields, name)

    def write(self, cfg: Any) -> dict[str, Any]:
        written = self.fields.write(cfg)
        name = self.architecture(written["architectures"][0])
        # Gemma 3's causal model is that of the text; its other classes with this name read images.
        is_text = written["model_type"].endswith("_text") and "Text" not in name
        written["architectures"] = [re.sub(r"(?=For|Model$)", "Text", name, count=1) if is_text else name]
        if self.labels is not None:
            written["id2label"] = {str(i): f"LABEL_{i}" for i in range(self.labels)}
            written["label2id"] = {label: int(i) for i, label in written["id2label"].items()}
        return written


def with_config_head(family: Any, data: Mapping[str, Any]) -> Any:
    """Returns the family of a model with the head that config.json names; `family` itself for a head of tokens.

    Args:
        family: The family of the backbone.
        data: The content of config.json.
    """
    name = next(iter(data.get("architectures") or ()), "")
    if (match := _CLASSIFIER.search(name)) is None:
        return family
    if match[1] == "Sequence" and hasattr(family.fields.config, "labels"):
        return family  # an encoder with classes of its own, as BERT's
    labels = len(data.get("id2label") or ()) or data.get("num_labels") or 2  # transformers' default
    return _classifier(family, labels, of_tokens=match[1] == "Token")


def with_model_head(family: Any, model: Any) -> Any:
    """Returns the family of a model with its head; `family` itself for a head of tokens."""
    head = getattr(model, "head", None)
    if isinstance(head, nn.ScoreHead):
        return _classifier(family, head.num_labels, of_tokens=head.b is not None)
    return _embedder(family, _maker(head)) if isinstance(head, nn.EmbeddingHead) else family


def _classifier(family: Any, labels: int, *, of_tokens: bool) -> Any:
    """Makes the family of `...ForSequenceClassification`, or `...ForTokenClassification`, whose head has a bias."""

    def model(cfg: Any, *, rngs: nnx.Rngs) -> Any:
        return nn.with_head(family.model(cfg, rngs=rngs), nn.ScoreHead(cfg.dim, labels, bias=of_tokens, rngs=rngs))

    def table(cfg: Any) -> Table:
        return [*_backbone(family.table(cfg)), Weight("score.weight", "head.w"), Weight("score.bias", "head.b")]

    def architecture(name: str) -> str:
        return re.sub(r"For\w+$|LMHeadModel$", f"For{'Token' if of_tokens else 'Sequence'}Classification", name)

    fields = _HeadFields(family.fields, architecture, labels)
    return dataclasses.replace(family, model=model, fields=fields, table=table)


def _backbone(table: Table) -> list[Any]:
    """Returns a table without the head of tokens."""

    def is_head(entry: Any) -> bool:
        name = getattr(entry, "path", getattr(entry, "hf_name", ""))
        return isinstance(entry, Weight | Copy) and (name == "head.w" or name.endswith("lm_head.weight"))

    return [entry for entry in table if not is_head(entry)]


def _maker(head: nn.EmbeddingHead) -> functools.partial[nn.EmbeddingHead]:
    """Returns what makes such a head."""
    return functools.partial(
        nn.EmbeddingHead,
        pooling=head.pooling,
        dense=tuple(layer.w.shape[0] for layer in head.dense),
        activation=head.activation,
        bias=any(layer.b is not None for layer in head.dense),
        normalize=head.normalize,
    )


def _embedder(family: Any, make_head: functools.partial[nn.EmbeddingHead]) -> Any:
    """Makes the family of a sentence-transformers model."""

    def model(cfg: Any, *, rngs: nnx.Rngs) -> Any:
        return nn.with_head(family.model(cfg, rngs=rngs), make_head(cfg.dim, rngs=rngs))

    def table(cfg: Any) -> Table:
        # The files are those of the backbone's class, whose names lack the prefix; a causal model's have it.
        names = [Renamed("", "model."), Ignore("model.lm_head.weight")]
        layers = range(len(make_head.keywords["dense"]))
        dense = [Absent(f"head.dense.{n}.{leaf}") for n in layers for leaf in ("w", "b")]  # in files of their own
        return [*_backbone(family.table(cfg)), *names, *dense]

    def architecture(name: str) -> str:
        return re.sub(r"For\w+$|LMHeadModel$", "Model", name)

    return dataclasses.replace(family, model=model, fields=_HeadFields(family.fields, architecture), table=table)


def load_embedder(family: Any, cfg: Any, directory: Path, **options: Any) -> Any:
    """Reads a sentence-transformers model.

    Args:
        family: The family of its backbone.
        cfg: The backbone's configuration.
        directory: Has modules.json.
        options: `layout` and `dtype`, as for `weights.load`.

    Raises:
        ValueError: For modules that maxlib does not have.
    """
    make_head, folders = _read_modules(directory)
    embedder = _embedder(family, make_head)
    model = load(lambda: embedder.model(cfg, rngs=nnx.Rngs(0)), embedder.table(cfg), directory, **options)
    layers = list(jax.eval_shape(lambda: make_head(cfg.dim, rngs=nnx.Rngs(0))).dense)
    for n, (layer, folder) in enumerate(zip(layers, folders, strict=True)):
        model.head.dense[n] = load(lambda layer=layer: layer, _DENSE, directory / folder, **options)
    return model


def _read_modules(directory: Path) -> tuple[functools.partial[nn.EmbeddingHead], list[str]]:
    """Reads what makes the head, and the folders of its linear layers, from modules.json and the configs of its
    modules; raises ValueError for what an `EmbeddingHead` does not do.
    """
    modules = _modules(directory)
    kinds = [kind for kind, _ in modules]
    order = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense"), *["Normalize"] * kinds.count("Normalize")]
    if kinds != order or kinds.count("Normalize") > 1:
        raise ValueError(
            f"{directory / MODULES} must list Transformer, Pooling, any number of Dense, and Normalize or not, in this "
            f"order; got {', '.join(kinds)}"
        )
    folders = [folder for kind, folder in modules if kind == "Dense"]
    dense = [read_json_object(directory / folder / "config.json") for folder in folders]
    activations = {layer.get("activation_function", "torch.nn.modules.activation.Tanh") for layer in dense}
    biases = {layer.get("bias", True) for layer in dense}
    if (
        any(layer.get("use_residual") for layer in dense)
        or len(activations) > 1
        or len(biases) > 1
        or not activations <= _ACTIVATIONS.keys()
    ):
        raise ValueError(
            f"the Dense modules of {directory} must have no residual, and agree in bias and in an activation of "
            f"{', '.join(_ACTIVATIONS)}; got {dense}"
        )
    make_head = functools.partial(
        nn.EmbeddingHead,
        pooling=_read_pooling(directory / dict(modules)["Pooling"] / "config.json"),
        dense=tuple(layer["out_features"] for layer in dense),
        activation=_ACTIVATIONS[activations.pop()] if activations else None,
        bias=biases.pop() if biases else False,
        normalize="Normalize" in kinds,
    )
    return make_head, folders


def _modules(directory: Path) -> list[tuple[str, str]]:
    """Returns the kind and the folder of each module in modules.json."""
    path = directory / MODULES
    try:
        listed = sorted(json.loads(path.read_text(encoding="utf-8")), key=lambda module: module["idx"])
        modules = [(module["type"].rpartition(".")[2], module["path"]) for module in listed]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} must be a list of modules with idx, type and path: {error!r}") from error
    if strange := [folder for _, folder in modules if not re.fullmatch(r"[\w-]*", folder)]:
        raise ValueError(f"{path} must name folders beside it, got {strange[0]!r}")
    if any(kind == "Transformer" and folder for kind, folder in modules):
        raise ValueError(f"{path} must have the Transformer in its own directory (path ''), got {modules[0][1]!r}")
    return modules


def _read_pooling(path: Path) -> Any:
    """Reads the pooling; older files have a switch for each mode."""
    config = read_json_object(path)
    modes = config.get("pooling_mode")
    if modes is None:
        switches = {"pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
        on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        modes = [switches.get(name, name.removeprefix("pooling_mode_").removesuffix("_tokens")) for name in on]
    modes = [modes] if isinstance(modes, str) else modes
    known = {theirs: ours for ours, theirs in _POOLING.items()}
    if len(modes) != 1 or modes[0] not in known or not config.get("include_prompt", True):
        raise ValueError(
            f"{path} must pool by one of {', '.join(known)}, with the prompt; got {modes} and include_prompt="
            f"{config.get('include_prompt', True)}"
        )
    return known[modes[0]]


def write_modules(model: Any, directory: Path, *, dtype: Any = None) -> None:
    """Writes what sentence-transformers reads beside the backbone, if the model has an `EmbeddingHead`.

    Args:
        model: The model; with several hosts all must call this, and the first one writes.
        directory: An export with config.json and the backbone's weights.
        dtype: The dtype of the weights; None keeps theirs.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.EmbeddingHead):
        return
    first = jax.process_index() == 0
    dense = [f"{n + 2}_Dense" for n in range(len(head.dense))]
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *(("Dense", folder) for folder in dense)]
    kinds += [("Normalize", f"{len(kinds)}_Normalize")] if head.normalize else []
    for _, folder in kinds[1:] if first else ():
        (directory / folder).mkdir()
    names = {function: name for name, function in _ACTIVATIONS.items()}
    for layer, folder in zip(head.dense, dense, strict=True):
        write_weights(layer, _DENSE, directory / folder, dtype=dtype)
        config = {
            "in_features": layer.w.shape[1],
            "out_features": layer.w.shape[0],
            "bias": layer.b is not None,
            "activation_function": names[head.activation],
        }
        if first:
            write_json(directory / folder / "config.json", config)
    if not first:
        return
    modes = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    pooling = {f"pooling_mode_{name}": _POOLING[head.pooling] == mode for mode, name in modes.items()}
    width = model.cfg.dim
    write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **pooling})
    listed = [
        {"idx": n, "name": str(n), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, folder) in enumerate(kinds)
    ]
    (directory / MODULES).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
