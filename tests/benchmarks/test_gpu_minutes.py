"""`benchmarks/gpu.py --minutes`: what it does with sections that fail, take too long or have no
time left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_plan, gpu_sections
from benchmarks.gpu_run import Run

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--device", "cpu", "--tiny"]


class Clock:
    """A clock that sections move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Stub:
    """In the place of a section's process: takes its seconds, and finds what `FOUND` says of it."""

    FOUND: dict[str, tuple[float, str | None, dict[str, Any]]] = {}  # noqa: RUF012
    running: set[str] = set()  # noqa: RUF012
    together: list[set[str]] = []  # noqa: RUF012
    pages: list[str] = []  # noqa: RUF012
    threads: dict[str, int | None] = {}  # noqa: RUF012
    clock: Clock

    def __init__(
        self,
        name: str,
        chosen: object,
        report: gpu.Report,
        folder: Path,
        limit: float,
        said: Any = None,
        threads: int | None = None,
    ) -> None:
        self.threads[name] = threads
        self.name, self.limit, self.begun, self.known = name, limit, self.clock.now, report.known()
        self.running.add(name)
        self.together.append(set(self.running))

    def finish(self, report: gpu.Report) -> None:
        seconds, failure, found = self.FOUND.get(self.name, (5.0, None, {}))
        if seconds > self.limit:
            seconds, failure = self.limit, f"did not end within {self.limit:.0f} s"
        self.clock.now = max(self.clock.now, self.begun + seconds)
        self.end()
        report.take(self.name, found, seconds, failure)
        assert report.out is not None
        self.pages.append((report.out / "gpu.md").read_text())

    def end(self) -> None:
        self.running.discard(self.name)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(Stub, "clock", made, raising=False)
    for name, empty in (
        ("FOUND", {}),
        ("running", set()),
        ("together", []),
        ("pages", []),
        ("threads", {}),
    ):
        monkeypatch.setattr(Stub, name, empty)
    monkeypatch.setattr(gpu, "Child", Stub)
    monkeypatch.setattr(gpu, "time", made)
    monkeypatch.setattr(gpu, "BEGUN", 0.0)
    monkeypatch.setattr(gpu, "KEPT", tmp_path / "kept")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return made


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return found


def test_no_failure_and_no_wrong_number_ends_the_run(clock: Clock, tmp_path: Path) -> None:
    Stub.FOUND |= {
        "agreement": (9.0, "exit code 1", {"wrong": ["log-probs: 3"]}),
        "sft": (1e9, None, {}),
    }
    assert gpu.main([*TINY, "--minutes", "8"]) == 1
    found = written(tmp_path / "out")
    assert found["ran"] == list(gpu_plan.FIRST) and set(found["why"]) == {"agreement", "sft"}
    assert clock.now <= 8 * 60 - gpu_plan.MARGIN and found["not_started"] == {}
    assert {"probe", "algorithms", "agreement"} in Stub.together and {"sft"} in Stub.together
    assert all(
        len(names) == 1 or names <= {"probe", "algorithms", "agreement"} for names in Stub.together
    )


def test_sections_at_the_same_time_share_the_processor(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    gpu.main([*TINY, "--minutes", "8"])
    assert {Stub.threads[name] for name in ("probe", "algorithms", "agreement")} == {5}
    assert Stub.threads["sft"] is None


def test_results_are_written_after_each_section_and_kept(clock: Clock, tmp_path: Path) -> None:
    row = {"what": "sft: MFU", "value": 0.4, "unit": "", "goal": ""}
    Stub.FOUND |= {
        "limits": (5.0, None, {"details": {"bytes_per_s": 7.0}}),
        "sft": (5.0, None, {"rows": [row]}),
    }
    gpu.main([*TINY, "--minutes", "8"])
    assert [page.count("- sft: not started") for page in Stub.pages] == [1, 1, 1, 1, *[0] * 5]
    assert written(tmp_path / "out") == written(tmp_path / "kept")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) <= 8 and sum(path.stat().st_size for path in files) < 16 * 2**20


