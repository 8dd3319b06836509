import jax
import pytest


@pytest.fixture
def float64():
    """Double precision within a test: differences then mean mistakes, not rounding."""
    with jax.enable_x64(True):
        yield
