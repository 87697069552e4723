"""Slurm: what a script says, and scripts that run on two nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import overlap
from tests.launch.cases import prepare
from tests.runtime.test_parameters_runs import assert_equal
from tests.slurm_cluster import SlurmCluster, missing
from weft.errors import ConfigError, RunError
from weft.experiments.machines import SlurmSpec
from weft.launch import slurm
from weft.launch.eval_job import EvalJob, ModelPlace
from weft.launch.job_steps import StepRecord
from weft.launch.job_template import read_template
from weft.launch.slurm import SlurmRequest
from weft.launch.submission import JobSubmission, check_partitions
from weft.observe.logs import find_failures, find_log_files

ROOT = Path(__file__).resolve().parent.parent.parent


def request(run: Path, *command: str, **changes: object) -> SlurmRequest:
    base = SlurmRequest(
        "job",
        run,
        command,
        n_nodes=2,
        env={"GREETING": "good day, 'you'"},
        module="tests.launch.on_nodes",
    )
    return replace(base, **changes)


def test_a_script_is_shell_and_says_what_is_asked(tmp_path: Path) -> None:
    spec = SlurmSpec(
        partition="gpu",
        account="us",
        qos="high",
        time="1-00:00:00",
        cpus_per_node=16,
        mem_per_node="64G",
        gpu_type="a100",
        nodelist="n[1-2]",
        exclude="n3",
        constraint="fast&big",
        modules=["cuda/12"],
        setup=["source venv/bin/activate"],
        sbatch=["--mail-type=END"],
        grace_s=60,
        python="/opt/py thon",
    )
    text = slurm.build_script(
        request(tmp_path / "e" / "t", "quickstart", "sft", "a='b c'", gpus_per_node=8, spec=spec)
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert lines[1 : 1 + len(directives)] == [f"#SBATCH {d}" for d in directives], (
        "sbatch stops at the first command"
    )
    assert directives == [
        "--job-name=job",
        f"--chdir={Path.cwd()}",
        f"--output={tmp_path}/e/t/slurm/%j.log",
        "--open-mode=append",
        "--export=ALL",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=16",
        "--mem=64G",
        "--gpus-per-node=a100:8",
        "--partition=gpu",
        "--account=us",
        "--qos=high",
        "--time=1-00:00:00",
        "--signal=B:TERM@60",
        "--nodelist=n[1-2]",
        "--exclude=n3",
        "--constraint=fast&big",
        "--mail-type=END",
    ]
    there = [lines.index(line) for line in ("module load cuda/12", "source venv/bin/activate")]
    assert (
        there == sorted(there)
        and there[0] == 1 + len(directives) + 2
        and lines.index("set -u") > there[1]
    )
    assert "export GREETING='good day, '\"'\"'you'\"'\"''" in lines
    assert "'/opt/py thon' -m tests.launch.on_nodes quickstart sft 'a='\"'\"'b c'\"'\"''" in text
    assert "--num-gpus=8" in text


# Stand-ins for Slurm's commands and for Python in a job of one node
COMMANDS = {
    "scontrol": "echo n1",
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "python": """
case "$*" in
    "-m ray.scripts.scripts start "*) echo "$@" > "$RAY_WORDS" ;;
    "-c import grpc") exit "$GRPC_MISSING" ;;
    "-c "*getsockname*) echo 10.0.0.1 ;;
    "-c "*ray.init*) until [ -s "$RAY_WORDS" ]; do sleep 0.02; done ;;
