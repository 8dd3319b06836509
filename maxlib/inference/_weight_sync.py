"""Whole updated weights for a server that runs, by way of a directory that it reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxlib.inference._server import ServerEngine


class ReloadingServerEngine(ServerEngine):
    """A `ServerEngine` that replaces all weights of a vLLM server, not only an adapter.

    The server must run with `VLLM_SERVER_DEV_MODE=1`, on an address that nobody else reaches, as this mode also lets
    anyone call the server's own functions. An update waits until the running requests have ended, reloads the weights,
    empties the prefix cache, because it was computed with the former weights, and goes on.

    Args:
        url: Address of the server.
        model: Name of the model there.
        save: Writes updated weights as a directory of safetensors that the server can read, and returns its path, such
            as a function that calls `maxlib.save_pretrained(..., overwrite=True)`.
        options: Other arguments of `ServerEngine`.
    """

    def __init__(self, url: str, model: str, *, save: Callable[[Any], str | Path], **options: Any):
        super().__init__(url, model, save=save, **options)
        self._save = save

    def update(self, weights: Any, version: int | None = None) -> None:
        """Writes weights with `save`, and loads them on the server.

        Args:
            weights: What `save` takes.
            version: Their number in `Completion.versions`, by default one more than that of the last weights.

        Raises:
            ServerError: when the server cannot be reached, is in another mode, or does not load them.
        """
        path = str(Path(self._save(weights)).absolute())
        self._post("/pause?mode=wait", {})
        try:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            answer = self._post("/reset_prefix_cache", {})
            if json.loads(answer).get("success") is not True:
                raise self._error("/reset_prefix_cache", "kept prefixes of the former weights", answer)
        finally:
            self._post("/resume", {})
        self.updates += 1
        self.version = self.version + 1 if version is None else version