def test_sections_without_time_are_listed(clock: Clock, tmp_path: Path) -> None:
    Stub.FOUND |= {name: (1e9, None, {}) for name in gpu_plan.FIRST}
    gpu.main([*TINY, "--minutes", "3"])
    found = written(tmp_path / "out")
    assert list(found["not_started"]) == ["decode", "grpo", "lora", "tests"] and clock.now <= 3 * 60
    assert "- tests: not started, no time was left" in (tmp_path / "out" / "gpu.md").read_text()


def test_the_second_command_explains_and_does_what_was_left_out(
    clock: Clock, tmp_path: Path
) -> None:
    rows = [
        {"what": f"{name}: MFU", "value": value, "unit": "", "goal": ""}
        for name, value in (("sft", 0.5), ("sft, long", 0.3))
    ]
    Stub.FOUND |= {
        "limits": (5.0, None, {"details": {"bytes_per_s": 7.0}}),
        "sft": (5.0, None, {"rows": rows}),
        "lora": (5.0, "exit code 1", {}),
    }
    gpu.main([*TINY, "--minutes", "8"])
    clock.now, Stub.FOUND["lora"] = 0.0, (5.0, None, {})
    for path in (tmp_path / "out").iterdir():
        path.unlink()  # as before every command on a lent machine
    assert gpu.main([*TINY, "--minutes", "4", "--second"]) == 0
    found = written(tmp_path / "out")
    assert found["ran"] == [*gpu_plan.SECOND, "lora"] and found["first"]["ran"] == list(
        gpu_plan.FIRST
    )
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "# The run before" in page and "| sft, long: MFU | 0.3 |" in page
    report = gpu.Report(found, None)
    assert report.known() == {"bytes_per_s": 7.0, "slowest": "sft, long"}


def test_a_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_BYTES", 2000)
    facts = {"versions": {}, "device": "", "command": "", "commit": ""}
    report = gpu.Report(facts, tmp_path)
    report.take("sft", {"details": {"long": "x" * 5000}}, 1.0, None)
    assert (tmp_path / "gpu.json").stat().st_size < 2000 and written(tmp_path)["details"] == {}


def test_a_section_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test run is a process of the section's process."""
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child.part')!r}).write_text(str(child.pid))\n"
        f"pathlib.Path({str(tmp_path / 'child.part')!r}).replace({str(tmp_path / 'child')!r})\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(program))
    chosen = argparse.Namespace(device=None, config=None, minutes=None, tiny=False, profile=False)
    report = gpu.Report({"versions": {}, "device": "", "command": "", "commit": ""}, None)
    child = gpu.Child("limits", chosen, report, tmp_path, 1e9)
    while not (tmp_path / "child").is_file():
        time.sleep(0.01)
    child.limit = 0.0
    child.finish(report)
    assert report.failed == {"limits": "did not end within 0 s"}
    state = Path("/proc", (tmp_path / "child").read_text(), "stat")
    while state.is_file() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)


def child_of(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: gpu.Report, **more: Any
) -> gpu.Child:
    """A section's process that runs this program."""
    path = tmp_path / "program.py"
    path.write_text(program)
    monkeypatch.setattr(gpu, "__file__", str(path))
    chosen = argparse.Namespace(device=None, config=None, minutes=None, tiny=False, profile=False)
    return gpu.Child("limits", chosen, report, tmp_path, 1e9, **more)


FACTS = {"versions": {}, "device": "", "command": "", "commit": ""}


def test_what_outlives_a_section_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold the pipe open that takes what the program prints."""
    program = (
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
    )
    report = gpu.Report(FACTS, None)
    child_of(program, tmp_path, monkeypatch, report).finish(report)
    assert report.failed == {}
    state = Path("/proc", (tmp_path / "child").read_text(), "stat")
    begun = time.monotonic()
    while state.is_file() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() - begun < 60
        time.sleep(0.01)


def test_a_process_that_cannot_be_ended_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that hangs can keep a process in the kernel, where no signal reaches it."""
    report = gpu.Report(FACTS, None)
    child = child_of("import time; time.sleep(600)\n", tmp_path, monkeypatch, report)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(gpu, "ENDS", 0.01)
        child.limit = 0.0
        child.finish(report)
    assert report.failed == {"limits": "did not end within 0 s"}
    child.process.kill()
    child.process.wait()


