import pytest

from weft.models.native.library import library


@pytest.fixture(autouse=True)
def kernels() -> None:
    if library() is None:
        pytest.skip("needs g++")
