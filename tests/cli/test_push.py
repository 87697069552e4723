"""`weft push`: its list, its question, and invalid input. `test_hub_upload` tests uploads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.checkpoints.hub_stand_in import MAIN, TOKEN, HubStandIn, StoredRepository, serve_hub
from tests.cli.runs import write_run
from weft.cli.main import main
from weft.observe.model_card import find_facts, write_card


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run runs/e/t, whose checkpoints can be uploaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    folder = write_run(tmp_path / "runs", "e/t")
    for step in (2, 4):
        checkpoint = folder / "checkpoints" / "model" / f"step{step}"
        (checkpoint / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        (checkpoint / "model.safetensors").write_bytes(b"w" * 2000)
        write_card(checkpoint, *find_facts(checkpoint))
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with serve_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


def test_a_dry_run_lists_the_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    assert main(["push", "runs/e/t", "me/mine", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "the newest checkpoint of model, runs/e/t/checkpoints/model/step4" in out
    assert "me/mine: 3 files, " in out and "  model.safetensors" in out and "2 kB" in out
    assert "not uploaded\n  weights  not part of the model" in out
    assert "# e/t, step 4" in out and out.endswith("dry run: nothing was sent\n")
    assert sorted(run.rglob("*")) == before


def test_a_push(hub: HubStandIn, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["push", "e/t@step2", "me/mine", "--token-env", "MY_TOKEN", "--license", "mit"]
    assert main([*words, "--yes"]) == 0
    assert f"uploaded {hub.url}/me/mine/commit/" in capsys.readouterr().out
    stored = hub.repositories["me/mine"]
    assert stored.private and stored.messages == ["Upload e/t@step2"]
    assert set(stored.branches[MAIN]) == {"README.md", "config.json", "model.safetensors"}
    assert b"license: mit" in stored.branches[MAIN]["README.md"]


def test_nothing_is_sent_without_consent(
    hub: HubStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["push", "runs/e/t", "me/mine", "--token-env", "MY_TOKEN"]
    assert main(words) == 2
    assert "needs a terminal; add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    assert main([*words, "--public"]) == 1
    assert asked == ["upload this to a new public repository me/mine? [y/N] "]
    assert hub.repositories == {} and "nothing was sent" in capsys.readouterr().out


def test_a_repository_of_another_visibility_is_refused(
    hub: HubStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["me/mine"] = StoredRepository(private=False)
    words = ["push", "runs/e/t", "me/mine", "--token-env", "MY_TOKEN", "--yes"]
    assert main([*words, "--private"]) == 2
    assert "me/mine: is public already" in capsys.readouterr().err
    assert hub.repositories["me/mine"].messages == []
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/e/no", "me/mine"], "there is no such"),
        (["owner/name", "me/mine"], "is no model on this machine"),
        (["runs/e/t", "mine"], "name the repository as OWNER/NAME"),
        (["runs/e/t", "me/mine", "--token-env", "NO_SUCH"], "NO_SUCH: this environment variable"),
        (["runs/e/t", "me/mine", "--private", "--public"], "not allowed with"),
        (["runs/e/t", "me/mine", "--base-model", "x"], "x: name the repository"),
        (["runs/e/t", "me/mine", "--yes"], "HF_HUB_OFFLINE=1 prevents weft"),
    ],
)
def test_refusals(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["push", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_token_is_named(
    hub: HubStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["push", "runs/e/t", "me/mine", "--yes"]) == 2
    said = capsys.readouterr().err
    assert "hf auth login" in said and "HF_TOKEN" in said and hub.requests == []
