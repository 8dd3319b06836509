"""Uploads of models to the Hugging Face hub."""

import tempfile
from typing import Any

import jax

from maxlib.weights._card import ModelCard
from maxlib.weights._family import save_pretrained
from maxlib.weights._hub import explained_errors, import_hub


def push_to_hub(
    model: Any,
    name: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    message: str = "Upload a model with maxlib",
    model_card: ModelCard | bool = True,
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
        model_card: Content of README.md; True writes a default card, False none.
        **options: Other arguments of `save_pretrained`, such as `like` and `tokenizer`.

    Returns:
        The URL of the commit; None on hosts that do not upload.

    Raises:
        ImportError: If huggingface_hub is not installed.
        PermissionError: If the token has no write access.
    """
    hub = import_hub(name)
    api = hub.HfApi(token=token)
    if model_card is True:
        model_card = ModelCard(title=name.rpartition("/")[2])
    with explained_errors(name, revision), tempfile.TemporaryDirectory() as directory:
        save_pretrained(model, directory, model_card=model_card, **options)
        if jax.process_index():
            return None
        api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=directory, commit_message=message, revision=revision)
    return commit.commit_url
