"""Requests to the hub: which ones, how many, and messages if it does not answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from weft.data import hub
from weft.errors import CheckpointError, DataError
from weft.experiments import SFTConfig
from weft.launch.downloads import fetch_configs


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_cached", lambda name: False)
    monkeypatch.setattr(hub, "_has_dataset_folder", lambda name: False)


class Api:
    """The hub's API, in which every request fails, or is answered late."""

    def __init__(self, answer: Exception | float) -> None:
        self.answer, self.asked = answer, list[str]()

    def model_info(self, name: str, timeout: float) -> None:
        self.asked.append(name)
        if not isinstance(self.answer, Exception):
            time.sleep(self.answer)
            return
        raise self.answer

    dataset_info = model_info


def refused(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    return kind("no", response=httpx.Response(status, request=httpx.Request("GET", "https://hub")))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE=1 prevents weft from asking"),
        (refused(RepositoryNotFoundError, 404), "the hub has no model of this name"),
        (refused(GatedRepoError, 403), "has to be requested"),
        (refused(HfHubHTTPError, 500), "the hub refuses it"),
        (
            ConnectionError("Name or service not known"),
            "cannot be reached (Name or service not known)",
        ),
        (httpx.ConnectError("no route"), "cannot be reached (no route)"),
    ],
)
def test_one_question_and_one_message(
    answer: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    api = Api(answer)
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: api)
    with pytest.raises(CheckpointError) as caught:
        hub.check_model("actor.path", "a/b", "did you mean c?")
    assert str(caught.value).startswith("actor.path='a/b': there is no such directory, and ")
    assert words in str(caught.value) and str(caught.value).endswith("; did you mean c?")
    assert api.asked == ["a/b"]
    with pytest.raises(DataError, match=r"^a/b: there is no such file or directory"):
        hub.check_dataset("", "a/b")
    with pytest.raises(
        DataError, match=r"^dataset\.path='a/b:main': there is no such file or directory, and "
    ):
        hub.check_dataset("dataset.path", "a/b:main")
    assert api.asked == ["a/b"] * 3


def test_a_hub_that_does_not_answer_in_time_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: Api(1.0))
    with pytest.raises(CheckpointError, match=r"no answer in 0\.05 seconds"):
        hub.check_model("model.path", "a/b")


def test_what_the_hub_has_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: Api(0.0))
    hub.check_model("model.path", "a/b")
    hub.check_dataset("dataset.path", "a/b")


@contextmanager
def dead_hub() -> Iterator[tuple[str, list[int]]]:
    """The address of a hub that closes connections, and a list that grows with each request."""
    server, calls = socket.create_server(("127.0.0.1", 0)), list[int]()

    def serve() -> None:
        while True:
            try:
                called, _ = server.accept()
            except OSError:
                return
            calls.append(1)
            called.close()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}", calls
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("chat e/m", "MODEL_DIR='e/m'"),
        ("serve e/m", "MODEL='e/m'"),
        ("eval rm e/m pairs.jsonl --type preference", "MODEL='e/m'"),
        ("data inspect rows.jsonl --type prompt --tokenizer e/m", "--tokenizer='e/m'"),
        ("data inspect e/rows --type prompt", "e/rows:"),
        ("quickstart sft model.path=e/m dataset.path=rows.jsonl", "model.path='e/m'"),
        ("quickstart ppo actor.path=MODEL rew.path=e/m dataset.path=rows.jsonl", "rew.path='e/m'"),
        (
            "quickstart sft model.path=MODEL model.tokenizer.path=e/m dataset.path=rows.jsonl",
            "model.tokenizer.path='e/m'",
        ),
        (
            "quickstart sft model.path=MODEL dataset.train_path=e/rows",
            "dataset.train_path='e/rows'",
        ),
    ],
)
def test_a_process_without_a_hub_asks_it_once(words: str, option: str, tmp_path: Path) -> None:
    from tests.tiny import make_llama, write_jsonl

    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Hi"}])
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "Hi", "chosen": "a", "rejected": "b"}])
    if "MODEL" in words:
        make_llama(tmp_path / "MODEL")
    with dead_hub() as (address, calls):
        import os

        run = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
        }
        names = ["experiment_name=x", "trial_name=y"] if words.startswith("quickstart") else []
        command = [sys.executable, "-m", "weft.cli.main", *words.split(), *names]
        done = subprocess.run(
            command, cwd=tmp_path, env=run, capture_output=True, text=True, timeout=120, input=""
        )
    assert done.returncode == 2, done.stderr
    assert (
        option in done.stderr
        and "the hub cannot be reached" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert done.stderr.count("error: ") == 1 and "Retrying" not in done.stderr
    assert len(calls) <= 2, "one question, for which its library may open two connections"


def test_a_model_that_the_hub_cannot_confirm_can_still_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: Api(OfflineModeIsEnabled("offline")))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    for name, ends in (
        (
            "Qwen/Qwen3-0.6B",
            "; --dry-run=config plans the run from the config.json that weft ships",
        ),
        ("Qwen/Qwen3-0.7B", "; check the spelling"),
    ):
        config = SFTConfig(experiment_name="e", trial_name="t")
        config.model.path = name
        config.dataset.train_path = str(rows)
        with pytest.raises(CheckpointError) as caught:
            fetch_configs(config.build())
        assert str(caught.value).endswith(ends)
