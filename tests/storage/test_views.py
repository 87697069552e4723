"""Views of runs in buckets: current copies of the small files."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from weft.errors import ConfigError
from weft.storage.buckets import BucketFolder
from weft.storage.copies import CACHE_VARIABLE, MANIFEST
from weft.storage.views import (
    STAMPS,
    count_view_bytes,
    find_view_url,
    is_visible,
    view_runs,
)


@pytest.mark.parametrize(
    ("name", "visible"),
    [
        ("e/t/metrics.jsonl", True),
        ("metrics.jsonl", True),
        ("e/t/logs/worker-0.txt", True),
        ("e/t/recover/step2.json", False),
        ("recover/step2/x.bin", False),
        ("e/t/checkpoints/actor/step2/model.safetensors", False),
        (f"e/t/checkpoints/actor/step2/{MANIFEST}", True),
        ("e/t/checkpoints/milestones.json", True),
        ("e/t/.x.tmp", False),
    ],
)
def test_weights_and_recovery_points_are_left_out(name: str, visible: bool) -> None:
    assert is_visible(name) is visible


def test_a_view_follows_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    fsspec.filesystem("memory").store.clear()
    bucket = BucketFolder.open("memory://b/runs")
    bucket.write("e/t/metrics.jsonl", b"1\n")
    bucket.write("e/t/config.yaml", b"a: 1\n")
    bucket.write("e/t/recover/step1/x.bin", b"x")
    view = view_runs("memory://b/runs")
    files = {path.relative_to(view).as_posix() for path in view.rglob("*") if path.is_file()}
    assert files == {"e/t/metrics.jsonl", "e/t/config.yaml", STAMPS}
    before = (view / "e/t/config.yaml").stat().st_mtime_ns
    bucket.write("e/t/metrics.jsonl", b"1\n2\n")
    bucket.write("e/u/config.yaml", b"")
    assert view_runs("memory://b/runs") == view
    assert (view / "e/t/metrics.jsonl").read_text() == "1\n2\n"
    assert (view / "e/t/config.yaml").stat().st_mtime_ns == before, "not copied again"
    bucket.remove(["e/t/metrics.jsonl"])
    assert not (view_runs("memory://b/runs") / "e/t/metrics.jsonl").exists()
    with pytest.raises(ConfigError, match="there is no such folder in the bucket"):
        view_runs("memory://b/none")
    assert list(view_runs("memory://b/none", missing_ok=True).iterdir()) != []


def test_a_view_knows_urls_and_sizes_of_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    fsspec.filesystem("memory").store.clear()
    bucket = BucketFolder.open("memory://b/runs")
    bucket.write("e/t/config.yaml", b"a: 1\n")
    bucket.write("e/t/checkpoints/m/step2/model.safetensors", b"w" * 70)
    bucket.write(f"e/t/checkpoints/m/step2/{MANIFEST}", b"{}")
    bucket.write("e/t2/recover/step1/x.bin", b"x" * 900)
    view = view_runs("memory://b/runs/")
    step = view / "e/t/checkpoints/m/step2"
    assert find_view_url(view) == "memory://b/runs"
    assert find_view_url(step) == "memory://b/runs/e/t/checkpoints/m/step2"
    assert count_view_bytes(step) == 72 and count_view_bytes(view / "e/t") == 77
    assert count_view_bytes(view) == 977
    # The view of a run is inside the view of all runs, and is newer.
    bucket.write("e/t/checkpoints/m/step2/more.safetensors", b"w" * 30)
    inner = view_runs("memory://b/runs/e/t")
    assert inner == view / "e/t" and count_view_bytes(inner) == 107
    assert find_view_url(step) == "memory://b/runs/e/t/checkpoints/m/step2"
    # A removed checkpoint leaves no empty folder.
    bucket.remove([f"e/t/checkpoints/m/step2/{MANIFEST}"])
    assert not (view_runs("memory://b/runs") / "e/t/checkpoints").exists()
    assert count_view_bytes(view / "e/t") == 105
    assert find_view_url(tmp_path / "e") is None and count_view_bytes(tmp_path) is None


@pytest.mark.parametrize("contents", ["", "[]", '{"config.yaml": "1"}', '{"url": "memory://b/r"}'])
def test_a_listing_of_an_earlier_version_is_replaced(
    contents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    fsspec.filesystem("memory").store.clear()
    BucketFolder.open("memory://b/runs").write("config.yaml", b"a: 1\n")
    view = view_runs("memory://b/runs")
    (view / STAMPS).write_text(contents)
    assert find_view_url(view) is None
    assert view_runs("memory://b/runs") == view and count_view_bytes(view) == 5
