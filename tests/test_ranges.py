"""Numbers as ranges."""

import numpy as np
import pytest

from maxlib._utils.text import ranges


@pytest.mark.parametrize("kind", [list, np.array, iter])
def test_neighbours_are_joined(kind):
    assert ranges(kind([0, 1, 2, 5, 7, 8])) == ["0-2", "5", "7-8"]
    assert ranges(kind([])) == []
