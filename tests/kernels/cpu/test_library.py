"""Compiled once and kept where nobody else writes; and torch does the work where it cannot be."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from tests.bounds import assert_within, kernel_product_bound
from tests.processes import fork_server
from weft.errors import ConfigError
from weft.kernels import product
from weft.kernels.cpu import library
from weft.kernels.cpu import library as native

SOURCES = native.FOLDER


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and a library that was not asked for yet: of one source, since the
    others take long.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WEFT_NATIVE", raising=False)
    monkeypatch.setattr(native, "load_library", native.load_library.__wrapped__)
    monkeypatch.setattr(native, "FOLDER", few_sources(tmp_path))
    yield tmp_path / "weft" / "kernels"


def few_sources(folder: Path) -> Path:
    sources = folder / "sources"
    sources.mkdir()
    for name in ("sizes.cpp", "forward.h", "kernels.h"):
        shutil.copy(SOURCES / name, sources)
    return sources


def in_a_process(umask: int = 0o022) -> BaseProcess:
    """A started process that compiles and loads the library of the same sources."""
    process = fork_server().Process(
        target=load_library, args=(native.FOLDER, os.environ["XDG_CACHE_HOME"], umask)
    )
    process.start()
    return process


def load_library(sources: Path, cache: str, umask: int) -> None:
    os.umask(umask)
    os.environ["XDG_CACHE_HOME"] = cache
    native.FOLDER = sources
    assert native.load_library() is not None


def ended(process: BaseProcess) -> int | None:
    process.join(120)
    return process.exitcode


def test_a_second_process_finds_what_the_first_compiled(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.load_library() is not None
    (kept,) = fresh.iterdir()
    assert kept.suffix == ".so" and fresh.stat().st_mode & 0o777 == 0o700
    commands: list[list[str]] = []
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **more: commands.append(command) or run(command, **more)
    )
    assert native.load_library() is not None
    assert [command[1:] for command in commands] == [["-v"]]


def test_a_folder_that_others_may_write_to_is_not_trusted(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert native.load_library() is not None
    assert not list(fresh.iterdir())


def test_a_home_that_cannot_be_written_to_costs_the_cache_alone(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.load_library() is not None


@pytest.mark.parametrize("compiler", ["nowhere-to-be-found", "false"])
def test_without_a_compiler_one_warning_says_what_to_do(
    fresh: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_list_compilers", lambda: [[compiler]])
    with pytest.warns(RuntimeWarning, match=r"not compiled .* Install g\+\+, or set WEFT_NATIVE=0"):
        assert native.load_library() is None
    assert not fresh.exists() or not list(fresh.iterdir())


def test_the_kernels_can_be_left_out(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load_library() is None
    x, weight = torch.randn(5, 7), torch.randn(3, 7)
    exact = x.double() @ weight.double().T
    assert_within(product(x, weight), exact, kernel_product_bound(x, weight.T))


@pytest.mark.parametrize(
    "asked", [name for name in native.VARIANTS if not native.list_missing_instructions(name)]
)
def test_a_variant_is_compiled_for_its_instructions_alone(
    asked: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lies in a file of its own; the compiler is told no other instruction set."""
    commands: list[list[str]] = []
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **more: commands.append(command) or run(command, **more)
    )
    for value in ("native", asked.upper()):
        monkeypatch.setenv("WEFT_NATIVE", value)
        assert native.load_library() is not None
    assert len(list(fresh.iterdir())) == 2
    told = [
        [word for word in command if word.startswith("-m")]
        for command in commands
        if "-c" in command
    ]
    assert told[0] == ["-march=native"] and told[-1][0] == "-march=x86-64"
    assert [f"-m{name}" in told[-1] for name in ("avx2", "avx512f", "amx-bf16")] == [
        asked != "sse2",
        asked in ("avx512", "amx"),
        asked == "amx",
    ]


def test_an_unknown_variant_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NATIVE", "avx3")
    with pytest.raises(
        ConfigError, match=r"WEFT_NATIVE=avx3 names no variant .*sse2, avx2, avx512, amx, or 0"
    ):
        native.load_library()


def test_a_variant_that_the_processor_lacks_is_refused(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        native,
        "_read_processor",
        lambda: ["flags\t\t: sse2 avx2 fma f16c bmi1 bmi2", "model name : a"],
    )
    monkeypatch.setenv("WEFT_NATIVE", "avx512")
    with pytest.raises(
        ConfigError, match=r"WEFT_NATIVE=avx512 needs avx512f, avx512bw.* does not have"
    ):
        native.load_library()
    assert native.list_missing_instructions("avx2") == []


def test_processes_that_compile_at_once_all_get_the_kernels(fresh: Path) -> None:
    others = [in_a_process() for _ in range(3)]
    assert [ended(other) for other in others] == [0, 0, 0]
    assert len(list(fresh.iterdir())) == 1


def test_an_empty_file_is_compiled_again(fresh: Path) -> None:
    assert ended(in_a_process()) == 0
    (kept,) = fresh.iterdir()
    kept.write_bytes(b"")
    assert native.load_library() is not None and kept.stat().st_size > 10_000


def test_others_may_write_to_nothing_whatever_the_umask(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(in_a_process(umask=0)) == 0
    (kept,) = fresh.iterdir()
    assert {path.stat().st_mode & 0o777 for path in (fresh, kept)} == {0o700}


@pytest.mark.parametrize("command", ["env g++", "nowhere-to-be-found", "false"])
def test_the_users_own_compiler_comes_first_and_need_not_serve(
    fresh: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)
    assert native._list_compilers() == [command.split(), ["g++"]]
    assert native.load_library() is not None


@pytest.mark.slow
def test_all_sources_make_one_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FOLDER", SOURCES)
    kernels = native.load_library()
    assert (
        kernels is not None and hasattr(kernels, "weft_matmul") and hasattr(kernels, "weft_forward")
    )


@pytest.mark.parametrize("structure", library.STRUCTS, ids=lambda structure: structure.__name__)
def test_a_structure_of_another_size_than_in_cpp_is_refused(
    structure: type[ctypes.Structure], fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = type(
        structure.__name__,
        (ctypes.Structure,),
        {"_fields_": (*structure._fields_, ("more", ctypes.c_long))},
    )
    shared = tuple(longer if each is structure else each for each in library.STRUCTS)
    monkeypatch.setattr(native, "STRUCTS", shared)
    with pytest.raises(
        AssertionError, match=rf"sizes differ between C\+\+ and library.py: {structure.__name__}$"
    ):
        native.load_library()


def test_every_structure_is_compared() -> None:
    made = {
        each
        for each in vars(library).values()
        if isinstance(each, type) and issubclass(each, ctypes.Structure)
    }
    assert made == set(library.STRUCTS)
