"""Control of Python's garbage collector."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses the collection of reference cycles inside the context.

    Tracing and imports make so many objects that the collector walks the whole heap again and again, a tenth of the
    time to the first step, and finds nothing to free.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
