"""Local copies of files in buckets: one per version, weights last, never incomplete."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import CheckpointError, ConfigError, DataError
from weft.storage import copies
from weft.storage.buckets import BucketFolder
from weft.storage.copies import (
    MANIFEST,
    complete,
    copy_data,
    copy_file,
    copy_if_remote,
    copy_model,
    find_checkpoint_url,
    find_runs_folder,
    find_url,
    forget_data_copies,
    read_listing,
    restore_urls,
)

MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"twice",
    "README.md": b"text",
    "adapter/adapter_config.json": b"{}",
    "runs/log.txt": b"x",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(copies.CACHE_VARIABLE, str(tmp_path / "cache"))
    fsspec.filesystem("memory").store.clear()
    forget_data_copies()
    return tmp_path / "cache"


def put(url: str, files: dict[str, bytes]) -> None:
    bucket = BucketFolder.open(url)
    for name, contents in files.items():
        bucket.write(name, contents)


def list_names(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != copies.LISTING
    }


def test_weights_are_copied_when_they_are_needed(cache: Path) -> None:
    put("memory://b/m", MODEL)
    copy = copy_model("memory://b/m")
    assert copy.parent == cache / "copies" / "memory" / "b" and copy.name.startswith("m@")
    assert list_names(copy) == {"config.json", "adapter/adapter_config.json"}
    wanted = {"config.json", "adapter/adapter_config.json", "model.safetensors"}
    assert set(read_listing(copy)) == wanted
    complete(copy)
    assert list_names(copy) == wanted
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    complete(copy)
    complete(cache)  # no copy
    assert copy_model("memory://b/m") == copy


def test_a_changed_model_gets_another_copy() -> None:
    put("memory://b/m", MODEL)
    before = copy_model("memory://b/m")
    put("memory://b/m", {"model.safetensors": b"WEIGHTS"})
    after = copy_model("memory://b/m")
    assert before != after and find_url(before) == find_url(after) == "memory://b/m"
    with pytest.raises(CheckpointError, match=r"model.safetensors was changed while it was copied"):
        complete(before)


def test_a_path_of_another_machine_is_copied_here(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("memory://b/m", MODEL)
    copy = copy_model("memory://b/m")
    (cache / "copies").rename(cache / "elsewhere")
    assert copy_if_remote(str(copy)) == str(copy)
    assert (copy / "config.json").is_file()
    (cache / "copies").rename(cache / "elsewhere-too")
    put("memory://b/m", {"config.json": b'{"a": 1}'})
    with pytest.raises(CheckpointError, match="has changed since the run was started"):
        complete(copy)


def test_a_folder_without_a_model_is_refused() -> None:
    put("memory://b/m", {"notes.md": b"x"})
    with pytest.raises(CheckpointError, match=r"^actor.path=U: contains no model"):
        copy_model("memory://b/m", "actor.path=U")
    with pytest.raises(CheckpointError, match=r"^memory://b/none: there is no such file or folder"):
        copy_model("memory://b/none")


def test_a_checkpoint_counts_with_its_manifest() -> None:
    url = "memory://b/runs/e/t/checkpoints/actor/step4"
    put(url, {"config.json": b"{}", "model.safetensors": b"12345"})
    with pytest.raises(CheckpointError, match=rf"is not complete: {MANIFEST}"):
        copy_model(url)
    sizes = {"config.json": 2, "model.safetensors": 5}
    put(url, {MANIFEST: json.dumps({"files": {}, "sizes": sizes}).encode()})
    complete(copy_model(url))
    put(url, {"model.safetensors": b"123"})
    with pytest.raises(CheckpointError, match="has 3 bytes instead of 5"):
        copy_model(url)
    BucketFolder.open(url).remove(["model.safetensors"])
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing"):
        copy_model(url)


def test_the_url_of_a_run_means_its_newest_complete_checkpoint() -> None:
    url = "memory://b/runs/e/t"
    for name in ("critic/step9", "actor/step4", "actor/step12"):
        put(f"{url}/checkpoints/{name}", {"config.json": b"{}", MANIFEST: b"{}"})
    put(f"{url}/checkpoints/actor/step16", {"config.json": b"{}"})
    assert find_checkpoint_url(f"{url}/", ["actor", "critic"]) == f"{url}/checkpoints/actor/step12"
    assert find_checkpoint_url(url, ["rew", "critic"]) == f"{url}/checkpoints/critic/step9"
    for other in (url, f"{url}/checkpoints/actor/step4", "memory://b/none"):
        assert find_checkpoint_url(other, ["rew"]) == other


def test_the_end_of_a_url_names_a_checkpoint_of_a_run() -> None:
    url = "memory://b/runs/e/best"
    for name in ("actor/step4", "actor/step12", "critic/step4"):
        put(f"{url}/checkpoints/{name}", {"config.json": b"{}", MANIFEST: b"{}"})
    put(url, {"checkpoints/best.json": b'{"step": 4, "metric": "eval/loss", "value": 1.5}'})
    ends = {
        "@best": "actor/step4",
        "@step4": "actor/step4",
        "@latest": "actor/step12",
        "@best:critic": "critic/step4",
    }
    for end, name in ends.items():
        assert find_checkpoint_url(url + end, ["actor"]) == f"{url}/checkpoints/{name}"
    with pytest.raises(CheckpointError, match=r"@step5: there is no such .* @step4, @step12, @lat"):
        find_checkpoint_url(f"{url}@step5", ["actor"])
    with pytest.raises(CheckpointError, match=r"no such checkpoint of rew; the run has none"):
        find_checkpoint_url(f"{url}@best:rew", ["actor"])
    for damaged in (b"{", b"[]", b'{"step": null}', b"\xff"):
        put(url, {"checkpoints/best.json": damaged})
        with pytest.raises(CheckpointError, match="@best: there is no such checkpoint"):
            find_checkpoint_url(f"{url}@best", ["actor"])


def test_a_single_file(cache: Path) -> None:
    put("memory://b/t", {"tokenizer.model": b"abc"})
    copy = copy_file("memory://b/t/tokenizer.model")
    assert copy.name == "tokenizer.model" and copy.read_bytes() == b"abc"
    assert copy_model("memory://b/t/tokenizer.model") == copy
    assert find_url(copy) == "memory://b/t/tokenizer.model"
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        copy_file("memory://b/t")
    with pytest.raises(ConfigError, match="there is no such file"):
        copy_file("memory://b/t/none")


def test_data_are_files_folders_and_patterns() -> None:
    put("memory://b/d", {"a-1.jsonl": b"1", "a-2.jsonl": b"2", "b.jsonl": b"3", "x.txt": b"4"})
    put("memory://b/d/sub", {"c.jsonl": b"5"})
    suffixes = (".jsonl",)
    assert copy_data("memory://b/d/b.jsonl", suffixes).read_bytes() == b"3"
    folder = copy_data("memory://b/d", suffixes)
    assert list_names(folder) == {"a-1.jsonl", "a-2.jsonl", "b.jsonl", "sub/c.jsonl"}
    assert list_names(copy_data("memory://b/d/a-*.jsonl", suffixes)) == {"a-1.jsonl", "a-2.jsonl"}
    with pytest.raises(DataError, match=r"x.txt: weft reads .jsonl"):
        copy_data("memory://b/d/x.txt", suffixes)
    with pytest.raises(DataError, match="no data files in it"):
        copy_data("memory://b/d/z-*", suffixes)
    with pytest.raises(DataError, match="there is no such file or folder"):
        copy_data("memory://b/none", suffixes)


def test_a_run_reads_one_version_of_its_data() -> None:
    put("memory://b", {"d.jsonl": b"1"})
    before = copy_data("memory://b/d.jsonl", (".jsonl",))
    put("memory://b", {"d.jsonl": b"2"})
    assert copy_data("memory://b/d.jsonl", (".jsonl",)) == before
    forget_data_copies()
    after = copy_data("memory://b/d.jsonl", (".jsonl",))
    assert (before.read_bytes(), after.read_bytes()) == (b"1", b"2")


def test_options_name_urls_again() -> None:
    put("memory://b/m", MODEL)
    copy = str(copy_model("memory://b/m"))
    options = {"actor": {"path": copy, "n": 1}, "list": [copy, None, "/tmp/x"], "name": "x"}
    assert restore_urls(options) == {
        "actor": {"path": "memory://b/m", "n": 1},
        "list": ["memory://b/m", None, "/tmp/x"],
        "name": "x",
    }


NAMES = st.text("ab.@-_0", min_size=1, max_size=8).filter(lambda name: name.strip("."))


@given(
    parts=st.lists(NAMES, min_size=1, max_size=4),
    digits=st.text("0123456789abcdef", min_size=12, max_size=12),
)
def test_every_copy_knows_its_url(parts: list[str], digits: str) -> None:
    root = copies.find_cache_folder() / "copies"
    if any(copies.COPY_NAME.fullmatch(part) for part in parts):
        return
    url = "gs://" + "/".join(parts)
    folder = root / copies.split_url(url)
    assert find_url(folder.with_name(f"{folder.name}@{digits}")) == url
    assert find_url(folder / f"@{digits}" / "x.jsonl") == f"{url}/x.jsonl"


def test_runs_in_a_bucket_have_a_folder_here(cache: Path) -> None:
    assert find_runs_folder("./runs") == Path("runs")
    assert find_runs_folder("gs://b/../x/") == cache / "runs" / "gs" / "b" / "x"


def test_converted_models_have_the_same_name_on_each_machine() -> None:
    own = {"model": {"path": "runs/converted/f@0123456789ab", "seed": 1}}
    other = {"model": {"path": "/home/b/cache/converted/f@0123456789ab", "seed": 1}}
    assert restore_urls(own) == restore_urls(other)
    assert restore_urls(own)["model"]["path"] == "converted/f@0123456789ab"
    for path in ("/a/converted/f", "converted/f@0123", "/converted@0123456789ab/f", "runs/f@step4"):
        assert restore_urls(path) == path
