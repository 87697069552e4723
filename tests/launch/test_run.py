"""`run`, `start` and `stop`: what they leave, what they refuse, and that nothing is touched by what
they refuse.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cases import dpo, grpo, options, prepare, sft
from weft import register_experiment, register_function, register_interface
from weft.errors import CheckpointError, ConfigError, GraphError, UserError
from weft.experiment import Scheduling
from weft.experiments import SFTConfig
from weft.interfaces.base import MFCResult
from weft.launch import RunResult, build_registered, build_scheduling, run, start, stop


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    prepare(folder)
    return folder


def small(root: Path, folder: str, **more) -> SFTConfig:
    config = SFTConfig(**options(root, folder, **{"max_steps": 2, "save_freq_steps": None, **more}))
    config.model.path = str(root / "model")
    config.dataset.train_path, config.dataset.train_bs_n_seqs = str(root / "sft.jsonl"), 4
    return config


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(root) -> RunResult:
    return run(small(root, "finished"))


def test_a_run_leaves_what_the_contract_lists(finished):
    files = {p.name for p in finished.directory.iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "timeline.json",
        "graph.svg",
        "report.html",
        "log.txt",
    } <= files
    assert {"checkpoints", "recover"} <= files and "run.lock" not in files
    assert '<span class="status finished">' in (finished.directory / "report.html").read_text()
    assert [line["step"] for line in finished.metrics] == [1, 2]
    checkpoint = finished.checkpoint("model")
    assert checkpoint == finished.directory / "checkpoints" / "model" / "step2"
    assert {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
    } <= {p.name for p in checkpoint.iterdir()}
    assert json.loads((finished.directory / "timeline.json").read_text())
    with pytest.raises(CheckpointError, match="no checkpoint of role 'actor'; roles: model"):
        finished.checkpoint("actor")


def test_peak_memory_is_one_number_in_the_log_the_metrics_and_the_report(finished):
    shown = f"{finished.metrics[-1]['peak_memory_gb']:.2f} GB"
    assert f"memory: {shown} at most" in (finished.directory / "log.txt").read_text()
    tiles = (finished.directory / "report.html").read_text().partition("peak memory")[2]
    assert re.search(r"[\d.]+ GB", tiles).group() == shown


def test_predicted_values_stand_beside_the_measured_ones(finished):
    for line in finished.metrics:
        assert line["predicted/step_seconds"] == line["predicted/train"] > 0
        assert line["predicted/train/peak_bytes"] > 0 and line["train/peak_bytes"] > 0
        assert line["train/peak_bytes"] <= line["peak_memory_gb"] * 2**30 + 1
    log = (finished.directory / "log.txt").read_text()
    assert re.search(r"predicted [\d.]+ s a step, measured [\d.]+\n", log)
    page = (finished.directory / "report.html").read_text()
    assert "Predicted and measured" in page and "from estimated speeds of a CPU" in page


def test_a_checkpoint_is_loaded_by_transformers(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished.checkpoint("model"))
    tokens = AutoTokenizer.from_pretrained(finished.checkpoint("model"))(
        "What is", return_tensors="pt"
    )
    assert model(tokens["input_ids"]).logits.shape[-1] == model.config.vocab_size


def test_a_model_that_is_nowhere_is_asked_for_once(root, monkeypatch):
    asked = []

    def refuse(self, name, **options):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    monkeypatch.chdir(root)
    config = small(root, "nowhere")
    config.model.path = "modle"
    with pytest.raises(
        CheckpointError, match=r"model.path='modle': .*\(no network\); did you mean model\?"
    ):
        run(config)
    assert asked == ["modle"] and not (root / "nowhere").exists()


def test_the_plan_is_told_before_the_first_step(finished):
    log = (finished.directory / "log.txt").read_text()
    before = log.split("step 1/")[0]
    for words in (
        "nodes   train",
        "24 samples per epoch, batches of 4",
        "6 steps, 6 optimizer steps",
        "2 steps (max_steps=2, which overrides total_train_epochs=2)",
        "parameters",
        "MiB",
        "thread",
        "sft",
    ):
        assert words in before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "contains a finished run"),
        ({"seed": 2}, "seed: 1 there, 2 here"),
        ({"recover_mode": "disabled"}, "recover_mode=disabled"),
        ({"recover_mode": "resume"}, "contains a finished run"),
    ],
)
def test_a_second_run_into_the_directory_is_refused_and_nothing_is_touched(
    root, finished, change, words
):
    before = tree(finished.directory)
    with pytest.raises(ConfigError, match=words):
        run(small(root, "finished", **change))
    assert tree(finished.directory) == before


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("slurm", "mode=slurm: a job runs a command line"),
        ("locl", r"unknown mode 'locl'; did you mean local\?"),
    ],
)
def test_modes_that_no_call_has_are_refused(root, mode, message):
    with pytest.raises(ConfigError, match=message):
        run(small(root, "mode"), mode=mode)
    assert not (root / "mode").exists()


@register_interface("only_infers")
class OnlyInfers:
    def inference(self, model, batch):
        return MFCResult()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"interface": "only_infers"},
            GraphError,
            "calls train_step of the interface 'only_infers', which does not have it",
        ),
        ({"interface": "trian"}, ConfigError, "did you mean train"),
        ({"args": {"loss": "sft", "epocs": 2}}, ConfigError, "epocs"),
        ({"post_hooks": ["nobody"]}, ConfigError, "nobody"),
        ({"cache": True}, GraphError, "cache=True"),
    ],
)
def test_calls_that_cannot_be_made_are_refused_before_the_start(root, changes, error, words):
    from weft.graph.mfc import Call

    if "post_hooks" in changes:
        changes = {"post_hooks": [Call(name) for name in changes["post_hooks"]]}
    with pytest.raises(error, match=words):
        run(small(root, "calls").build().with_mfc("train", **changes))
    assert not (root / "calls").exists(), "not even the directory is left"


def test_a_role_without_a_network_is_not_trained(root):
    experiment = small(root, "null").build()
    roles = {"model": replace(experiment.roles["model"], backend="null")}
    with pytest.raises(GraphError, match="backend=null"):
        run(replace(experiment, roles=roles))


def test_what_is_wrong_with_the_rows_is_told_before_anything_is_written(root):
    bad = root / "bad.jsonl"
    bad.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\nnonsense\n')
    config = small(root, "rows")
    config.dataset.train_path = str(bad)
    with pytest.raises(UserError, match=r"bad\.jsonl:2"):
        run(config)
    assert not (root / "rows").exists()


def test_rows_are_tokenized_while_training_goes_on(root, monkeypatch):
    monkeypatch.setattr(
        "weft.data.background_table.BackgroundTokenTable.start", lambda table, workers: None
    )  # made when they are asked for
    monkeypatch.setattr("weft.data.batches.MAX_FORECAST_SAMPLES", 4)

    def of(folder: str, smallest: int, **more) -> tuple[list[dict[str, Any]], str]:
        monkeypatch.setattr("weft.data.tokenizing.PARALLEL_BYTES", smallest)
        config = small(root, folder, **{"max_steps": 9, **more})
        config.dataset.cache_dir, config.dataset.max_seqlen = str(root / folder / "cache"), 6
        result = run(config)
        log = (result.directory / "log.txt").read_text()
        return [
            {name: line[name] for name in line if name.startswith("train/l")}
            for line in result.metrics
        ], log

    first, said = of("before", 1 << 30)
    cut = next(line for line in said.splitlines() if "sft: of 24 rows" in line).partition("sft: ")[
        2
    ]
    metrics, log = of("ahead", 0)
    assert metrics == first
    begun, done, told = (
        log.index(line)
        for line in (
            "sft: 24 samples are tokenized during",
            "sft: all 24 samples are tokenized",
            cut,
        )
    )
    assert begun < log.index("step 1/9") < done < told
    config = small(root, "short", max_tokens_per_microbatch=8)
    config.dataset.cache_dir, config.dataset.max_seqlen = str(root / "short" / "cache"), "auto"
    with pytest.raises(
        ConfigError,
        match=r"^max_tokens_per_microbatch=8: cannot hold the longest .*, a row of \d\d tokens",
    ):
        run(config)


def test_two_processes_never_write_one_run(root):
    from weft.runtime.directory import RunDirectory, RunLock

    config = small(root, "locked")
    lock = RunLock(RunDirectory.from_control(config.build().control).path)
    lock.take()
    with pytest.raises(ConfigError, match=f"written by process {os.getpid()}"):
        run(config)
    lock.release()
    assert len(run(config).metrics) == 2


@register_function("nan_reward")
def nan_reward(batch, context):
    raise ValueError("the reward is not a number")


def test_a_host_function_that_raises_is_named_and_the_run_can_go_on(root, capsys):
    experiment = replace(
        grpo(root, "raises").build().with_mfc("reward", function="nan_reward", args={})
    )
    with pytest.raises(ValueError, match="not a number") as caught:
        run(experiment)
    assert any("node 'reward'" in note for note in caught.value.__notes__)
    told = (root / "raises" / "e" / "t" / "log.txt").read_text()
    assert (
        told.count("error: ValueError: the reward is not a number")
        == 1
        == told.count("is not a number")
    )
    assert "is not a number" not in capsys.readouterr().out, "who started the run shows it"
    status = json.loads((root / "raises" / "e" / "t" / "status.json").read_text())
    assert status["status"] == "failed"


def test_a_reference_shares_the_base_of_a_lora_actor(root, monkeypatch):
    from weft.engine.torch.adapters_off import BaseWeightsEngine
    from weft.runtime import roles

    built = []
    original = roles.RoleEngines.__init__
    monkeypatch.setattr(
        roles.RoleEngines, "__init__", lambda self, *a: (original(self, *a), built.append(self))[0]
    )
    config = dpo(root, "shared")
    config.max_steps = 1
    run(config)
    assert isinstance(built[0]._get_own_engine("ref"), BaseWeightsEngine)


def test_runs_share_cached_outputs_where_they_share_a_folder(root):
    first, second = dpo(root, "shares-a"), dpo(root, "shares-b")
    for config in (first, second):
        config.dataset.cache_dir, config.total_train_epochs = str(root / "cache"), 1
    one, two = run(first).metrics, run(second).metrics
    assert (
        one[0]["ref_inf/cached_fraction"] == 0.0
        and [line["ref_inf/cached_fraction"] for line in two] == [1.0] * 5
    )
    assert [line["actor_train/loss"] for line in one] == [line["actor_train/loss"] for line in two]


def test_registered_experiments_are_functions_or_classes(root):
    register_experiment("run-function", lambda: small(root, "registered").build())

    @register_experiment("run-class")
    class Mine:
        def scheduling_setup(self):
            return Scheduling(n_nodes=1)

        def initial_setup(self):
            return small(root, "registered").build()

    @register_experiment("run-large")
    class Large(Mine):
        def scheduling_setup(self):
            return Scheduling(n_nodes=4, n_gpus_per_node=8)

    register_experiment("run-nothing", lambda: None)
    assert len(start("run-function", "first").metrics) == 2
    assert build_registered("run-class", "second").control.trial_name == "second"
    assert (root / "registered" / "run-function" / "first" / "config.yaml").is_file()
    with pytest.raises(ConfigError, match="requests 4 x 8 devices, and mode=local is one machine"):
        start("run-large", "a")
    with pytest.raises(ConfigError, match="returns a NoneType"):
        start("run-nothing", "a")
    with pytest.raises(ConfigError, match="run-function"):
        start("run-funktion", "a")


def test_stop_ends_a_run_after_its_step_and_it_goes_on(root):
    code = (
        "from pathlib import Path; from tests.launch.cases import sft; from weft.launch import "
        "run\n"
        f"config = sft(Path({str(root)!r}), 'stopped'); config.total_train_epochs = 400; "
        f"config.save_freq_steps = None\n"
        "run(config)"
    )
    with pytest.raises(ConfigError, match="there is no run"):
        stop("e", "t", fileroot=str(root / "stopped"))
    child = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    metrics = root / "stopped" / "e" / "t" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.05)
    assert "stopped" in stop("e", "t", fileroot=str(root / "stopped"), deadline_s=60)
    assert child.wait(30) != 0 and f"stopped by {signal.SIGTERM.name}" in child.stderr.read()
    steps = len(metrics.read_text().splitlines())
    assert (root / "stopped" / "e" / "t" / "recover" / f"step{steps}.json").is_file()
    with pytest.raises(ConfigError, match="no process runs"):
        stop("e", "t", fileroot=str(root / "stopped"))


def test_a_run_goes_on_with_other_options_where_that_is_asked_for(root):
    first = run(small(root, "other", max_steps=2))
    with pytest.raises(ConfigError, match=f"resume_from={first.directory}"):
        run(small(root, "other", max_steps=5))
    again = run(small(root, "other", max_steps=5, resume_from=str(first.directory)))
    assert [line["step"] for line in again.metrics] == [1, 2, 3, 4, 5] and again.metrics[
        :2
    ] == first.metrics


def test_dynamic_sampling_refills_the_batch(root):
    config = grpo(root, "dynamic")
    config.reward, config.grpo.dynamic_sampling, config.total_train_epochs = (
        "tests.launch.coin:coin",
        True,
        1,
    )
    result = run(config)
    sizes = [
        e["args"]
        for e in json.loads((result.directory / "timeline.json").read_text())
        if e["name"] == "actor_train"
    ]
    assert sizes[0]["ids"] == 4 and 0 < result.metrics[0]["filter/kept_fraction"] < 1


def test_evaluation_gives_every_source_a_name(root):
    config = sft(root, "evaluated")
    config.max_steps = 2
    last = run(config).metrics[-1]
    assert {"eval/sft/loss", "eval/loss"} <= last.keys() and last["eval/sft/loss"] == last[
        "eval/loss"
    ]


class Sweep:
    """An experiment of which each seed is registered by a `functools.partial`, as ReaL's users do."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.folder, self.seed = folder, seed

    def initial_setup(self) -> Any:
        config = small(self.folder, "sweep")
        config.seed = self.seed
        return config.build()

    def scheduling_setup(self) -> Scheduling:
        return Scheduling(n_nodes=1, n_gpus_per_node=self.seed)


def test_a_partial_of_a_class_or_a_function_is_registered(root):
    for _ in range(2):  # by a module that is imported twice
        register_experiment("run-partial", functools.partial(Sweep, root, seed=7))
    assert build_registered("run-partial", "t").control.seed == 7
    assert build_scheduling("run-partial").n_gpus_per_node == 7
    register_experiment("run-partial-function", functools.partial(small, root, "sweep", seed=8))
    assert build_registered("run-partial-function", "t").control.seed == 8
    with pytest.raises(ConfigError, match="registered twice"):
        register_experiment("run-partial", functools.partial(Sweep, root, seed=9))
