"""Amazon's S3 for orbax, which knows Google's buckets only: it takes `s3://` for a folder of the disk.

tensorstore and etils read and write both. What orbax asks about a path decides the rest: which driver tensorstore gets,
that a step counts once its last file, `commit_success.txt`, is there (an object store cannot rename a directory), and
how a directory is deleted. Here those questions get an answer for `s3://` as for `gs://`.
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
    """Teaches orbax the scheme, once a process.

    Raises:
      RuntimeError: when this version of orbax is built another way.
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
    """Renames a directory; in a bucket of S3 file by file, since s3fs also looks for folders, which are no objects."""
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
