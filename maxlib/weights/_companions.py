"""The files next to the weights of a Hugging Face directory: tokenizer, template, processors, generation settings."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlib._utils.files import read_json_object
from maxlib.weights._files import PROCESSOR_FILES, TOKENIZER_FILES
from maxlib.weights._saving import write_json

GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_companions(
    part: Path, *, source: Path | None, tokenizer: Any, generation: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Writes tokenizer, chat template, processors and generation_config.json for `save_pretrained`.

    Args:
        part: The directory to write into.
        source: A Hugging Face directory whose files are copied, or None.
        tokenizer: The tokenizer, instead of that of `source`; or None.
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
        write_tokenizer(tokenizer, part)
    config = {} if source is None else _read(source / "config.json")
    inner = config.get("text_config") or {}
    return first_ids(generation or {}, config, inner, stored, {name: getattr(tokenizer, name, None) for name in IDS})


def first_ids(*known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids that begin, end and pad texts, each from the first of `known` that has it, or None."""
    return {name: next((ids[name] for ids in known if ids.get(name) is not None), None) for name in IDS}


def copy_files(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Copies the files of a directory whose names match one of the patterns."""
    for path in sorted(source.iterdir()):
        if path.is_file() and any(path.match(pattern) for pattern in patterns):
            shutil.copyfile(path, target / path.name)


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Writes a Hugging Face tokenizer, or a `tokenizers.Tokenizer` such that `transformers.AutoTokenizer` opens it.

    Raises TypeError for anything else.
    """
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(directory)
    elif hasattr(tokenizer, "save") and hasattr(tokenizer, "to_str"):
        tokenizer.save(str(directory / "tokenizer.json"))
        write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    else:
        raise TypeError(
            f"tokenizer must be a tokenizers.Tokenizer or a Hugging Face tokenizer, got {type(tokenizer).__name__}"
        )
