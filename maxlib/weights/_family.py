"""Model families: their declaration, their discovery, and reading and writing Hugging Face directories with them."""

import contextlib
import dataclasses
import functools
import importlib
import logging
import pkgutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

from maxlib import distributed, nn, sharding
from maxlib._names import Presets
from maxlib._utils.arguments import check_dtype
from maxlib.tokenization import ChatTemplate
from maxlib.weights._compressed import plain, write_compressed
from maxlib.weights._heads import MODULES, load_embedder, with_config_head, with_model_head, write_modules
from maxlib.weights._hf_config import HFConfig, read_config
from maxlib.weights._hub import import_hub, model_directory
from maxlib.weights._loading import load
from maxlib.weights._saving import check_reads_back, write_weights
from maxlib.weights._table import Table
from maxlib.weights.export import (
    add_end_of_turn,
    default_card,
    whole_directory,
    with_ids,
    with_labels,
    write_companions,
    write_json,
)
from maxlib.weights.files import MAX_SHARD_BYTES, QUANTIZED

logger = logging.getLogger(__name__)

ENTRY_POINTS = "maxlib.models"


@dataclass(frozen=True)
class Family:
    """A model family, registered by `FAMILY = Family(...)` at the end of its file.

    Attributes:
        name: Name of the family.
        model: `model(cfg, *, rngs)`, which keeps `cfg`.
        fields: How config.json spells `cfg`: `weights.Fields`, `weights.Multimodal`, or any object with the class
            `config`, `model_types`, `read(hf)` and `write(cfg)`.
        table: Function from a `cfg` to its weight table.
        presets: Published configurations by name.
        model_types: Values of `model_type` in config.json that it reads; by default those of `fields`.
            "mistral3/mistral4" is a mistral3 whose `text_config` is a mistral4, and has priority over "mistral3".
    """

    name: str
    model: Callable[..., Any]
    fields: Any
    table: Callable[[Any], Table]
    presets: Mapping[str, Any] = field(default_factory=dict)
    model_types: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "model_types", self.model_types or tuple(self.fields.model_types))

    @property
    def config(self) -> Any:
        """Returns the class of a configuration."""
        return self.fields.config


@functools.cache
def families() -> tuple[Family, ...]:
    """Lists every `FAMILY` in a module of `maxlib.models` or of an entry point of the group "maxlib.models"."""
    package = importlib.import_module("maxlib.models")
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return (*(module.FAMILY for module in modules if hasattr(module, "FAMILY")), *_others())


def _others() -> list[Family]:
    others = []
    for point in entry_points(group=ENTRY_POINTS):
        try:  # a package that fails to import must not prevent using the other models
            loaded = point.load()
            others.append(loaded if isinstance(loaded, Family) else loaded.FAMILY)
        except Exception as error:
            logger.warning("the entry point %s=%s of group %s fails: %r", point.name, point.value, ENTRY_POINTS, error)
    return others


def presets() -> Presets:
    """Returns the published configurations of all families by name, a dictionary such as `{"llama3.1-8b": cfg}`.

    The KeyError for an unknown name suggests the closest.
    """
    return Presets({name: cfg for family in families() for name, cfg in family.presets.items()})


def _the(matching: list[Family], what: str, known: str) -> Family:
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise ValueError(
            f"no family is known for {what}; there are {known}. Give family=, or register one: a "
            f'package with FAMILY = weights.Family(...) in a module, named by an entry point of the group "{ENTRY_POINTS}".'
        )
    raise ValueError(
        f"{what} is claimed by the families {', '.join(f.name for f in matching)}: give family= to choose."
    )


def family_of(model: Any) -> Family:
    """Returns the registered family of a model, with its head (`nn.with_head`); raises ValueError if there is none."""
    matching = [f for f in families() if type(model) is f.model]
    family = _the(matching, f"models of class {type(model).__name__}", ", ".join(f.name for f in families()))
    return with_model_head(family, model)


def read_model(
    directory: str | Path, *, family: Family | None = None, ignore_fields: Collection[str] = ()
) -> tuple[Family, Any]:
    """Reads the config.json of `directory`, without its weights.

    Args:
        directory: A Hugging Face directory.
        family: Needed only for models that are not registered.
        ignore_fields: Unknown fields of config.json that change nothing, see `from_pretrained`.

    Returns:
        The family, and its configuration.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: For an unknown `model_type`, and for fields that the family does not support.
    """
    if not Path(directory).exists() and str(directory) in presets():
        raise FileNotFoundError(
            f"{directory} is a preset, which has no weights: weights.presets()[{str(directory)!r}] is its configuration. "
            'For weights, give a directory, or a name on the hub as "org/name".'
        )
    data = read_config(directory)
    if family is None:
        family = family_for(data, Path(directory) / "config.json")
    fields = HFConfig(data)
    try:
        cfg = family.fields.read(fields)
    except (TypeError, ArithmeticError, ValueError) as error:
        path = Path(directory) / "config.json"
        if isinstance(error, ValueError) and path.name in str(error):
            raise
        raise ValueError(f"{path} has values that are not valid for a {family.name} model: {error}") from error
    fields.done(ignore_fields)
    return family, cfg