@pytest.mark.parametrize("given", [None, "3"])
def test_the_share_of_the_processor_is_the_process_s(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    report = gpu.Report(FACTS, None)
    program = f"import os, sys\nsys.exit(int(os.environ['OMP_NUM_THREADS']) != {given or 5})\n"
    child_of(program, tmp_path, monkeypatch, report, threads=5).finish(report)
    assert report.failed == {}


def test_a_section_that_raises_leaves_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Run) -> None:
        run.add("before", 1.0, "s")
        raise ValueError("no room\nand more")

    monkeypatch.setattr(gpu, "RUNS", {"limits": (fail, 60)})
    run = run_of(tmp_path)
    with pytest.raises(ValueError, match="no room"):
        gpu._section("limits", run)
    found = json.loads(run.record.read_text())
    assert found["rows"][0]["what"] == "before"
    assert found["details"]["raised"] == "ValueError: no room"
    assert any("raise ValueError" in line for line in found["details"]["traceback"])
    program = (
        "import pathlib, sys\n"
        "record = pathlib.Path(sys.argv[sys.argv.index('--record') + 1])\n"
        f"record.write_text({json.dumps(found)!r})\n"
        "sys.exit(1)\n"
    )
    report = gpu.Report(FACTS, None)
    child_of(program, tmp_path, monkeypatch, report).finish(report)
    assert report.failed == {"limits": "exit code 1, ValueError: no room"}


@pytest.mark.parametrize("words", [["--second"], ["--minutes", "0"], ["--minutes", "8", "--first"]])
def test_words_that_do_not_go_together(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        gpu.main([*TINY, *words])
    assert raised.value.code == 2 and "minutes" in capsys.readouterr().err


def run_of(tmp_path: Path, **settings: Any) -> Run:
    return Run(
        gpu.SMALL, gpu.Where(torch.device("cpu"), "float32"), tmp_path / "record.json", **settings
    )


class Pytest:
    """In place of pytest: lines that it prints, and how it was called."""

    lines: tuple[str, ...] = ()
    code = 0
    asked: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, words: list[str], **how: Any) -> None:
        self.asked.update(words=words, environment=how["env"])
        self.stdout = iter(self.lines)

    def wait(self) -> int:
        return self.code


@pytest.fixture
def fake_pytest(monkeypatch: pytest.MonkeyPatch) -> type[Pytest]:
    monkeypatch.setattr(subprocess, "Popen", Pytest)
    monkeypatch.setattr(Pytest, "asked", {})
    monkeypatch.setattr(Pytest, "code", 0)
    monkeypatch.setattr(Pytest, "lines", ("tests/a.py::test_b PASSED [50%]\n",))
    return Pytest


