"""Defaults are part of the API: a changed one changes what users compute."""

from tests import defaults


def test_defaults_are_those_that_are_written_down():
    """After a change on purpose, `python -m tests.defaults --write`, and a line in CHANGELOG.md."""
    assert "\n".join(defaults.lines()) + "\n" == defaults.FILE.read_text()