def family_for(data: Mapping[str, Any], path: Path) -> Family:
    """Returns the family for the fields of a config.json; raises ValueError if there is none."""
    kind, text = data.get("model_type"), data.get("text_config")
    nested = f"{kind}/{text.get('model_type')}" if isinstance(text, Mapping) else kind
    claimed = [f for f in families() if nested in f.model_types] or [f for f in families() if kind in f.model_types]
    known = ", ".join(sorted(t for f in families() for t in f.model_types))
    return with_config_head(_the(claimed, f"the model_type {kind!r} of {path}", known), data)


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    layout: sharding.Layout | None = None,
    dtype: Any = None,
    family: Family | None = None,
    ignore_fields: Collection[str] = (),
    keep_quantized: bool = False,
    **changes: Any,
) -> Any:
    """Reads a Hugging Face model: config.json and safetensors, one file or several with an index.

    A classifier, reward model or model of token labels has an `nn.ScoreHead`, a sentence-transformers model an
    `nn.EmbeddingHead`.

        model = maxlib.from_pretrained("HuggingFaceTB/SmolLM2-135M", dtype=jnp.float32)

    Args:
        name: A directory, one in a bucket such as "s3://bucket/model" (needs `maxlib[s3]` or `maxlib[gcs]`), or a name
            on the hub such as "HuggingFaceTB/SmolLM2-135M" (needs `maxlib[hub]`).
        revision: Branch, tag or commit on the hub; None is the main branch.
        token: Access token for the hub; None uses the one of `hf auth login` or of the variable `HF_TOKEN`.
        layout: Placement over a mesh, so that every device only reads its own part; None reads onto one device.
        dtype: The dtype of the weights; None keeps the stored dtype. Use `jnp.float32` for training.
        family: Needed only for models that are not registered.
        ignore_fields: Fields of config.json that the family does not know and that change nothing, by dotted path, such
            as `["internal_version"]`. By default an unknown field is an error, as the model may compute something else.
        keep_quantized: True keeps weights in the few bits in which the files have them (GPTQ, AWQ, compressed-tensors,
            bitsandbytes and others), for inference and for adapters; a warning names those that are dequantized,
            because their layout does not allow it. False dequantizes all.
        **changes: Fields of the configuration that override those of config.json (`num_mtp=1`).

    Returns:
        The model.

    Raises:
        ValueError: If config and weights do not match, before weights are read.
        FileNotFoundError: If a file or the directory is missing.
        huggingface_hub.errors.HfHubHTTPError: If the hub has no such model or revision, or refuses it.
        TypeError: For an argument that is not a field of the configuration.
    """
    directory = model_directory(name, revision=revision, token=token)
    if (directory / QUANTIZED).exists():
        raise ValueError(
            f"{directory} has quantized weights ({QUANTIZED}): read it with maxlib.quantization.load, or pass the "
            "directory from which it was made"
        )
    family, cfg = read_model(directory, family=family, ignore_fields=ignore_fields)
    cfg = dataclasses.replace(cfg, **changes)
    if (directory / MODULES).exists():
        return load_embedder(family, cfg, directory, layout=layout, dtype=dtype)
    return load(
        lambda: family.model(cfg, rngs=nnx.Rngs(0)),
        family.table(cfg),
        directory,
        layout=layout,
        dtype=dtype,
        keep_quantized=keep_quantized,
    )


