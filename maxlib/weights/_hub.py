"""Models on the Hugging Face hub, through `huggingface_hub`: its cache, tokens, offline mode and progress bars."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxlib.weights import buckets
from maxlib.weights.files import EMBEDDING_FILES, INDEX, PROCESSOR_FILES, SINGLE, TOKENIZER_FILES

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
        FileNotFoundError: If there is no such directory and no such model, or no way to the hub and nothing cached.
        PermissionError: If the model is gated, and its terms were not accepted.
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
        FileNotFoundError: If there is no such model or revision, or no way to the hub and nothing cached.
        PermissionError: If the model is gated, and its terms were not accepted.
        ImportError: If huggingface_hub is not installed.
        ValueError: If the model has no safetensors; maxlib reads no pickles.
    """
    hub = import_hub(name)
    with explained_errors(name, revision):
        snapshot = Path(hub.snapshot_download(name, revision=revision, token=token, allow_patterns=list(SMALL_FILES)))
        # Pin the commit, so that both downloads use the same one.
        commit, files = snapshot.name, _weight_files(snapshot, name)
        hub.snapshot_download(name, revision=commit, token=token, allow_patterns=files)
    if missing := [file for file in files if not (snapshot / file).is_file()]:
        raise ValueError(
            f"{name} on the hub must have its weights as {SINGLE}, or as the files of {INDEX}, but it lacks "
            f"{', '.join(missing[:3])}. maxlib reads no pickles (pytorch_model.bin) and no other formats: look for a "
            "revision or a copy of the model with safetensors."
        )
    return snapshot


def _weight_files(snapshot: Path, name: str) -> list[str]:
    index = snapshot / INDEX
    if not index.is_file():
        return [SINGLE]
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{INDEX} of {name} on the hub must have a weight_map of file names: {error!r}") from error
    # Patterns instead of names could download the whole repository.
    if strange := [
        file for file in files if not (isinstance(file, str) and re.fullmatch(r"[\w.-]+\.safetensors", file))
    ]:
        raise ValueError(f"{INDEX} of {name} on the hub must name safetensors files beside it, got {strange[0]!r}")
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


@contextmanager
def explained_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turns errors of huggingface_hub into built-in exceptions with advice, without its hundred lines of traceback."""
    from huggingface_hub import constants, errors

    where = f"{name} on the hub ({constants.ENDPOINT})"
    try:
        yield
    except errors.GatedRepoError:
        raise PermissionError(
            f"{where} is gated: accept its terms on its page, then run `hf auth login` or pass token=."
        ) from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"There is no directory {name!r} here, and no model of that name on the hub ({constants.ENDPOINT}) that this "
            "token may see. Check the spelling; a private model needs `hf auth login` or token=."
        ) from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{where} has no revision {revision!r}: branches, tags and commits are.") from None
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"There is no directory {name!r} here, the cache ({constants.HF_HUB_CACHE}) does not hold all of the model, and "
            f"{_why_no_download(constants, error)}. `hf download {name}` fills the cache on a machine with access to the hub."
        ) from None
    except errors.HfHubHTTPError as error:
        kind = PermissionError if error.response.status_code in (401, 403) else ConnectionError
        raise kind(f"{where} answered: {error}") from None


def _why_no_download(constants: Any, error: Exception) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE=1 forbids downloads"
    cause = str(error.__cause__ or "").partition("\n")[0]
    return f"the hub ({constants.ENDPOINT}) cannot be reached" + (f" ({cause})" if cause else "")
