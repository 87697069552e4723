"""Named sections: where they are looked for, what a file holds, and what is said of files that
cannot be read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.sections import SectionLibrary, read_file
from weft.errors import ConfigError

RECIPE = "grpo-gsm8k-qwen3-8b"  # a section that is shipped


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_sections_are_searched_in_configs_then_other_folders_then_built_in(here: Path) -> None:
    write(here / "configs" / "deep" / "a.yml", "mine: {seed: 1}\n")
    write(here / "more" / "b.yaml", "mine: {seed: 2}\nother: {seed: 3}\n")
    write(here / "more" / "c.yaml", f"{RECIPE}: {{seed: 4}}\n")
    library = SectionLibrary.from_folders(["more"])
    assert [library.get(name).values["seed"] for name in ("mine", "other", RECIPE)] == [1, 3, 4]
    assert library.get("mine").find_location("seed") == "configs/deep/a.yml:1"
    assert SectionLibrary.from_folders().get(RECIPE).shipped
    with pytest.raises(ConfigError, match="--config-dir absent: there is no such folder"):
        SectionLibrary.from_folders(["absent"])


def test_an_unknown_section_names_the_nearest_with_its_place(here: Path) -> None:
    write(here / "configs" / "a.yaml", "\npythia-mine: {seed: 1}\n")
    with pytest.raises(
        ConfigError,
        match=r"unknown section 'pythia-mien'; did you mean pythia-mine \(configs/a.yaml:2\)",
    ):
        SectionLibrary.from_folders().get("pythia-mien")
    with pytest.raises(
        ConfigError,
        match=r"needs names of sections; a file of options is read with --config configs/a.yaml",
    ):
        SectionLibrary.from_folders().get("configs/a.yaml")


def test_one_name_in_two_forms_is_an_error_and_the_same_twice_is_none(here: Path) -> None:
    write(here / "configs" / "a.yaml", "tag: {seed: 1}\nsame: {seed: 5}\n")
    write(here / "configs" / "b.yaml", "tag: {seed: 2}\nsame: {seed: 5}\n")
    library = SectionLibrary.from_folders()
    assert library.get("same").values["seed"] == 5
    with pytest.raises(
        ConfigError,
        match=r"'tag' is in configs/a.yaml:1 and, with other values, in configs/b.yaml:1",
    ):
        library.get("tag")


@pytest.mark.parametrize("text", ["1e-5", "6e-6", "1E-5", "-2e3", "1.5e-5", "1e+2"])
def test_a_number_without_a_dot_is_a_number(text: str, tmp_path: Path) -> None:
    (section,) = read_file(write(tmp_path / "a.yaml", f"a:\n  learning_rate: {text}\n")).sections
    assert section.values["learning_rate"] == float(text)


def test_other_texts_stay_texts(tmp_path: Path) -> None:
    (section,) = read_file(
        write(tmp_path / "a.yaml", "a: {x: 1e, y: e-5, z: 12b, w: 0xa1221f97}\n")
    ).sections
    assert section.values == {"x": "1e", "y": "e-5", "z": "12b", "w": 0xA1221F97}


@pytest.mark.parametrize("indent", ["      ", "    ", "        "])
def test_a_dataset_without_its_colon_is_reported_as_that(indent: str, tmp_path: Path) -> None:
    text = f"mix:\n  datasets:\n    - alpaca\n    - webgpt\n  {indent}fraction: 0.05\n    - adversarial_qa\n"
    with pytest.raises(
        ConfigError,
        match=r"a.yaml:5: 'fraction' is below '- webgpt' \(line 4\), which has no colon; "
        r"write '- webgpt:'",
    ):
        read_file(write(tmp_path / "a.yaml", text))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a: {b: [1, 2\n", r"a.yaml:2: is not YAML"),
        ("a:\n  seed: 1\n  seed: 2\n", r"a.yaml:3: .*'seed' is repeated here, first on line 2"),
        ("- a\n- b\n", r"a.yaml:1: contains list; write sections as NAME:"),
        ("a: !!python/object:os.system {}\n", r"a.yaml:1: is not YAML"),
        ("a: &x {b: *y}\n", r"a.yaml:1: is not YAML"),
    ],
)
def test_messages_for_invalid_files_have_the_line(text: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=wrong):
        read_file(write(tmp_path / "a.yaml", text))


def test_options_at_the_top_are_one_section(tmp_path: Path) -> None:
    (section,) = read_file(
        write(tmp_path / "run.yaml", "learning_rate: 1e-5\nmodel:\n  path: m\n")
    ).sections
    assert section.name == "run" and section.find_location("model", "path").endswith("run.yaml:3")


def test_a_value_outside_of_any_section_is_reported_with_its_line(here: Path) -> None:
    write(here / "configs" / "a.yaml", "mine: {seed: 1}\nlearning_rate: 1e-5\n")
    with pytest.raises(
        ConfigError, match=r"configs/a.yaml:2: 'learning_rate' is outside of any section"
    ):
        SectionLibrary.from_folders().get("mine")


def test_anchors_and_merged_keys(tmp_path: Path) -> None:
    text = "base: &base\n  seed: 1\n  dtype: fp32\nmine:\n  <<: *base\n  seed: 2\n"
    _, mine = read_file(write(tmp_path / "a.yaml", text)).sections
    assert dict(mine.values) == {"seed": 2, "dtype": "fp32"} and mine.find_location(
        "seed"
    ).endswith("a.yaml:6")


def test_an_empty_file_and_an_empty_section(tmp_path: Path) -> None:
    assert read_file(write(tmp_path / "a.yaml", "# nothing\n")).sections == ()
    (section,) = read_file(write(tmp_path / "b.yaml", "mine:\n")).sections
    assert section.name == "mine" and section.values == {}
