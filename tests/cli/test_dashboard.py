"""`weft dashboard`: access, answers, and the end of the server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observe.test_report import write_run
from weft.cli.dashboard import answer_request, open_server
from weft.cli.main import main
from weft.observe.dashboard import Dashboard


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write_run(tmp_path / "runs" / "exp" / name)
    (tmp_path / "secret").mkdir()
    write_run(tmp_path / "secret" / "run")
    return tmp_path / "runs"


@pytest.fixture
def address(runs: Path) -> Iterator[str]:
    server = open_server(Dashboard(runs), "token", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def status(url: str, method: str = "GET", **headers: str) -> int:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_pages_are_for_whoever_has_the_token(address: str) -> None:
    assert status(f"{address}/token/") == status(f"{address}/token/run?name=exp%2Fone") == 200
    assert status(f"{address}/token/compare?run=exp/one&run=exp/two") == 200
    for path in ("/", "/other/", "/token2/", "/run?name=exp/one"):
        assert status(address + path) in (403, 404), path
    assert status(f"{address}/token/", Host="elsewhere.example:80") == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert status(f"{address}/token/", method) == 501


def test_headers_keep_pages_to_themselves(address: str) -> None:
    with urllib.request.urlopen(f"{address}/token/", timeout=30) as answer:
        assert (
            answer.headers["Referrer-Policy"] == "no-referrer"
            and answer.headers["X-Frame-Options"] == "DENY"
        )
        assert answer.headers["Access-Control-Allow-Origin"] is None
        tag = answer.headers["ETag"]
        assert tag.strip('"') in answer.read().decode()
    assert status(f"{address}/token/", **{"If-None-Match": tag}) == 304


@pytest.mark.parametrize(
    "target",
    [
        "run?name=../secret/run",
        "run?name=/etc",
        "run?name=exp",
        "../secret/run",
        "..%2Fsecret%2Frun",
        "exp/one/config.yaml",
        "run",
        "compare",
        "compare?run=exp/one",
        "log.txt",
        "%2e%2e/",
    ],
)
def test_no_path_reaches_the_file_system(runs: Path, target: str) -> None:
    answer = answer_request(Dashboard(runs), "token", f"/token/{target}", "127.0.0.1:1")
    assert answer.status in (400, 403, 404) and "<html" not in answer.body


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "no such folder"),
        (["{file}"], "is not a folder"),
        (["{folder}", "--port", "70000"], "65535"),
    ],
)
def test_invalid_input_has_exit_code_2(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    given = [word.format(file=tmp_path / "file", folder=tmp_path) for word in words]
    assert main(["dashboard", *given]) == 2
    assert told in capsys.readouterr().err


def test_a_port_in_use_is_reported(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = open_server(Dashboard(runs), "token", 0)
    assert main(["dashboard", str(runs), "--port", str(server.server_address[1])]) == 2
    assert "choose another port" in capsys.readouterr().err
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_cleanly(runs: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "weft.cli.main", "dashboard", str(runs), "--port", "0"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    url = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", process.stdout.readline())
    assert url and status(url[0]) == 200
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and out.endswith("ended\n") and err == ""
