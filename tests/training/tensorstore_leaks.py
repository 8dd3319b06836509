"""Avoids leaking calls of tensorstore in orbax, so that the soak test measures the leaks of maxlib alone.

Up to tensorstore 0.1.86 (the newest), strings and lists of its JSON results have one reference too many and are never
freed: 5 KiB for each of several reads of its metrics in a save, and 300 bytes for each array.
"""

import functools
import types
from typing import Any

import tensorstore


@functools.cache
def avoid() -> None:
    """Replaces the two calls in orbax's module; their results are known or only logged."""
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError:  # a private module, which another orbax may lack; the soak test shows whether that one leaks
        return
    tensorstore_utils.get_tensorstore_raw_bytes = lambda *_: 0  # orbax only logs it as throughput
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
