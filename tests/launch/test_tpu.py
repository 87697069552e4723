"""The parts of `weft launch tpu` that need no gcloud: waits, differences, sources, requirements."""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.extras import find_sources
from weft.launch import tpu
from weft.launch.gcloud import TpuPod
from weft.launch.tpu import PodRun, RetryPlan, build_requirement, find_differences, parse_reports
from weft.launch.tpu_host import HostReport


def hosts(*facts: dict[str, Any] | str) -> list[HostReport]:
    """Reports of workers 0, 1, ...: a text is a problem."""
    reports = []
    for number, each in enumerate(facts):
        report = HostReport(str(number), f"w-{number}")
        if isinstance(each, str):
            report.problem = each
        else:
            report.facts = each
        reports.append(report)
    return reports


def test_waits_double_up_to_ten_minutes() -> None:
    assert RetryPlan(7, 30.0).list_waits() == [30, 60, 120, 240, 480, 600, 600]
    assert RetryPlan(0).list_waits() == []
    assert RetryPlan(2, 900.0).list_waits() == [600, 600]
    assert RetryPlan(2, 0.0).list_waits() == [0, 0]


@pytest.mark.parametrize(("count", "wait"), [(-1, 1.0), (1, -1.0), (1, float("nan"))])
def test_retries_that_make_no_sense(count: int, wait: float) -> None:
    with pytest.raises(ConfigError, match="--retry"):
        RetryPlan(count, wait)


def test_the_host_that_differs_is_named_with_what_the_others_have() -> None:
    alike = {"device files": 4, "jax": "0.10.2"}
    assert find_differences(hosts(alike, alike, alike)) == {}
    assert find_differences(hosts(alike, {**alike, "device files": 0}, alike)) == {
        "1": ["device files 0, the others have 4"]
    }
    # Without a majority nobody is the odd one out.
    assert find_differences(hosts(alike, {**alike, "jax": "0.9"})) == {
        "0": ["jax 0.10.2"],
        "1": ["jax 0.9"],
    }
    # A host with a problem has no facts to compare, and a single host differs from nobody.
    assert find_differences(hosts(alike, "held", alike)) == {}
    assert find_differences(hosts(alike)) == {} and find_differences([]) == {}


def test_reports_are_sorted_and_other_lines_skipped() -> None:
    reports = hosts({}, {}, {})
    reports[2].worker = "10"
    lines = [f"worker {each.worker}: {json.dumps(asdict(each))}" for each in reversed(reports)]
    text = "\n".join(["Welcome!", "worker x: hello", 'worker y: {"a": 1}', *lines])
    assert [report.worker for report in parse_reports(text)] == ["0", "1", "10"]


def test_hosts_with_the_same_problem_share_it() -> None:
    with pytest.raises(ConfigError) as caught:
        tpu.raise_problems(TpuPod("tulu"), hosts("held", {}, "held", "broken"), "do this")
    assert str(caught.value) == "pod tulu: workers 0, 2: held; worker 3: broken; do this"
    tpu.raise_problems(TpuPod("tulu"), hosts({}, {}))


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        ("weft==0.1.0", "weft[jax]==0.1.0"),
        ("weft", "weft[jax]"),
        ("weft >=0.1,<2", "weft[jax]>=0.1,<2"),
        (
            "git+https://example.org/weft.git@main",
            "weft[jax] @ git+https://example.org/weft.git@main",
        ),
    ],
)
def test_requirements(source: str, requirement: str) -> None:
    assert build_requirement(source, "jax") == requirement


@pytest.mark.parametrize("source", ["wefty", "torch==1", "weft==1; rm -rf /", "weft[x]", ""])
def test_other_requirements_are_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="--source"):
        build_requirement(source, "jax")


def test_an_address_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="contains a password") as caught:
        build_requirement("git+https://me:topsecret1@example.org/weft.git", "jax")
    assert "topsecret1" not in str(caught.value)


def test_the_archive_has_what_pip_needs(tmp_path: Path) -> None:
    sources = find_sources()
    assert sources is not None
    tpu.write_archive(sources, tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as file:
        names = set(file.getnames())
    assert {"pyproject.toml", "README.md", "LICENSE", "src/weft/launch/tpu_host.py"} <= names
    assert not any("__pycache__" in name or name.startswith("tests") for name in names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing follows --"),
        (["weft"], "nothing follows --"),
        (["ls"], "ls follows --; it must be a weft command that trains"),
        (["python", "x.py"], "python follows --"),
        (["quickstart", "sft", "logger.wandb.api_key=topsecret1"], "api_key=***"),
        (["quickstart", "sft", "x=from-the-environment"], "a secret"),
        (["quickstart", "a\0b"], "null character"),
    ],
)
def test_commands_that_cannot_be_started(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    with pytest.raises(ConfigError) as caught:
        tpu.start(TpuPod("tulu", print_only=True), PodRun(words))
    assert message in str(caught.value)
    assert "topsecret1" not in str(caught.value) and "environment;" not in str(caught.value)


def test_a_reference_to_a_secret_is_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quickstart", "sft", "logger.wandb.api_key=${oc.env:WANDB_API_KEY}"]
    assert tpu.start(TpuPod("tulu", print_only=True), PodRun(words, log_name="a.log")) == ""
    assert "oc.env:WANDB_API_KEY" in capsys.readouterr().out
