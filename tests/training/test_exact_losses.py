"""The losses of a CPU run equal the stored ones in every digit; by default test_step.py has what a step computes."""

import pytest

from tests.training import losses


@pytest.mark.full
def test_every_loss_has_the_digits_of_the_committed_file():
    expected = losses.file()
    if not expected.exists():
        pytest.skip(f"no losses for {expected.stem}: {losses.COMMAND}")
    assert losses.compute().splitlines() == expected.read_text().splitlines(), f"if it is meant: {losses.COMMAND}"
