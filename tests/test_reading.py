"""Files that a user names: what is wrong with one is a message that names it, whatever a library
raised.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import reading
from weft.errors import ConfigError, UserError

NINES = "9" * 5000


class PanicException(BaseException):
    """As libraries written in Rust raise."""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (OSError(2, "No such file or directory"), "no such file or directory"),
        (RecursionError("maximum depth"), "is nested too deeply"),
        (MemoryError(), "more memory than is available"),
        (KeyError("model"), "lacks 'model'"),
        (EOFError("ended"), "damaged or cut short"),
        (Exception("from Rust"), "from Rust"),
        (PanicException("index out of range"), "index out of range"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
)
def test_what_a_library_raises_is_a_message_of_the_file(raised: BaseException, said: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"^a.json: .*{said}.*; mend it$") as caught,
        reading.explain_read_errors("a.json", ConfigError, "mend it"),
    ):
        raise raised
    assert caught.value.__cause__ is raised


def test_errors_of_weft_and_orders_to_stop_pass() -> None:
    for passes in (UserError("own"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(passes)), reading.explain_read_errors("a.json", ConfigError):
            raise passes


def test_a_long_message_is_cut() -> None:
    assert len(reading.describe_cause(ValueError("x " * 10_000))) < 400
    assert reading.shorten("a" * 500).startswith("aaa") and len(reading.shorten("a" * 500)) < 130


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "nothing", "long", "large"])
def test_what_is_no_file_of_a_size_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300 if kind == "long" else "file")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "large":
        path.write_text("four")
    with pytest.raises(ConfigError, match=r"^--config FILE: "):
        reading.read_text(path, "--config FILE", ConfigError, most=3)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        f'{{"a": {NINES}}}'.encode(),
        b'{"a": 1} x',
        b"[1]",
        b"\0",
    ],
)
def test_what_is_no_json_object_is_refused_with_its_name(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(UserError, match=r"^a\.json: "):
        reading.read_object(tmp_path / "a.json", "a.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "c.yaml:1: is not YAML"),
        ("a: '\x01'", "c.yaml: .*special characters are not allowed"),
        ("a: 1\nb: 2\na: 3\n", "c.yaml:3: .*'a' is repeated here, first on line 1"),
        ("a: 2020-99-99", "c.yaml:1: .*month must be"),
        (f"a: {NINES}", "c.yaml:1: .*4,300 digits"),
        ("a: &x [*x]", "c.yaml:1: contains itself"),
        ("a: " + "[" * 2000 + "]" * 2000, "c.yaml.* nested "),
        ("a: !!python/object/apply:os.system [x]", "c.yaml:1: is not YAML"),
        ("? [a]\n: 1", "c.yaml:1: is not YAML"),
    ],
)
def test_yaml_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        reading.read_yaml(tmp_path / "c.yaml", "c.yaml", ConfigError)


def test_a_few_lines_do_not_unfold_to_millions(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        reading.parse_yaml("\n".join(rows), "c.yaml", ConfigError)


def test_a_number_without_a_dot_is_one() -> None:
    assert reading.parse_yaml("lr: 1e-5", "c.yaml")[0] == {"lr": 1e-5}
    assert reading.parse_yaml("log_dir: 1e-5-warm", "c.yaml")[0] == {"log_dir": "1e-5-warm"}
    assert reading.parse_yaml("", "c.yaml") == (None, None)


@given(st.text(alphabet="ab:-[]{}&*!|>?%@`,#'\"0.1 \n\t", max_size=40))
def test_any_text_is_yaml_or_refused_by_name(text: str) -> None:
    try:
        reading.parse_yaml(text, "c.yaml", ConfigError)
    except ConfigError as error:
        assert str(error).startswith("c.yaml")


def test_a_folder_of_very_many_files_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    for name in ("x", "a/y"):
        (tmp_path / name).touch()
    assert sorted(reading.iterate_files(tmp_path, "path")) == [tmp_path / "a" / "y", tmp_path / "x"]
    monkeypatch.setattr(reading, "MAX_ENTRIES", 2)
    with pytest.raises(UserError, match=r"^path: more than 2 files"):
        list(reading.iterate_files(tmp_path, "path"))


def test_which_errors_of_the_system_speak_of_a_place(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        (tmp_path / ("x" * 300)).stat()
    assert "file name too long" in str(reading.find_path_problem(caught.value))
    assert reading.find_path_problem(OSError(28, "No space left on device", "x")) is None
    assert reading.find_path_problem(OSError(36, "File name too long")) is None


def test_the_home_of_nobody() -> None:
    with pytest.raises(RuntimeError) as caught:
        Path("~nobody-of-this-name/x").expanduser()
    assert "no home directory here" in str(reading.find_path_problem(caught.value))
    assert reading.find_path_problem(RuntimeError("a bug")) is None


def test_a_pipe_or_a_device_in_a_folder_that_a_library_opens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    reading.check_folder(tmp_path, "MODEL")
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(
        UserError, match=r"MODEL: .*tokenizer\.json is a pipe or a device, not a file; remove it"
    ):
        reading.check_folder(tmp_path, "MODEL")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("gs://bucket/runs", "mount the storage, or copy the files to this machine"),
        ("S3://bucket/a.jsonl", "mount the storage"),
        (Path("https://host/model"), "mount the storage"),  # whose two slashes are one
        ("abfs+ssl://x@y/z", "mount the storage"),
        ("file:///data/model", "write /data/model"),
        ("local:///data/model", "write the path without local://"),
        (Path("LOCAL://data/model"), "write the path without local://"),
        ("hf://datasets/owner/name", "write owner/name, its name on the hub"),
        ("hf://owner/name", "write owner/name, its name on the hub"),
    ],
)
def test_a_url_is_no_path(
    path: str | Path, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = reading.find_url_problem(path)
    assert problem is not None
    assert (
        problem.startswith("is a URL, and weft reads and writes paths of this machine; ")
        and told in problem
    )
    with pytest.raises(ConfigError, match="is a URL"):
        reading.make_folder(Path(path), "--out", ConfigError)
    with pytest.raises(ConfigError, match="is a URL"):
        reading.check_file(path, "--file", ConfigError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path",
    [
        "runs",
        "./a:b",
        "/a:/b",
        "a/b:/c",
        "C:/data",
        "owner/name",
        "owner/name:folder",
        "runs/e/t@step4",
        "~/x",
    ],
)
def test_paths_and_names_of_the_hub_are_no_urls(path: str) -> None:
    assert reading.find_url_problem(path) is None


def test_a_file_of_a_model_is_read_again_only_after_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"layers": [1]}')
    reads = []
    read = reading.read_object
    monkeypatch.setattr(
        reading, "read_object", lambda path, *rest: (reads.append(path), read(path, *rest))[1]
    )
    reading.read_model_object(file, "a")["layers"].append(2)
    assert reading.read_model_object(str(file), "b") == {"layers": [1]}, "callers own the result"
    assert len(reads) == 1
    file.write_text('{"layers": [1, 2, 3]}')
    assert reading.read_model_object(file, "a") == {"layers": [1, 2, 3]}
    file.write_text("[]")
    for what in ("a", "b"):
        with pytest.raises(UserError, match=f"^{what}: contains no JSON object"):
            reading.read_model_object(file, what)
    with pytest.raises(ConfigError, match=r"^c: there is no such file"):
        reading.read_model_object(tmp_path / "none.json", "c", ConfigError)
