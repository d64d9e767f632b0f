import pytest

from tests.ops.problems import threads


@pytest.fixture(autouse=True)
def _one_thread():
    with threads(1):
        yield
