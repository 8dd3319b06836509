"""A Hugging Face directory that is written: whole or not at all, with the files beside the weights."""

import functools
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError

import maxlib
from maxlib._utils.files import read_json_object
from maxlib.tokenization import ChatTemplate, load_tokenizer, special_tokens
from maxlib.weights.buckets import is_bucket, whole_in_bucket
from maxlib.weights.files import OWN_FILES, PROCESSOR_FILES, TOKENIZER_FILES

GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_companions(
    part: Path,
    *,
    source: Path | None,
    tokenizer: Any,
    chat_template: ChatTemplate | None,
    generation: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Writes tokenizer, chat template, processors and generation_config.json for `save_pretrained`.

    Args:
        part: The directory to write into.
        source: A Hugging Face directory whose files are copied, or None.
        tokenizer: The tokenizer, instead of that of `source`; or None.
        chat_template: The chat template, instead of that of `source`; or None.
        generation: Entries of generation_config.json in addition to those of `source`; or None.

    Returns:
        The ids `bos_token_id`, `eos_token_id` and `pad_token_id` for config.json, None where unknown.
    """
    stored = {}
    if source is not None:
        copy_files(source, part, PROCESSOR_FILES if tokenizer is not None else TOKENIZER_FILES + PROCESSOR_FILES)
        stored = _read(source / GENERATION)
    if stored or generation is not None:
        write_json(part / GENERATION, {**stored, **(generation or {})})
    if tokenizer is not None:
        write_tokenizer(tokenizer, part, {} if source is None else special_tokens(source))
        if chat_template is None and source is not None and not (part / "chat_template.jinja").exists():
            with suppress(FileNotFoundError):  # of a source whose tokenizer_config.json has it, which was not copied
                chat_template = ChatTemplate.from_directory(source)
    if chat_template is not None:
        chat_template.save(part)
    config = {} if source is None else _read(source / "config.json")
    inner = config.get("text_config") or {}
    return first_ids(generation or {}, config, inner, stored, {name: getattr(tokenizer, name, None) for name in IDS})


def default_card(title: str, config: Mapping[str, Any], parameters: int) -> str:
    """Returns the text of README.md, with front matter for the hub.

    Args:
        title: Title.
        config: The fields of config.json.
        parameters: Number of parameters.
    """
    architecture = (config.get("architectures") or [config.get("model_type", "a model")])[0]
    return (
        "---\nlibrary_name: transformers\ntags: [maxlib]\n---\n\n"
        f"# {title}\n\n`{architecture}` with {parameters:,} parameters, written by maxlib {maxlib.__version__}.\n"
    )


def first_ids(*known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids that begin, end and pad texts, each from the first of `known` that has it, or None."""
    return {name: next((ids[name] for ids in known if ids.get(name) is not None), None) for name in IDS}


def with_ids(config: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json with ids; an unknown one does not override one that the family writes."""
    return {**config, **{name: value for name, value in ids.items() if value is not None or name not in config}}


def with_labels(config: Mapping[str, Any], source: Path | None) -> dict[str, Any]:
    """Returns the fields of config.json with the names of the labels of a directory, if it has as many."""
    stored = {} if source is None else _read(source / "config.json")
    if not stored.get("id2label") or len(stored["id2label"]) != len(config.get("id2label", ())):
        return dict(config)
    return {**config, **{name: stored[name] for name in ("id2label", "label2id", "problem_type") if name in stored}}


def copy_files(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Copies the files and folders of a directory whose names match one of the patterns."""
    for path in sorted(source.iterdir()):
        if any(path.match(pattern) for pattern in patterns):
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, target / path.name)


def add_end_of_turn(directory: Path, eos: int | None = None) -> None:
    """Adds the special token that ends an answer in the chat template, and `eos`, the one that a new tokenizer ends
    texts with, to the ids that end a text.
    """
    stored, config = _read(directory / GENERATION), _read(directory / "config.json")
    ids = first_ids(stored, config, config.get("text_config") or {})["eos_token_id"]
    known = ids if isinstance(ids, list) else [] if ids is None else [ids]
    ends = dict.fromkeys(end for end in (eos, _end_of_turn(directory)) if end is not None and end not in known)
    if ends:
        write_json(directory / GENERATION, {**stored, "eos_token_id": [*known, *ends]})


def _end_of_turn(directory: Path) -> int | None:
    """Returns the id of that token; None if the template cannot render a plain chat, or writes no special token."""
    try:
        end = ChatTemplate.from_directory(directory).end_of_turn()
        tokenizer = load_tokenizer(directory)
    except (FileNotFoundError, ValueError, SecurityError):
        return None
    ids = tokenizer.encode(end, add_special_tokens=False).ids
    added = tokenizer.get_added_tokens_decoder()
    return ids[0] if ids and ids[0] in added and added[ids[0]].special else None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def write_tokenizer(tokenizer: Any, directory: Path, special: Mapping[str, str | None]) -> None:
    """Writes a Hugging Face tokenizer, or a `tokenizers.Tokenizer` such that `transformers.AutoTokenizer` opens it.

    Args:
        tokenizer: The tokenizer.
        directory: Where to write.
        special: Special tokens by name; a `tokenizers.Tokenizer` does not say them, and gets those that it has.

    Raises:
        TypeError: For anything else.
    """
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(directory)
    elif hasattr(tokenizer, "save") and hasattr(tokenizer, "to_str"):
        tokenizer.save(str(directory / "tokenizer.json"))
        known = {name: text for name, text in special.items() if text and tokenizer.token_to_id(text) is not None}
        write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | known)
    else:
        raise TypeError(
            f"tokenizer must be a tokenizers.Tokenizer or a Hugging Face tokenizer, got {type(tokenizer).__name__}"
        )


@contextmanager
def whole_directory(directory: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary directory that becomes `directory` at the end, or is removed after an error.

    In a bucket, the configuration is written last, so that nothing reads an incomplete directory.

    Raises FileExistsError if the directory is not empty, unless it is an export and `overwrite` is given.
    """
    if is_bucket(directory):
        check = functools.partial(_check_names, str(directory), overwrite=overwrite)
        with whole_in_bucket(str(directory), check) as part:
            yield part
        return
    directory = Path(directory).absolute()
    _check_free(directory, overwrite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    part, old = (directory.with_name(f".{directory.name}.{what}-{mark}") for what in ("part", "old"))
    try:
        part.mkdir()
        yield part
        if directory.exists():
            directory.rename(old)
        part.rename(directory)
    except BaseException as error:
        if old.exists():
            old.rename(directory)
        error.add_note(f"Nothing was saved in {directory}; its previous contents are unchanged.")
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _check_free(directory: Path, overwrite: bool) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise FileExistsError(f"{directory} must be a directory or absent, but it is a file or a link.")
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    _check_names(str(directory), names, overwrite)


def _check_names(directory: str, names: list[str], overwrite: bool) -> None:
    foreign = [path.name for path in map(Path, names) if not any(path.match(pattern) for pattern in OWN_FILES)]
    if foreign:
        raise FileExistsError(
            f"{directory} has files that do not belong to an export ({', '.join(foreign[:5])}), and saving replaces "
            "the whole directory. Save elsewhere, or move them away."
        )
    if names and not overwrite:
        raise FileExistsError(f"{directory} already has an export. Save elsewhere, or pass overwrite=True.")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes an object as indented JSON. Raises ValueError for NaN or infinity."""
    path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