esac""",
}


def list_ray_ports(folder: Path, job: int, *, has_grpc: bool = True) -> dict[str, int]:
    """Run the script of a job with `COMMANDS`; return the ports in the arguments of `ray start`."""
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    spec = SlurmSpec(python=str(folder / "python"))
    words = folder / "words"
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RAY_WORDS": str(words),
        "GRPC_MISSING": str(int(not has_grpc)),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_CPUS_ON_NODE": "2",
    }
    script = slurm.build_script(request(folder / "e" / "t", "count", spec=spec, n_nodes=1))
    subprocess.run(["bash", "-c", script], env=env, check=True, capture_output=True, timeout=60)
    return {name: int(port) for name, port in re.findall(r"--(\S*port)=(\d+)", words.read_text())}


def test_two_jobs_on_one_node_use_different_ports(tmp_path: Path) -> None:
    """Ray chooses a free port where an option is 0; without an option, some ports are fixed."""
    first, second = (list_ray_ports(tmp_path / str(job), job) for job in (9_000_001, 9_000_002))
    fixed = {"port", "ray-client-server-port"}
    assert first.keys() == second.keys() >= {*fixed, "dashboard-agent-listen-port"}
    chosen = [ports[name] for ports in (first, second) for name in fixed]
    assert len(set(chosen)) == 4 and all(1024 <= port < 32768 for port in chosen)
    assert not any(port for name, port in first.items() if name not in fixed)
    # Ray refuses the option if it cannot start a client server.
    without = list_ray_ports(tmp_path / "minimal", 9_000_003, has_grpc=False)
    assert without.keys() == first.keys() - {"ray-client-server-port"}


def test_containers(tmp_path: Path) -> None:
    run, here = tmp_path / "e" / "t", Path.cwd()
    inside = SlurmSpec(container="nvcr.io#weft:1", container_mounts=["/data:/data:ro"])
    text = slurm.build_script(request(run, spec=inside))
    options = (
        "'--container-image=nvcr.io#weft:1' "
        f"--container-mounts={here}:{here},{tmp_path}:{tmp_path},/tmp:/tmp,/data:/data:ro "
        f"--container-workdir={here}"
    )
    assert (
        text.count(options) == 2
        and "python3 -m tests.launch.on_nodes" in text
        and "apptainer" not in text
    )
    text = slurm.build_script(
        request(run, gpus_per_node=1, spec=SlurmSpec(container="/images/weft.sif"))
    )
    words = f"apptainer exec --nv --bind {here}:{here} --bind {tmp_path}:{tmp_path} --bind /tmp:/tmp --pwd {here} /images"
    assert text.count(words) == 2 and "container-image" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_what_sbatch_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="constraint="):
        slurm.build_script(request(tmp_path, spec=SlurmSpec(constraint='"a"')))


def test_without_slurm_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch; start from a login node"):
        slurm.submit_job(request(tmp_path / "e" / "t"))
    (tmp_path / "slurm").mkdir()
    assert slurm.find_running_job(tmp_path) is None
    (tmp_path / "slurm" / "job.json").write_text('{"job": "7"}')
    with pytest.raises(RunError, match="job 7 is a Slurm job, and this machine has no squeue"):
        slurm.find_running_job(tmp_path)


# -- two nodes on this machine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as there:
        yield there


@pytest.fixture
def on_cluster(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    for name, value in {
        **cluster.env,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HF_TOKEN": "hush",
    }.items():
        monkeypatch.setenv(name, value)
    return cluster


def until(there: Callable[[], object], seconds: float, folder: Path) -> None:
    end = time.monotonic() + seconds
    while not there():
        logs = "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in folder.glob("*.log"))
        assert time.monotonic() < end, f"nothing after {seconds:g} s\n{logs}"
        time.sleep(0.2)


def left(job: str) -> list[str]:
    """Processes that name the job's temporary folder, and the folder itself."""
    found = [str(p) for p in (Path(f"/tmp/weft-{job}"),) if p.exists()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"/tmp/weft-{job}/" in (process / "cmdline").read_text():
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_job_has_ray_on_both_nodes_and_leaves_nothing(
    on_cluster: SlurmCluster, tmp_path: Path
) -> None:
    asked = request(
        tmp_path / "e" / "t",
        "count",
        str(tmp_path / "out.json"),
        spec=SlurmSpec(join_timeout_s=120),
    )
    job = slurm.submit_job(asked)
    with pytest.raises(ConfigError, match=f"job {job} of .* is already in the queue"):
        slurm.submit_job(asked)
    until(lambda: slurm.find_running_job(asked.run) is None, 180, asked.folder)
    log = (asked.folder / f"{job}.log").read_text()
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["nodes"] == 2 and len({node for node, *_ in out["seen"]}) == 2, log
    assert [row[1:] for row in out["seen"]] == [["good day, 'you'", "hush"]] * 2
    assert out["cwd"] == os.getcwd()
    assert f"job {job} ends with exit code 7" in log
    assert [f.text for f in find_failures(find_log_files(asked.run))] == []
    assert "hush" not in log + (asked.folder / "job.sh").read_text()
    assert {p.name for p in asked.folder.iterdir()} == {
        "job.sh",
        "job.json",
        f"{job}.log",
        f"{job}-ray-0.log",
        f"{job}-ray-1.log",
        f"{job}-srun.txt",
    }
    assert left(job) == []


@pytest.mark.slow
def test_cancelling_lets_the_run_end_itself(on_cluster: SlurmCluster, tmp_path: Path) -> None:
    asked = request(tmp_path / "e" / "t", "wait", str(tmp_path / "out"))
    job = slurm.submit_job(asked)
    until((tmp_path / "out").exists, 120, asked.folder)
    waiting = replace(asked, run=tmp_path / "e" / "u")
    second = slurm.submit_job(waiting)
    assert "still waiting and is cancelled" in slurm.cancel_job(waiting.run, second)
    assert "stopped" in slurm.cancel_job(asked.run, job, deadline_s=60)
    assert (tmp_path / "out").read_text() == "ended"
    assert f"job {job} ends with exit code 143" in (asked.folder / f"{job}.log").read_text()
    assert left(job) == []


@pytest.mark.slow  # an evaluation job with a stand-in for Python, which ends at once
def test_an_evaluation_job_runs_as_its_template_says(
    on_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    folder = tmp_path / "eval jobs" / "tulu"
    place = ModelPlace("folder", str(tmp_path))
    job = EvalJob("tulu", "slurm", place, folder, num_gpus=0, clusters=["debug"])
    job = replace(job, secrets=["HF_TOKEN"])
    check_partitions(job)
    record = StepRecord.read(folder)
    assert JobSubmission(job, read_template("slurm", None), record).run() == 0
    number = record.submissions[0]["job"]
    log = folder / f"tulu-{number}.log"
    until(lambda: log.exists() and log.read_text().endswith("\n"), 60, folder)
    words = ["-m", "weft.cli.main", "eval", "suite", str(tmp_path), "--tasks", "open-instruct"]
    assert log.read_text() == f"{' '.join(words)} --output {folder}/results\n"
    with pytest.raises(ConfigError, match=r"unknown --cluster 'debgu'; did you mean debug\?"):
        check_partitions(replace(job, clusters=["debgu"]))


@pytest.mark.slow
def test_sbatch_s_refusal_is_one_message(on_cluster: SlurmCluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sbatch rejected the job: .*partition") as caught:
        slurm.submit_job(request(tmp_path / "e" / "t", spec=SlurmSpec(partition="absent")))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_nodes_that_do_not_join_in_time_end_the_job(
    on_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The second node's Ray never starts: its Python sleeps instead, so no timeout is long enough."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/bash
        case "$*" in *ray.scripts.scripts*) [ "$SLURM_NODEID" = 0 ] || exec sleep 600 ;; esac
        exec {shlex.quote(sys.executable)} "$@"
        """
    )
    python.chmod(0o755)
    spec = SlurmSpec(join_timeout_s=1, python=str(python))
    asked = request(tmp_path / "e" / "t", "count", str(tmp_path / "out.json"), spec=spec)
    job = slurm.submit_job(asked)
    until(lambda: slurm.find_running_job(asked.run) is None, 60, asked.folder)
    log = (asked.folder / f"{job}.log").read_text()
    assert (
        "of 2 nodes have joined Ray after 1 s" in log and f"job {job} ends with exit code 1" in log
    )
    assert not (tmp_path / "out.json").exists() and left(job) == []


def weft(folder: Path, *words: str) -> str:
    """What `weft quickstart WORDS` prints, run in the folder."""
    command = [sys.executable, "-m", "weft.cli.main", "quickstart", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_two_nodes(folder: Path, *words: str) -> Path:
    """The directory of a run that a job of two nodes has finished, submitted in the folder by the
    command line.
    """
    run = folder / "runs" / "e" / "job"
    job = weft(
        folder, *words, "trial_name=job", "mode=slurm", "n_nodes=2", "launch.env.GREETING=hello"
    ).split()[2]
    until(lambda: slurm.find_running_job(run) is None, 480, run / "slurm")
    log = (run / "slurm" / f"{job}.log").read_text()
    assert f"job {job} ends with exit code 0" in log, log
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
    assert left(job) == []
    return run


@pytest.mark.slow
def test_ppo_over_two_nodes_has_the_tokens_and_the_numbers_of_one_process(
    on_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Each node has a device.

    The actor samples on both, data-parallel, and is trained tensor-parallel across the nodes; the
    critic, reward model and reference are on the second node, or on both.
    """
    prepare(tmp_path)
    words = ["ppo", "experiment_name=e", "device=cpu", "max_steps=3", "dataset.path=prompts.jsonl"]
    words += [f"{role}.path=model" for role in ("actor", "critic", "rew")]
    words += [f"{role}.dtype=float64" for role in ("actor", "critic", "ref", "rew")]
    words += [
        "dataset.train_bs_n_seqs=4",
        "ppo.gen.max_new_tokens=6",
        "ppo.ppo_n_minibatches=2",
        "ppo.value_norm=true",
    ]
    words += [
        "ppo.use_adaptive_kl_ctl=true",
        "ppo.ref_ema_eta=0.1",
        "actor.optimizer.lr=1e-3",
        "critic.optimizer.lr=1e-3",
    ]
    layouts = [
        "actor_gen.layout=d2",
        "actor_train.layout=t2",
        "critic.layout=d2",
        "ref.device_mesh=1",
        "rew.device_mesh=1",
    ]
    with overlap.start(weft, tmp_path, *words, "trial_name=here") as alone:
        job, here = on_two_nodes(tmp_path, *words, *layouts), tmp_path / "runs" / "e" / "here"
        alone.result()
    assert_equal(job, here)
    assert sampled(job) == sampled(here) and len(sampled(job)) > 2
    assert "actor (actor_gen): layout d2f1t1p1c1e1 on devices 0, 1" in (job / "log.txt").read_text()


def sampled(run: Path) -> list[dict[str, object]]:
    """The completions of a run, without what rounding touches."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not isinstance(value, float)}
        for line in lines
    ]
