import pytest

from weft.kernels.cpu.library import load_library


@pytest.fixture(autouse=True)
def kernels() -> None:
    if load_library() is None:
        pytest.skip("needs g++")
