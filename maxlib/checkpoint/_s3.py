"""Amazon S3 support for orbax, which only knows Google's buckets and treats `s3://` as a local path.

tensorstore and etils support both. Orbax's own checks of a path decide the rest: which driver tensorstore uses, that a
step is complete once its last file, `commit_success.txt`, exists (an object store cannot rename a directory), and how
to delete a directory. This module makes these checks treat `s3://` like `gs://`.
"""

import functools
import posixpath
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from etils import epath

SCHEME = "s3://"


@functools.cache
def enable() -> None:
    """Enables the scheme in orbax, once per process.

    Raises:
        RuntimeError: when this version of orbax has different internals.
    """
    try:
        from orbax.checkpoint._src.path import gcs_utils
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError as error:
        raise _unknown(error.name or "its modules") from error
    driver = ("_use_gcs_driver", "_normalize_path")
    path = ("is_gcs_path", "get_kvstore_for_gcs", "is_hierarchical_namespace_enabled")
    for module, names in ((gcs_utils, path), (tensorstore_utils, driver)):
        if missing := [name for name in names if not hasattr(module, name)]:
            raise _unknown(f"{module.__name__}: {', '.join(missing)}")
        for name in names:
            setattr(module, name, functools.partial(_ANSWERS[name], getattr(module, name)))


def _unknown(what: str) -> RuntimeError:
    import orbax.checkpoint

    return RuntimeError(
        f"checkpoints on {SCHEME} need orbax-checkpoint 0.12, which has {what}; this is {orbax.checkpoint.__version__}. "
        "Save to a mounted bucket or to gs:// instead."
    )


def rename(source: epath.Path, target: epath.Path) -> None:
    """Renames a directory; on S3 file by file, because s3fs also looks for folders, which are not objects."""
    if not str(source).startswith(SCHEME):
        source.rename(target)
        return
    for path in _files(source):
        path.copy(target / path.relative_to(source))
    source.rmtree()


def _files(directory: epath.Path) -> Iterator[epath.Path]:
    for path in directory.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _is_bucket(original, path) -> bool:
    return str(path).startswith(SCHEME) or original(path)


def _kvstore(original, path: str) -> dict[str, Any]:
    if not path.startswith(SCHEME):
        return original(path)
    parts = urlsplit(path)
    return {"driver": "s3", "bucket": parts.netloc, "path": parts.path.lstrip("/")}


def _has_folders(original, path) -> bool:
    return not str(path).startswith(SCHEME) and original(path)


def _normalize(original, path: str) -> str:
    if not path.startswith(SCHEME):
        return original(path)
    return SCHEME + posixpath.normpath(path.removeprefix(SCHEME))


_ANSWERS = {
    "is_gcs_path": _is_bucket,
    "get_kvstore_for_gcs": _kvstore,
    "is_hierarchical_namespace_enabled": _has_folders,
    "_use_gcs_driver": _is_bucket,
    "_normalize_path": _normalize,
}
