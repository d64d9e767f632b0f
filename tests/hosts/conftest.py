import pytest

import osdn


@pytest.fixture(autouse=True)
def restored():
    """Every test starts and ends with the original functions."""
    osdn.accelerate(undo=True)
    yield
    osdn.accelerate(undo=True)
