"""Tables as text."""

from rich.table import Table

from maxlib._utils.text import to_text


def test_tables_are_plain_text_also_where_colours_are_asked_for(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernels do
    table = Table("name", "value", title="of h100x64")
    table.add_row("parameters", "4.11")
    text = to_text(table)
    assert "\x1b" not in text and "h100x64" in text and "4.11" in text
