"""Choice of the files to upload, and an upload to a local stand-in for the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.checkpoints.hub_stand_in import MAIN, TOKEN, HubStandIn, serve_hub
from weft.checkpoints.hub_upload import (
    HubUploadPlan,
    check_repository_name,
    find_repository,
    open_api,
    plan_upload,
    upload,
)
from weft.errors import CheckpointError, ConfigError, RunError

CONFIG = {"architectures": ["LlamaForCausalLM"]}
OTHERS = (
    "optimizer.pt",
    "pytorch_model.bin",
    "modeling_mine.py",
    "rows.jsonl",
    "log.txt",
    "eval/results_1.json",
    "eval/samples_quiz_1.jsonl",
    "recover/state.bin",
)


def write_model(folder: Path, *, adapter_of: str | None = None) -> Path:
    """A model directory with files of all kinds, and with an adapter if `adapter_of` is given."""
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "LICENSE", *OTHERS):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if adapter_of is not None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_model.safetensors").write_text("lora")
        settings = {"base_model_name_or_path": adapter_of, "r": 4}
        (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def plan(folder: Path, **changes: Any) -> HubUploadPlan:
    options = {"merged": False, "base_model": None, "license": None, **changes}
    return plan_upload(folder, "me/mine", **options)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with serve_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


def send(planned: HubUploadPlan, **changes: Any) -> str:
    options = {"private": True, "revision": None, "message": "Upload", **changes}
    return upload(open_api(TOKEN, ""), planned, **options)


def test_only_the_files_of_a_model_are_planned(tmp_path: Path) -> None:
    planned = plan(write_model(tmp_path))
    assert list(planned.sizes) == [
        *("LICENSE", "README.md", "chat_template.jinja", "config.json"),
        *("model.safetensors", "tokenizer.json"),
    ]
    assert planned.sizes["model.safetensors"] == len("model.safetensors")
    assert set(planned.left_out) == set(OTHERS)
    assert planned.left_out["optimizer.pt"] == "not in safetensors format"
    assert planned.left_out["modeling_mine.py"] == "code"
    assert planned.left_out["eval/results_1.json"] == "the card has the results"


def test_paths_of_this_machine_are_not_uploaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "_name_or_path": "/home/jo/model"}))
    tokenizer = {"name_or_path": "me/hub", "special_tokens_map_file": "/home/jo/.cache/x.json"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    planned = plan(folder)
    assert json.loads(planned.texts["config.json"]) == CONFIG
    assert json.loads(planned.texts["tokenizer_config.json"]) == {"name_or_path": "me/hub"}
    assert not {"config.json", "tokenizer_config.json"} & {*planned.files, *planned.left_out}
    assert "/home/jo" not in "".join(planned.notes) and len(planned.notes) == 2


def test_an_adapter_is_uploaded_as_an_adapter(tmp_path: Path) -> None:
    planned = plan(write_model(tmp_path, adapter_of="o/base"))
    assert list(planned.sizes) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors"),
        *("chat_template.jinja", "tokenizer.json"),
    ]
    assert "base_model: o/base" in planned.texts["README.md"]
    assert "library_name: peft" in planned.texts["README.md"]
    assert planned.left_out["model.safetensors"] == "the adapter needs only its base model"
    merged = plan(tmp_path, merged=True)
    assert "model.safetensors" in merged.files and "adapter_model.safetensors" not in merged.files
    assert merged.left_out["adapter/adapter_config.json"] == "the weights include the adapter"


def test_an_adapter_of_a_local_model_needs_the_name_of_its_base(tmp_path: Path) -> None:
    write_model(tmp_path, adapter_of="/home/jo/model")
    with pytest.raises(ConfigError, match=r"'/home/jo/model', which is not a name on the hub; set"):
        plan(tmp_path)
    planned = plan(tmp_path, base_model="o/base")
    settings = json.loads(planned.texts["adapter_config.json"])
    assert settings == {"base_model_name_or_path": "o/base", "r": 4}


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights in safetensors files"):
        plan(tmp_path)


@pytest.mark.parametrize("name", ["mine", "me/mi ne", "a/b/c", "me/..", ""])
def test_names_of_repositories(name: str) -> None:
    check_repository_name("me/mine-1.0_x")
    with pytest.raises(ConfigError):
        check_repository_name(name)


def test_an_upload_to_a_new_and_to_an_old_repository(tmp_path: Path, hub: HubStandIn) -> None:
    folder = write_model(tmp_path, adapter_of="o/base")
    api = open_api(TOKEN, "")
    assert find_repository(api, "me/mine").is_private is None
    url = send(plan(folder, merged=True))
    assert url.startswith(f"{hub.url}/me/mine/commit/")
    assert find_repository(api, "me/mine").is_private is True
    stored = hub.repositories["me/mine"]
    files = stored.branches[MAIN]
    assert set(files) == set(plan(folder, merged=True).sizes)
    assert files["model.safetensors"] == b"model.safetensors"
    # Weights and configurations of an earlier upload are removed.
    files["model-00001-of-00002.safetensors"] = b"old"
    files["notes.md"] = b"mine"
    send(plan(folder), revision="lora")
    branch = stored.branches["lora"]
    assert set(branch) == {*plan(folder).sizes, "LICENSE", "notes.md"}
    assert "model-00001-of-00002.safetensors" in files and stored.messages == ["Upload"] * 2


def test_a_public_repository(tmp_path: Path, hub: HubStandIn) -> None:
    send(plan(write_model(tmp_path)), private=False)
    assert hub.repositories["me/mine"].private is False


def test_refusals_of_the_hub(tmp_path: Path, hub: HubStandIn) -> None:
    with pytest.raises(ConfigError, match=r"^me/mine: the hub does not accept the token .*hf auth"):
        find_repository(open_api("hf_wrong", ""), "me/mine")
    hub.refused = {"commit": 403}
    with pytest.raises(ConfigError, match=r"^me/mine: the hub does not let this token write there"):
        send(plan(write_model(tmp_path)))
    hub.refused = {"commit": 400}
    with pytest.raises(RunError, match=r"^me/mine: the hub refuses the upload \("):
        send(plan(tmp_path))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub() as served:
        url = served.url
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(RunError, match=r"^me/mine: the hub cannot be reached \("):
        find_repository(open_api(TOKEN, ""), "me/mine")


def test_without_a_token_or_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="run hf auth login, or set HF_TOKEN"):
        open_api(None, "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE=1 prevents"):
        open_api(TOKEN, "")
