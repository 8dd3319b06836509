"""Names, parameters and defaults are what users depend on."""

from tests import public_api


def test_the_public_api_is_the_one_that_is_written_down():
    """After a change on purpose, `python -m tests.public_api --write`, and a line in CHANGELOG.md."""
    assert "\n".join(public_api.lines()) + "\n" == public_api.FILE.read_text()
