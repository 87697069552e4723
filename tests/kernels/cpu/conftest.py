import pytest

from weft.kernels.cpu.library import library


@pytest.fixture(autouse=True)
def kernels() -> None:
    if library() is None:
        pytest.skip("needs g++")
