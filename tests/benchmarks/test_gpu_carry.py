"""What is carried to a bare GPU machine, against what weft imports; the commands to run there."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu_carry, gpu_plan, gpu_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "pyyaml": "yaml",
    "hydra-core": "hydra",
    "math-verify": "math_verify",
    "huggingface-hub": "huggingface_hub",
}


def declared() -> tuple[set[str], set[str]]:
    """Packages that weft requires, and those of its extras, by the names under which they are
    imported.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        words
        for name, words in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
    ]

    def imported(lines: list[str]) -> set[str]:
        names = [Requirement(line).name for line in lines]
        return {NAMES.get(name, name).replace("-", "_") for name in names}

    return imported(project["dependencies"]), imported([line for lines in extras for line in lines])


def imports(folder: Path, *, at_start: bool) -> set[str]:
    """Packages that the modules of a folder import, as statements at their tops, or anywhere."""
    indent = "" if at_start else " *"
    statement = re.compile(rf"^{indent}(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)
    found = {
        a or b for path in folder.rglob("*.py") for a, b in statement.findall(path.read_text())
    }
    return found - set(sys.stdlib_module_names) - {"weft", "tests", "benchmarks", "__future__"}


def test_whatever_weft_imports_is_carried_or_there() -> None:
    known = {*gpu_carry.CARRIED, *gpu_carry.BUILT, *gpu_carry.THERE}
    required, extras = declared()
    assert required <= known, (
        f"a bare machine lacks {required - known}: add them to benchmarks/gpu_carry.py"
    )
    anywhere = imports(ROOT / "src" / "weft", at_start=False)
    assert {"hydra", "array_api_compat", "math_verify"} <= anywhere, (
        "what is carried is what is imported"
    )
    beyond = imports(ROOT / "src" / "weft", at_start=True) - known
    lazily = {"ray", "grpc", "google"}  # modules that nothing imports unless it is asked for
    assert beyond <= lazily | extras, (
        f"imported by weft at the start of a module, and neither carried nor there: {beyond}"
    )


def test_carried_versions_are_those_that_weft_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    asked = {Requirement(line).name: Requirement(line).specifier for line in lines}
    for line in (*gpu_carry.CARRIED.values(), *gpu_carry.BUILT.values()):
        carried = Requirement(line)
        if carried.name in asked:
            assert carried.specifier == asked[carried.name], carried.name


@pytest.mark.parametrize("line", [*gpu_carry.CARRIED.values(), *gpu_carry.BUILT.values()])
def test_carried_packages_need_nothing_that_is_absent(line: str) -> None:
    """pip takes each alone, so what it requires must be carried or there, in a version that it
    accepts.
    """
    carried = {
        Requirement(each).name: Requirement(each)
        for each in (*gpu_carry.CARRIED.values(), *gpu_carry.BUILT.values())
    }
    there = {name.replace("_", "-").lower() for name in gpu_carry.THERE} | {"pyyaml"}
    for need in map(Requirement, importlib.metadata.requires(Requirement(line).name) or ()):
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        name = need.name.replace("_", "-").lower()
        assert name in there or name in carried, f"{line} requires {need}"
        exact = (
            [each.version for each in carried[name].specifier if each.operator == "=="]
            if name in carried
            else []
        )
        assert all(need.specifier.contains(version) for version in exact), f"{line} requires {need}"


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_command_is_complete_and_short(which: str) -> None:
    made = gpu_carry.command(which, commit="0" * 40, options="--device cpu --tiny")
    assert len(made) < gpu_carry.MOST_COMMAND == 2000
    assert (
        "--no-index" in made
        and "build/gpu-carry/*.whl" in made
        and "$PWD/src" in made
        and "PYTHONPATH" in made
    )
    assert f"--minutes {gpu_carry.MINUTES[which]}" in made and ("--second" in made) is (
        which == "second"
    )
    assert "shared" not in made and str(ROOT) not in made
    checked = subprocess.run(
        ["bash", "-n"], input=made, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    seconds = 60 * gpu_carry.MINUTES[which]
    assert f"timeout -k 5 {seconds + 20} " in made and seconds + 25 < 600, (
        "a command may take ten minutes"
    )


def test_the_commands_are_printed_with_what_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_carry.main(["--print"]) == 0
    said = capsys.readouterr().out
    assert said.count("python3 benchmarks/gpu.py --minutes") == 2
    assert all(
        f"{name} {gpu_plan.EVERY[name].limit} s" in said
        for name in (*gpu_plan.FIRST, *gpu_plan.SECOND)
    )


def test_git_ignores_what_is_carried_and_what_is_kept() -> None:
    for path in (
        "build/gpu-carry/a.whl",
        "build/gpu-run/gpu.json",
        "build/gpu-site/a.py",
        "build/gpu-out/gpu.md",
    ):
        done = subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False)
        assert done.returncode == 0, path


def test_pip_is_asked_for_wheels_of_the_machine_s_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network: a stand-in for pip writes files of the names that it is asked for."""
    asked: list[list[str]] = []

    def call(words: list[str]) -> bool:
        asked.append(words)
        folder = Path(words[words.index("--dest" if "download" in words else "--wheel-dir") + 1])
        for word in words[words.index(str(folder)) + 1 :]:
            (folder / f"{Requirement(word).name}-1-py3-none-any.whl").write_text("")
        return True

    monkeypatch.setattr(gpu_carry, "_call", call)
    folder = tmp_path / "carry"
    assert gpu_carry.fill(folder) == 0 and len(list(folder.glob("*.whl"))) == 9
    download, wheel = asked
    assert (
        download[download.index("--python-version") + 1] == "3.12"
        and "--only-binary=:all:" in download
    )
    assert wheel[-1] == "antlr4-python3-runtime==4.9.3" and "wheel" in wheel
    assert sum(path.stat().st_size for path in (folder / "tokenizer").iterdir()) < 2**20
    monkeypatch.setattr(gpu_carry, "_call", lambda _: False)
    assert gpu_carry.fill(folder) == 1


def test_the_tokenizer_gives_every_text_back(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = gpu_tokenizer.write(tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(folder / gpu_tokenizer.FILE))
    text = "What is 2 plus 2?\n\tÄ, 漢, \x00 and 🙂."
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) == len(text.encode())
    assert tokenizer.get_vocab_size() == gpu_tokenizer.VOCABULARY == 259
    settings = json.loads((folder / gpu_tokenizer.SETTINGS).read_text())
    special = [tokenizer.token_to_id(settings[f"{name}_token"]) for name in ("pad", "bos", "eos")]
    assert special == [gpu_tokenizer.PAD, gpu_tokenizer.BEGIN, gpu_tokenizer.END]
