"""Documents: JSON lines, chats, texts. Not ArrayRecord, whose reader hangs on some damaged files."""

import json
from pathlib import Path

from maxlib import data
from tests.fuzz.run import Target

RECORDS = [{"text": f"document {i} of some", "messages": [{"role": "user", "content": "é"}]} for i in range(4)]


def make(directory: Path) -> None:
    lines = [json.dumps(record) for record in RECORDS]
    (directory / "a.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "c.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "t.txt").write_text("one\n\ntwo\n")


def read(directory: Path) -> None:
    (path,) = directory.iterdir()
    documents = READERS[path.name](path)
    for i in range(min(len(documents), 10)):
        documents[i]


READERS = {"a.jsonl": data.jsonl, "c.jsonl": data.chats, "t.txt": data.text_files}
KINDS = {"a.jsonl": "jsonl", "c.jsonl": "jsonl", "t.txt": "bytes"}
TARGET = Target(make, read, KINDS, alone=True)