def save_pretrained(
    model: Any,
    directory: str | Path,
    *,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    like: str | Path | None = None,
    tokenizer: Any = None,
    chat_template: ChatTemplate | None = None,
    generation: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    model_card: Any = False,
    family: Family | None = None,
    quantized: Literal["compressed-tensors"] | None = None,
) -> None:
    """Writes `model` atomically as a Hugging Face directory that transformers opens.

    With several hosts all must call this; the first one writes.

        maxlib.save_pretrained(model, "out", generation={"eos_token_id": 1})

    Args:
        model: The model.
        directory: Absent or empty, unless `overwrite` is given; or "s3://bucket/model", "gs://bucket/model".
        dtype: The dtype of the floating weights; None keeps theirs.
        max_shard_bytes: Maximum size of a file, unless a single tensor is larger.
        like: Directory of the original model, or its name on the hub: tokenizer, chat template, processors,
            generation_config.json, and the ids and the names of labels in its config.json are copied. Without it and
            `generation`, the export does not record which id ends a text.
        tokenizer: A `tokenizers.Tokenizer` or a Hugging Face tokenizer, instead of that of `like`.
        chat_template: Chat template, such as the one that the model was trained on, instead of that of `like`.
        generation: Entries of generation_config.json (`{"eos_token_id": 1}`), which extend or override those of `like`.
            Unless they have `eos_token_id`, the token that ends an answer in the chat template ends a text too.
        overwrite: True replaces an earlier export.
        model_card: Text of README.md, or a `huggingface_hub.ModelCard`; True writes a default card, False none.
        family: Needed only for models that are not registered.
        quantized: "compressed-tensors" writes the quantized weights of a model from `quantization.for_inference` (int4,
            int8 and FP8) in the format that transformers, vLLM and SGLang read. None writes plain weights, and refuses
            a model that has quantized ones.

    Raises:
        FileExistsError: If the directory is not empty.
        ValueError: If the directory would be read as another model, because parts of this one were swapped.
    """
    check_dtype(dtype)
    family = family or family_of(model)
    config = family.fields.write(model.cfg)
    table = family.table(model.cfg)
    if quantized not in (None, "compressed-tensors"):
        raise ValueError(f"quantized must be None or 'compressed-tensors', got {quantized!r}")
    check_reads_back(model if quantized is None else plain(model), family.model, table)
    what, first = f"saving in {directory}", jax.process_index() == 0
    with distributed.raise_on_all(what), contextlib.ExitStack() as stack:
        with distributed.raise_on_all(what):  # before other processes wait for this one in a gather
            source = model_directory(like) if first and like is not None else None
            part = stack.enter_context(whole_directory(directory, overwrite=overwrite)) if first else Path()
        extra: dict[str, Any] = {}
        if quantized is None:
            stored = write_weights(model, table, part, dtype=dtype, max_shard_bytes=max_shard_bytes)
        else:
            stored, settings = write_compressed(model, table, part, dtype=dtype, max_shard_bytes=max_shard_bytes)
            extra = {"quantization_config": settings}
        write_modules(model, part, dtype=dtype)
        if not first:
            return
        # Without these ids in config.json, transformers assumes those of the published models.
        ids = write_companions(
            part, source=source, tokenizer=tokenizer, chat_template=chat_template, generation=generation
        )
        config = with_labels(with_ids(config, ids), source)
        write_json(part / "config.json", config | {"dtype": stored.name, "torch_dtype": stored.name} | extra)
        if "eos_token_id" not in (generation or {}):
            add_end_of_turn(part, getattr(tokenizer, "eos_token_id", None))
        if model_card:
            if model_card is True:
                model_card = default_card(Path(directory).name, config, nn.num_parameters(model))
            (part / "README.md").write_text(str(model_card), encoding="utf-8")
    if tokenizer is not None and ids["eos_token_id"] is None:  # an export with a tokenizer is meant for generation
        warnings.warn(
            f"{directory} has a tokenizer, but no id that ends a text: generation will run to its limit. Pass like= a "
            'directory that has one, or generation={"eos_token_id": ...}',
            stacklevel=2,
        )


def push_to_hub(
    model: Any,
    name: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    message: str = "Upload a model with maxlib",
    model_card: Any = True,
    **options: Any,
) -> str | None:
    """Writes `model` as `save_pretrained` does and uploads it to the hub in one commit.

    With several hosts all must call this; the first one uploads.

    Args:
        model: The model.
        name: Name on the hub; the repository is created if it does not exist.
        private: True makes a new repository private; None uses the owner's setting.
        token: Access token; None takes the one of `hf auth login` or of the variable `HF_TOKEN`.
        revision: Branch to commit to; None is the main branch.
        message: Message of the commit.
        model_card: See `save_pretrained`.
        **options: Other arguments of `save_pretrained`, such as `like` and `tokenizer`.

    Returns:
        The URL of the commit; None on hosts that do not upload.

    Raises:
        ImportError: If huggingface_hub is not installed.
        huggingface_hub.errors.HfHubHTTPError: If the token has no write access.
    """
    hub = import_hub(name)
    api = hub.HfApi(token=token)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / name.rpartition("/")[2]
        save_pretrained(model, directory, model_card=model_card, **options)
        if jax.process_index():
            return None
        api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=directory, commit_message=message, revision=revision)
    return commit.commit_url