@pytest.mark.parametrize("quick", [True, False])
def test_tests_find_weft_where_it_is_not_installed(
    quick: bool, fake_pytest: type[Pytest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pytest.lines = (*fake_pytest.lines, "tests/a.py::test_c SKIPPED (no) [100%]\n")
    monkeypatch.setenv("PYTHONPATH", "carried")
    run = run_of(tmp_path, quick=quick)
    gpu_sections.tests(run)
    asked = fake_pytest.asked
    assert asked["environment"]["PYTHONPATH"] == f"{ROOT / 'src'}{os.pathsep}carried"
    assert ("-k" in asked["words"]) is quick, "in a short run those that need the device alone"
    values = {row["what"]: row["value"] for row in run.rows}
    assert values["tests: passed"] == values["tests: skipped"] == 1 and not run.wrong


@pytest.mark.parametrize("native", [None, "0"])
def test_tests_compile_no_kernels_for_the_cpu_where_they_are_switched_off(
    native: str | None, fake_pytest: type[Pytest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests drop the variables of the user's shell but those that are asked for."""
    from tests import environment

    if native is None:
        monkeypatch.delenv("WEFT_NATIVE", raising=False)
    else:
        monkeypatch.setenv("WEFT_NATIVE", native)
    gpu_sections.tests(run_of(tmp_path))
    made = environment.cleaned(fake_pytest.asked["environment"], tmp_path)
    assert made.get("WEFT_NATIVE") == native


def test_tests_that_are_ended_leave_their_outcomes(
    fake_pytest: type[Pytest], tmp_path: Path
) -> None:
    """The record after each line of pytest's; a test that failed is a note."""
    run, counts = run_of(tmp_path), []

    def lines() -> Iterator[str]:
        for outcome in ("PASSED", "FAILED", "PASSED"):
            yield f"tests/a.py::test_{len(counts)} {outcome} [9%]\n"
            found = json.loads(run.record.read_text())["rows"]
            counts.append({row["what"]: row["value"] for row in found})
        yield "FAILED tests/a.py::test_1 - assert 1 == 2\n"

    fake_pytest.lines, fake_pytest.code = lines(), 1  # type: ignore[assignment]
    gpu_sections.tests(run)
    assert [each["tests: passed"] for each in counts] == [1, 1, 2]
    assert [each["tests: failed"] for each in counts] == [0, 1, 1]
    assert run.details["notes"] == ["FAILED tests/a.py::test_1 - assert 1 == 2"]
    assert len(run.rows) == 5 and run.wrong == ["tests: exit code of pytest: 1, at most 0"]


@pytest.mark.parametrize(("outcome", "count"), [("PASSED", 0), ("SKIPPED", 1)])
def test_on_a_gpu_tests_have_to_run(
    outcome: str, count: int, fake_pytest: type[Pytest], tmp_path: Path
) -> None:
    fake_pytest.lines = (f"tests/a.py::test_b {outcome} [50%]\n",)
    run = Run(gpu.SMALL, gpu.Where(torch.device("cuda"), "bfloat16"), tmp_path / "record.json")
    gpu_sections.tests(run)
    assert run.wrong == ["tests: none ran on the device"][:count]


def test_a_short_run_measures_the_passes_of_a_profile_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu_profile
    from weft.engine import measure

    monkeypatch.setattr(measure, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(gpu_profile, "MOST_TOKENS", 128)
    monkeypatch.setattr(gpu_profile, "_call_command", lambda *_: pytest.fail("the command ran"))
    run = run_of(tmp_path, quick=True)
    gpu_profile.plan_profile(run)
    values = {row["what"]: row["value"] for row in run.rows}
    known, measured = (
        values[f"plan: forecast from {name}"] for name in ("the data sheet", "the profile")
    )
    assert measured > 0 and measured != known, "the measured passes are used"
    assert set(run.details["passes"]) == {"full", "adapters", "score"}
    assert len(run.details["left_out"]) == 1


def test_a_grpo_step_that_ends_early_leaves_the_figures_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu_backends

    drained, usual = [], gpu_backends.drain

    def drain(generator: Any) -> Any:
        drained.append(generator)
        if len(drained) == 2:
            raise KeyboardInterrupt
        return usual(generator)

    monkeypatch.setattr(gpu_backends, "drain", drain)
    run = run_of(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        gpu_sections.grpo(run)
    names = [row["what"] for row in json.loads(run.record.read_text())["rows"]]
    assert "grpo, first step: generation" in names and "grpo: generation" not in names


def test_a_gpu_is_described_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "580.159, 143771 MiB, 1980 MHz, 700.00 W, Enabled, Disabled\n"
    monkeypatch.setattr(gpu, "_output", lambda *words: said if words[0] == "nvidia-smi" else "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    chosen = argparse.Namespace(commit="abc", tiny=False)
    facts = gpu._provenance(gpu.Where(torch.device("cuda"), "bfloat16"), [], chosen)
    assert facts["gpu"] == "H200" and facts["device"] == "NVIDIA H200" and facts["commit"] == "abc"
    assert facts["gpu_facts"]["memory"] == "143771 MiB" and facts["gpu_facts"]["MIG"] == "Disabled"
    assert set(facts["versions"]) >= {"python", "torch", "transformers", "numpy"}
    monkeypatch.setattr(gpu, "_output", lambda *_: "")
    assert gpu._ask_driver() == {}, "nvidia-smi that fails or hangs"


def test_operations_of_a_step_are_those_that_the_engine_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MFU in the benchmark is operations by time; the engine's own `mfu` is of the same operations."""
    from benchmarks import gpu_backends
    from weft.algorithms.sft import SFTLoss

    monkeypatch.setattr("weft.engine.torch.engine.measure_matmul_rate", lambda *_: 1e15)
    made = gpu_backends.engine(
        gpu.SMALL.config, gpu.Where(torch.device("cpu"), "float32"), trained=True
    )
    lengths = gpu.SMALL.mixed
    [stats] = made.train([gpu_backends.batch_of(lengths, 512)], SFTLoss(), max_tokens=sum(lengths))
    found = stats.metrics["mfu"] * stats.metrics["seconds"] * 1e15
    assert found == pytest.approx(gpu_backends.operations(made, lengths))


def test_gradients_of_one_batch_are_not_those_of_the_next() -> None:
    """The exact model scores two batches; what it returned for the first stays as it is."""
    from types import SimpleNamespace

    from benchmarks import gpu_backends

    class Model(torch.nn.Embedding):
        config, device = SimpleNamespace(num_hidden_layers=1), torch.device("cpu")

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=super().forward(input_ids))

    model, name = Model(64, 64), "weight"
    _, gradients = gpu_backends.exact(model, gpu_backends.batch_of((5, 9), 64), [name])
    before = gradients[name].clone()
    _, others = gpu_backends.exact(model, gpu_backends.batch_of((7,), 64), [name])
    assert torch.equal(gradients[name], before) and not torch.equal(others[name], before)


def test_a_run_that_preempts_says_so(tmp_path: Path) -> None:
    """Room for the keys and values of fewer tokens than four sequences come to have."""
    from benchmarks import gpu_backends, gpu_decode
    from weft.engine.generation.generate import open_generator
    from weft.engine.generation.scheduler import GenerationBudget

    made = gpu_backends.engine(
        gpu.SMALL.config, gpu.Where(torch.device("cpu"), "float32"), trained=False
    )
    network, run, notes = gpu_backends.network_of(made), run_of(tmp_path), []
    for most in (1 << 12, 256):
        budget = GenerationBudget(max_sequences=4, max_tokens=most)
        with open_generator(
            network,
            gpu_decode.sampling(70),
            device=torch.device("cpu"),
            version=0,
            eos_ids=(),
            budget=budget,
        ) as generator:
            generator.submit(gpu_backends.requests(4, 6, 1, 512))
            gpu_backends.drain(generator)
            gpu_decode.say_preempted(run, f"room for {most}", generator)
        notes.append(list(run.details.get("notes", ())))
    assert (
        notes[0] == []
        and "memory was short" in notes[1][0]
        and "room for 256: sequences preempted" in run.rows[-1]["what"]
    )


@pytest.mark.parametrize(
    ("table", "kernel"),
    [(True, "flash attention 2 over pages"), (False, "FlexAttention over pages")],
)
def test_the_kernel_of_decoding_is_named(
    table: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 has no flash attention over pages; later ones do."""
    from types import SimpleNamespace

    from benchmarks import gpu_backends
    from weft.engine.generation.caches import PageCaches
    from weft.kernels import flash

    monkeypatch.setattr(flash, "serves", lambda *_: True)
    monkeypatch.setattr(flash, "find_features", lambda: flash.FlashFeatures(table, table))
    config = SimpleNamespace(attention_softcap=None, head_dim=64)
    where = gpu.Where(torch.device("cuda", 0), "bfloat16")
    generator = SimpleNamespace(
        _caches=PageCaches.__new__(PageCaches), _network=SimpleNamespace(config=config)
    )
    assert gpu_backends.decoding_attention(generator, where) == kernel
    assert gpu_backends.training_attention(where, config) == "flash attention 2 over packs"
    generator._caches = None
    assert "slots" in gpu_backends.decoding_attention(generator, where)


@pytest.mark.parametrize("which", ["first", "second"])
def test_room_is_what_is_admitted(which: str, tmp_path: Path) -> None:
    from benchmarks import gpu_backends, gpu_decode

    made = gpu_backends.engine(
        gpu.SMALL.config, gpu.Where(torch.device("cpu"), "float32"), trained=False
    )
    longest = 24 if which == "first" else 1 << 40
    found = gpu_backends.room(made, longest, 5, gpu_decode.sampling(4))
    assert found == (5 if which == "first" else 0)


def test_the_program_needs_nothing_outside_the_tree() -> None:
    """Nothing that runs on the machine reads the folder of real data beside the tree."""
    sources: list[Path] = sorted((ROOT / "benchmarks").glob("gpu*.py"))
    read: Callable[[Path], str] = Path.read_text
    assert len(sources) > 8 and not any(
        "shared/" in read(path) or "WEFT_TEST_DATA" in read(path) for path in sources
    )
    assert sys.version_info >= (3, 11)
