import pytest

import osdn


@pytest.fixture(autouse=True)
def restored():
    """Make every test start and end with the original functions."""
    osdn.accelerate(undo=True)
    yield
    osdn.accelerate(undo=True)
