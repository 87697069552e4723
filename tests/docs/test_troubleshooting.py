"""docs/troubleshooting.md, the concepts, the metrics and the tutorials name options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_pages import ROOT, TUTORIALS
from weft import registry
from weft.experiments.common import RunConfig
from weft.options import iterate_options

PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("troubleshooting", "concepts", "metrics")),
    *sorted(TUTORIALS.glob("*.md")),
]
NAME = re.compile(r"`(?P<name>[A-Za-z_]+(?:\.[a-z_]+)*)(?P<set>=)?[^`\n]*`")
ANY = ("ROLE", "CALL", "ALGORITHM")  # stand for one name each
PARTS = ("gen", "optimizer", "lora")  # of options that are named without what stands before


def known_options() -> set[str]:
    names: set[str] = set()
    for quickstart in registry.quickstarts.load_all():
        config = registry.quickstarts.get(quickstart)
        if config.__module__.startswith("weft."):
            made = config()
            assert isinstance(made, RunConfig)
            names |= {leaf.name for leaf in iterate_options(made)}
    return names


def unknown(text: str, known: set[str]) -> list[str]:
    """Names in code that look like options and are none: `a.b` below a known group, and whatever is
    set by `name=`.
    """
    ends = {
        name.split(".", at)[-1] for name in known for at in range(1, name.count(".") + 1)
    } | known
    groups = {name.partition(".")[0] for name in known if "." in name}
    wrong = []
    for match in NAME.finditer(text):
        name, (head, _, rest) = match["name"], match["name"].partition(".")
        if name.startswith("dataset.args.") or name.rpartition(".")[2] in (
            "jsonl",
            "json",
            "html",
            "yaml",
            "txt",
        ):
            continue
        if head in ANY:
            wrong += [] if rest in ends else [name]
        elif match["set"] or (rest and (head in groups or head in PARTS)):
            wrong += [] if name in ends or name.isupper() else [name]
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_options_exist(path: Path) -> None:
    assert unknown(path.read_text(), known_options()) == []


def test_a_wrong_name_is_seen() -> None:
    text = "`ppo.kl_ctrl`, `ROLE.lor.r=4`, `early_stop_kl=1`, `speed=1`, `gen.stop`, `runs.md`, `ppo.kl_ctl`"
    assert unknown(text, known_options()) == ["ppo.kl_ctrl", "ROLE.lor.r", "speed"]
