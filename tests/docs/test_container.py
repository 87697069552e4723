"""The container recipes: what they copy is there, and both install the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKER = (ROOT / "container" / "Dockerfile").read_text()
APPTAINER = (ROOT / "container" / "weft.def").read_text()


def test_what_is_copied_is_there() -> None:
    copied = [
        word for line in re.findall(r"^COPY (.*) \S+$", DOCKER, re.M) for word in line.split()
    ]
    files = APPTAINER.split("%files\n")[1].split("\n\n")[0]
    listed = [line.split()[0] for line in files.splitlines()]
    assert sorted(copied) == sorted(listed) and all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "src"} == set(copied)


def test_both_install_the_same() -> None:
    def installs(text: str) -> list[list[str]]:
        return [
            sorted(re.findall(pattern, text))
            for pattern in (r"pip install (.*)", r"apt-get install ([^\n\\]*[a-z])")
        ]

    assert installs(DOCKER) == installs(APPTAINER)
    extras = re.findall(r"'\.\[(.*)\]'", DOCKER)[0].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])
    bases = re.findall(r"^F(?:ROM |rom: )(.*)$", DOCKER + APPTAINER, re.M)
    assert len(bases) == 2 and len(set(bases)) == 1
    version = tuple(map(int, re.findall(r"python:(\d+)\.(\d+)", bases[0])[0]))
    assert version >= tuple(map(int, re.findall(r"\d+", project["requires-python"])))
