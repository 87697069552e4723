"""Every page under docs/ and the README: its files are written, its commands are run, as a reader
would.

A block opened by ```` ```python file=NAME ```` (or json, jsonl, jinja) is written to NAME in an
empty folder; a block opened by ```` ```bash run ```` is run line by line. The commands of a block
opened by ```` ```bash parsed ```` need a network or a GPU: their options are checked. `MODEL` on a
page is a model directory; here it is a tiny random one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, variance

import pytest

from tests.processes import run_weft
from tests.tiny import make_llama, pair_rows, prompt_answer_rows, prompt_rows, write_jsonl
from weft.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent
MARKDOWN = [
    path
    for path in sorted(ROOT.glob("**/*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
TUTORIALS = ROOT / "docs" / "tutorials"  # test_tutorials.py runs these
BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@dataclass
class Page:
    files: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    parsed: list[str] = field(default_factory=list)


def read_page(path: Path) -> Page:
    page = Page()
    for block in BLOCK.finditer(path.read_text()):
        info = block["info"].split()
        names = [word.removeprefix("file=") for word in info if word.startswith("file=")]
        if names:
            page.files[names[0]] = page.files.get(names[0], "") + block["body"]
        elif info[:2] in (["bash", "run"], ["bash", "parsed"]):
            joined = block["body"].replace("\\\n", " ")
            lines = [line for line in joined.splitlines() if line.strip()]
            (page.commands if info[1] == "run" else page.parsed).extend(lines)
    return page


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "tiny")


def test_commands_can_be_copied_without_a_prompt() -> None:
    pages = [
        *PAGES,
        *(
            page
            for each in ("benchmarks", "examples", "recipes", "container", ".")
            for page in ROOT.glob(f"{each}/*.md")
        ),
    ]
    for page in pages:
        for block in BLOCK.finditer(page.read_text()):
            assert not re.search(r"^ *\$ ", block["body"], re.M), f"{page}: {block['body']}"


def prepare(folder: Path, page: Page, model: Path) -> None:
    write_jsonl(folder / "data" / "sft.jsonl", prompt_answer_rows())
    write_jsonl(folder / "data" / "pairs.jsonl", pair_rows())
    write_jsonl(folder / "data" / "prompts.jsonl", prompt_rows())
    (folder / "MODEL").symlink_to(model)
    for name, body in page.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body)


def run_commands(folder: Path, commands: list[str], *, forked: bool = True) -> None:
    """Run each command; those of weft in forked processes, or with `forked` off as the program that
    users start.
    """
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    for command in commands:
        program, *words = shlex.split(command)
        if program == "weft" and forked:
            done = run_weft(words, folder, env)
        else:
            done = subprocess.run(
                [program, *words],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


# Runs of the README that start as programs elsewhere: in `launch/test_facts_memory.py`
ALSO_STARTED = ("dpo", "ppo", "grpo")
README, HOME = ROOT / "README.md", ROOT / "docs" / "index.md"


@pytest.mark.default_cases(
    "datasets.md",
    "judge-reward.md",
    "new-reward.md",
    "reallocation.md",
    "tpu.md",
    "new-quickstart.md",
)
@pytest.mark.parametrize(
    "path",
    [
        p
        for p in PAGES
        if p not in (README, HOME) and p.parent != TUTORIALS and read_page(p).commands
    ],
    ids=lambda p: p.name,
)
def test_the_commands_of_a_page_work(path: Path, tmp_path: Path, model: Path) -> None:
    page = read_page(path)
    prepare(tmp_path, page, model)
    run_commands(tmp_path, page.commands)


@pytest.mark.slow
def test_the_readme_works_in_an_empty_folder(tmp_path: Path) -> None:
    page = read_page(README)
    for name, body in page.files.items():
        (tmp_path / name).write_text(body)
    for command in page.commands:
        forked = command.split()[:3] in [["weft", "quickstart", name] for name in ALSO_STARTED]
        run_commands(tmp_path, [command], forked=forked)
    runs = {path.parent.name for path in tmp_path.glob("runs/first/*/report.html")}
    assert runs == {"sft", "rw", "dpo", "ppo", "grpo", "python"}
    for trial, metric, least in (("grpo", "reward/reward", 0.15), ("ppo", "rew_inf/reward", 0.0)):
        lines = (tmp_path / "runs" / "first" / trial / "metrics.jsonl").read_text().splitlines()
        values = [json.loads(line)[metric] for line in lines]
        rise = mean(values[-6:]) - mean(values[:6])
        # The scale of the reward model's scores is its own, and roundings change what so short a
        # training makes of it, by a factor of 4. Its rise is far above the noise of both means.
        noise = math.sqrt((variance(values[-6:]) + variance(values[:6])) / 6)
        assert rise > max(least, 3 * noise), "the first results that a reader sees rise"


@pytest.mark.slow
def test_the_home_page_works_in_an_empty_folder(tmp_path: Path) -> None:
    run_commands(tmp_path, read_page(HOME).commands)
    assert (tmp_path / "runs" / "first" / "sft" / "report.html").exists()


@pytest.mark.parametrize("path", [p for p in PAGES if read_page(p).parsed], ids=lambda p: p.name)
def test_the_options_of_a_page_are_options(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in read_page(path).parsed:
        words = shlex.split(command)
        assert words[:2] == ["weft", "quickstart"]
        assert main([*words[1:], "--cfg", "job"]) == 0, command


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    missing = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]
    assert missing == []


def test_a_failing_command_is_seen(tmp_path: Path, model: Path) -> None:
    with pytest.raises(AssertionError, match="unknown"):
        run_commands(tmp_path, ["weft quickstart sftt experiment_name=e trial_name=t"])
