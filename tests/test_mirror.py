"""`tests/` has the folders of `src/weft/`, and a test file is named after what it tests."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
SRC = TESTS.parent / "src" / "weft"

# About no folder of weft: pages, benchmarks, real runs, and runs on a device that a CPU stands in
# for.
OWN_FOLDERS = {"benchmarks", "cuda", "docs", "e2e"}
OF_THE_WHOLE_TREE = {
    "test_budgets.py",
    "test_environment.py",
    "test_layers.py",
    "test_mirror.py",
    "test_overlap.py",
    "test_processors.py",
    "test_public_names.py",
}


def strangers(tests: Path, src: Path) -> list[str]:
    """Test files without a subject: in `tests/a/` a file `test_NAME.py` or `test_NAME_more.py`
    tests the module or package NAME of `src/weft/a/`, or of a package below it, or the package `a`
    itself.
    """
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        folder = path.parent.relative_to(tests)
        if (folder.parts[:1] and folder.parts[0] in OWN_FOLDERS) or str(
            path.relative_to(tests)
        ) in OF_THE_WHOLE_TREE:
            continue
        home, said = src / folder, path.stem.removeprefix("test_")
        names = {
            p.stem.lstrip("_")
            for p in home.rglob("*")
            if p.suffix in (".py", ".cpp", "") and p.stem != "__init__"
        }
        names |= {folder.name} - {""}
        if not home.is_dir() or not any(
            said == name or said.startswith(f"{name}_") for name in names
        ):
            found.append(str(path.relative_to(tests)))
    return found


def test_every_test_file_has_its_subject() -> None:
    assert strangers(TESTS, SRC) == []


def test_a_stranger_is_found(tmp_path: Path) -> None:
    for path in (
        "src/a/thing.py",
        "tests/a/test_thing_more.py",
        "tests/a/test_other.py",
        "tests/b/test_thing.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert strangers(tmp_path / "tests", tmp_path / "src") == ["a/test_other.py", "b/test_thing.py"]
