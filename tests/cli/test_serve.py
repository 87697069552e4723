"""`weft serve` as a process: its output, its end, and input refused before a model is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.tiny import make_llama
from weft.cli.main import main
from weft.cli.serve import _find_token, build_parser
from weft.errors import ConfigError

SECRET = "a-secret-token"


def test_a_server_prints_its_address_and_ends_at_a_signal(tmp_path: Path) -> None:
    make_llama(tmp_path / "policy")
    command = [
        sys.executable,
        "-m",
        "weft.cli.main",
        "serve",
        str(tmp_path / "policy"),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "WEFT_SERVE_TOKEN"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.strip())
                if line.startswith("Ctrl-C"):
                    break
            told = "\n".join(lines)
            assert "policy: policy" in told, told
            url = next(line.split()[2] for line in lines if line.startswith("http at"))
            token = next(
                line.rsplit(" ", 1)[1]
                for line in lines
                if line.startswith("token, generated for this run")
            )
            assert url.startswith("http://127.0.0.1:")
            body = {"model": "policy", "prompt": "Once", "max_tokens": 2}
            assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 401
            headers = {"Authorization": f"Bearer {token}"}
            assert (
                httpx.post(
                    url + "/v1/completions", json=body, headers=headers, timeout=60
                ).status_code
                == 200
            )
            process.send_signal(signal.SIGINT)
            assert process.stdout.read().strip() == "stopping"
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--no-token"], "nothing to serve"),
        (["m", "--http-port", "70000"], "--port=70000"),
        (["m", "--port", "70000"], "--port=70000"),
        (["m", "--name", "a/b"], "--name='a/b': clients put the name into URLs"),
        (["m", "--name", ""], "--name=''"),
        (["m", "--reward", "m", "--reward-name", "a b"], "--reward-name='a b'"),
        (["m", "--max-prompt-kb", "0"], "--max-prompt-kb=0"),
        (["m", "--max-load", "0"], "--max-load=0"),
        (["m", "--no-token", "--host", "0.0.0.0"], "--no-token is allowed only"),
        (["m", "--token-env", "NOT_SET_ANYWHERE"], "not set"),
        (["m", "--token-file", "/nowhere"], "no such file"),
        (["/nowhere/m", "--no-token"], "no such file or directory"),
    ],
)
def test_invalid_input_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_token_is_read_from_a_regular_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading a pipe without a writer, or `/dev/zero`, would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"a" * (1 << 17))
    wrong = {
        tmp_path / "pipe": "is a pipe or a device, not a file",
        tmp_path: "is a folder, not a file",
        Path("/dev/zero"): "is a pipe or a device",
        tmp_path / "large": "has 131,072 bytes, and at most 65,536",
    }
    for place, told in wrong.items():
        assert main(["serve", "m", "--token-file", str(place)]) == 2
        assert f"--token-file={place}: {told}" in capsys.readouterr().err


def test_sources_of_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SERVE_TOKEN", raising=False)
    (tmp_path / "token").write_text(f"{SECRET}\n")
    made, told = _find_token(build_parser().parse_args(["m"]))
    assert made is not None and len(made) >= 32 and made in told
    assert _find_token(build_parser().parse_args(["m", "--no-token"]))[0] is None
    for words in (
        ["m", "--token-file", str(tmp_path / "token")],
        ["m"],
        ["m", "--token-env", "OTHER"],
    ):
        monkeypatch.setenv("WEFT_SERVE_TOKEN", SECRET)
        monkeypatch.setenv("OTHER", SECRET)
        token, told = _find_token(build_parser().parse_args(words))
        assert token == SECRET and SECRET not in told
    monkeypatch.setenv("OTHER", "two words")
    with pytest.raises(ConfigError, match="ASCII") as refused:
        _find_token(build_parser().parse_args(["m", "--token-env", "OTHER"]))
    assert "two words" not in str(refused.value)
