"""Judge with scripted answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host.test_judge import Stub


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    stub = Stub()
    yield stub
    stub.close()
