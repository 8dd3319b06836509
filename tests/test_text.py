"""Tables and lists of numbers as text."""

import numpy as np
import pytest
from rich.table import Table

from maxlib._utils.text import ranges, to_text


def test_tables_are_plain_text_also_where_colours_are_asked_for(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernels do
    table = Table("name", "value", title="of h100x64")
    table.add_row("parameters", "4.11")
    text = to_text(table)
    assert "\x1b" not in text and "h100x64" in text and "4.11" in text


@pytest.mark.parametrize("kind", [list, np.array, iter])
def test_neighbours_are_joined(kind):
    assert ranges(kind([0, 1, 2, 5, 7, 8])) == ["0-2", "5", "7-8"]
    assert ranges(kind([])) == []
