"""Keeps orbax from calls of tensorstore that leak.

Up to tensorstore 0.1.86 (the newest), what Python gets of it as JSON holds strings and lists with one reference too
many, which are never freed: 5 KiB for each of several looks at its metrics in a save, and 300 bytes for each array.
"""

import functools
import types
from typing import Any

import tensorstore


@functools.cache
def avoid() -> None:
    """Replaces the two calls in orbax's module; what they would answer is known or only logged."""
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError:  # a private module, which another orbax need not have; the soak says whether that one leaks
        return
    tensorstore_utils.get_tensorstore_raw_bytes = lambda *_: 0  # of which orbax logs the throughput
    ours = types.ModuleType(tensorstore.__name__)
    ours.__dict__.update(vars(tensorstore) | {"KvStore": _KvStore})
    tensorstore_utils.ts = ours


class _KvStore:
    """`tensorstore.KvStore`, but for the JSON of a directory's specification, which is what it was made of."""

    open = staticmethod(tensorstore.KvStore.open)

    @staticmethod
    def Spec(spec: dict[str, Any]) -> Any:
        if spec.keys() == {"driver", "path"} and spec["driver"] == "file":
            return types.SimpleNamespace(to_json=lambda: dict(spec))
        return tensorstore.KvStore.Spec(spec)
