"""JSON files with a checksum."""

import json
import zlib
from typing import Any

from etils import epath


class DamagedError(ValueError):
    """Error for a record that is missing or differs from what was written."""


def to_text(content: Any) -> str:
    """Formats `content` as JSON with its checksum. Raises TypeError for values that JSON cannot represent."""
    body = json.dumps(json.loads(json.dumps(content)), sort_keys=True)  # keys as they will be read: strings
    return f'{{"crc32": "{zlib.crc32(body.encode()):08x}", "content": {body}}}\n'


def read(path: epath.Path) -> Any:
    """Reads the content of a record. Raises DamagedError."""
    try:
        record = json.loads(path.read_text())
        crc, content = record["crc32"], record["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}" != crc:
        raise DamagedError(f"{path} differs from what was written")
    return content
