"""Models on the Hugging Face hub, through `huggingface_hub`: its cache, tokens, offline mode and progress bars."""

import re
from pathlib import Path
from typing import Any

from maxlib.weights import buckets
from maxlib.weights.files import EMBEDDING_FILES, INDEX, PROCESSOR_FILES, SINGLE, TOKENIZER_FILES, read_index

# All files of a model except its weights. Code (*.py) and pickles (*.bin) are never fetched.
SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES, *EMBEDDING_FILES, INDEX)
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def model_directory(name: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Returns the directory of a model: `name` itself if it is a directory, else a copy from a bucket or the hub.

    Args:
        name: A directory, one in a bucket such as "gs://bucket/model", or a name on the hub such as
            "HuggingFaceTB/SmolLM2-135M".
        revision: Branch, tag or commit on the hub; None is the main branch.
        token: Access token; None takes the one of `hf auth login` or of the variable `HF_TOKEN`.

    Returns:
        The directory; from the hub it is a snapshot in huggingface_hub's cache, from a bucket a copy in `MAXLIB_CACHE`
        (`~/.cache/maxlib`). Neither must be written to.

    Raises:
        FileNotFoundError: If there is no such directory, or no way to the hub and nothing cached.
        huggingface_hub.errors.HfHubHTTPError: If the hub has no such model or revision, or refuses it.
        ImportError: If the hub is needed, and huggingface_hub is not installed.
        ValueError: If the model has no safetensors; maxlib reads no pickles.
    """
    path = Path(name)
    on_the_hub = isinstance(name, str) and _NAME.fullmatch(name) and not path.exists()
    if on_the_hub:
        return download(str(name), revision=revision, token=token)
    for option, value in (("revision", revision), ("token", token)):
        if value is not None:
            raise ValueError(f"{option}= is for models on the hub, but {str(name)!r} is a directory.")
    return buckets.local(name)


def download(name: str, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Downloads the files of a model that maxlib reads: configuration, tokenizer and safetensors.

    Cached files are not downloaded again. `HF_HUB_OFFLINE=1` only uses the cache.

    Args:
        name: Name on the hub.
        revision: Branch, tag or commit; None is the main branch.
        token: Access token; None takes the one of `hf auth login` or of the variable `HF_TOKEN`.

    Returns:
        The directory of the snapshot in the cache.

    Raises:
        FileNotFoundError: If there is no way to the hub and nothing cached.
        huggingface_hub.errors.HfHubHTTPError: If the hub has no such model or revision, or refuses it.
        ImportError: If huggingface_hub is not installed.
        ValueError: If the model has no safetensors; maxlib reads no pickles.
    """
    hub = import_hub(name)
    try:
        snapshot = Path(hub.snapshot_download(name, revision=revision, token=token, allow_patterns=list(SMALL_FILES)))
        # Pin the commit, so that both downloads use the same one.
        commit, files = snapshot.name, _weight_files(snapshot)
        hub.snapshot_download(name, revision=commit, token=token, allow_patterns=files)
    except OSError as error:  # all of its errors about repositories, revisions and connections
        error.add_note(f"There is no directory {name!r} here, so it was looked up on the Hugging Face hub.")
        raise
    if missing := [file for file in files if not (snapshot / file).is_file()]:
        raise ValueError(
            f"{name} on the hub must have its weights as {SINGLE}, or as the files of {INDEX}, but it lacks "
            f"{', '.join(missing[:3])}. maxlib reads no pickles (pytorch_model.bin) and no other formats: look for a "
            "revision or a copy of the model with safetensors."
        )
    return snapshot


def _weight_files(snapshot: Path) -> list[str]:
    index = snapshot / INDEX
    if not index.is_file():
        return [SINGLE]
    files = set(read_index(index).values())
    # Patterns instead of names could download the whole repository.
    if strange := [file for file in files if not re.fullmatch(r"[\w.-]+\.safetensors", file)]:
        raise ValueError(f"{index} must name safetensors files beside it, got {strange[0]!r}")
    return sorted(files)


def import_hub(name: str) -> Any:
    """Imports huggingface_hub; raises ImportError with advice if it is not installed."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{name!r} is no directory here; as a name on the Hugging Face hub it needs the package huggingface_hub: "
            "pip install 'maxlib[hub]'"
        ) from error
    return huggingface_hub
