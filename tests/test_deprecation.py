"""Deprecated names still work, warn where they are called, and are gone when they promised to be."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

import maxlib
from maxlib.inference import Chat

ROOT = Path(__file__).parents[1] / "maxlib"
USED = re.compile(r'@deprecated\([^)]*since="(\d+)\.(\d+)", removed="(\d+)\.(\d+)"\)')


def test_a_deprecated_function_works_and_warns_its_caller():
    # Out of the reach of tests/typecheck.py, which puts a frame between a function and who calls it.
    deprecated = runpy.run_path(str(ROOT / "_utils" / "deprecation.py"))["deprecated"]

    @deprecated("double", since="0.1", removed="0.3")
    def twice(x: int) -> int:
        """Returns 2 x."""
        return 2 * x

    with pytest.warns(DeprecationWarning, match=r"twice is deprecated since maxlib 0\.1 .* use double") as found:
        assert twice(4) == 8
    assert found[0].filename == __file__
    assert twice.__doc__ == "Returns 2 x.\n\nDeprecated since 0.1: use double."
    assert "use double" in twice.__deprecated__


def test_the_old_name_does_what_the_new_one_does(monkeypatch):
    chat = Chat.__new__(Chat)
    monkeypatch.setattr(chat, "_pieces", lambda *arguments: iter(map(str, arguments)))
    with pytest.warns(DeprecationWarning, match=r"Chat\.continued"):
        old = list(chat.continued("text", max_new_tokens=3))
    with warnings.catch_warnings(action="error"):
        assert old == list(chat.complete("text", max_new_tokens=3)) == ["text", "3", "None"]


def test_deprecated_names_leave_in_time():
    now = tuple(map(int, re.match(r"(\d+)\.(\d+)", maxlib.__version__).groups()))
    marked = 0
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        for since_major, since_minor, major, minor in USED.findall(text):
            marked += 1
            since, removed = (int(since_major), int(since_minor)), (int(major), int(minor))
            assert now < removed, f"{path}: maxlib {now} should not have what ends with {removed}"
            # One minor version lies between, and after 1.0 only a major version removes.
            assert removed >= (since[0], since[1] + 2) if since[0] == 0 else removed >= (since[0] + 1, 0)
        assert len(USED.findall(text)) == text.count("@deprecated("), path
    assert marked
