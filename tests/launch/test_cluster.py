"""Where a run's devices come from: what is refused before any starts, and a real cluster of two
nodes on this machine.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import ray_cluster
from tests.launch.cases import dpo, prepare
from tests.runtime.placed import Command, count_arenas, run_forked, timeless, write_hooks
from weft.errors import ConfigError, RunError, UserError
from weft.experiment import Control
from weft.launch import cluster, dry_run, run
from weft.launch.cluster import (
    check_enough_devices,
    check_processes,
    collect_environment,
    find_local_resources,
    get_device_kind,
    launch_devices,
)

ray = pytest.importorskip("ray")
from weft.runtime.ray import RayNode  # noqa: E402  # with ray alone

CONTROL = Control("e", "t")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    prepare(folder)
    return folder


def placed(root: Path, folder: str):
    config = dpo(root, folder)
    config.max_steps, config.actor.lora.r, config.ref.device_mesh = 3, 0, "1"
    return config


def node(host: str, cpus: int, gpus: int = 0) -> RayNode:
    return RayNode(host, host, "10.0.0.1", cpus, gpus)


def test_a_cluster_that_is_too_small_is_refused_with_what_it_has():
    check_enough_devices(6, "cpu", [node("a", 4), node("b", 2)])
    with pytest.raises(
        ConfigError, match=r"needs 8 devices .* has 6 CPUs \(a: 4, b: 2\), 2 too few"
    ):
        check_enough_devices(8, "cpu", [node("a", 4), node("b", 2)])
    with pytest.raises(ConfigError, match=r"has 2 GPUs \(a: 2, b: 0\), 1 too few"):
        check_enough_devices(3, "cuda", [node("a", 8, 2), node("b", 8)])
    with pytest.raises(ConfigError, match="no machine is up"):
        check_enough_devices(1, "cpu", [])


def test_cpus_of_this_machine_do_not_limit_devices_and_gpus_do(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert find_local_resources(cores + 6, "cpu", replace(CONTROL, n_gpus_per_node=1)) == (
        cores + 6,
        0,
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert find_local_resources(4, "cuda", CONTROL)[1] == 4
    with pytest.raises(
        ConfigError, match="needs 4 devices and may use 2 GPUs of the 4 of this machine"
    ):
        find_local_resources(4, "cuda", replace(CONTROL, n_gpus_per_node=2))


def test_far_more_processes_than_cores_are_refused():
    cores = len(os.sched_getaffinity(0))
    check_processes(64 * cores)
    with pytest.raises(
        ConfigError, match=r"needs 65,536 devices, each a process.* can run at most 64 each"
    ):
        check_processes(65536)
    with pytest.raises(ConfigError, match="each a process"):
        find_local_resources(64 * cores + 1, "cpu", CONTROL)


def test_a_name_of_one_device_is_refused(root):
    experiment = placed(root, "named").build()
    assert (
        get_device_kind(replace(experiment, control=replace(experiment.control, device="cpu")))
        == "cpu"
    )
    with pytest.raises(ConfigError, match="device=cuda:1: names one device, and the run needs 2"):
        get_device_kind(replace(experiment, control=replace(experiment.control, device="cuda:1")))


def test_without_ray_the_error_says_how_to_get_it(root, monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs 2 devices.*pip install '.*\[ray\]'"):
        launch_devices(placed(root, "none").build(), "local")


def test_secrets_go_with_the_environment_and_others_stay(monkeypatch):
    for name in ("HF_TOKEN", "WEFT_X", "WANDB_API_KEY", "OPENAI_API_KEY", "UNRELATED"):
        monkeypatch.setenv(name, "1")
    passed = collect_environment()
    assert {
        "HF_TOKEN",
        "WEFT_X",
        "WANDB_API_KEY",
        "OPENAI_API_KEY",
    } <= passed.keys() and "UNRELATED" not in passed


@pytest.mark.parametrize("own", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}])
def test_processes_of_devices_are_told_how_torch_allocates(root, monkeypatch, own):
    """What the run's own options say wins over the default, by either name."""
    told: list[dict[str, str]] = []

    class Here:
        def list_nodes(self):
            return [RayNode("n", "here", "127.0.0.1", 4, 0)]

        def launch(self, count, kind, environment):
            told.append(environment)

    monkeypatch.setattr("weft.runtime.ray.RayCluster.start", lambda *_: Here())
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    experiment = placed(root, "told").build()
    launch_devices(replace(experiment, control=replace(experiment.control, env=own)), "local")
    found = {name: value for name, value in told[0].items() if name.startswith("PYTORCH_")}
    assert found == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_a_dry_run_says_where_roles_are_and_writes_nothing(root):
    lines = dry_run(placed(root, "dry"))
    assert (
        "actor: layout d1f1t1p1c1e1 on device 0" in lines
        and "ref: layout d1f1t1p1c1e1 on device 1" in lines
    )
    assert [line.split(":")[0] for line in lines if line.startswith("memory of device")] == [
        "memory of device 0",
        "memory of device 1",
    ]
    assert (
        any(line.startswith("devices ") and " 2 x cpu (" in line for line in lines)
        and not (root / "dry").exists()
    )
    assert lines[-1].startswith("fits: each of 2 devices needs about ")


@pytest.mark.slow
def test_more_machines_than_this_one_are_refused_where_the_run_is_local(root):
    config = placed(root, "machines")
    config.n_nodes = 2
    with pytest.raises(ConfigError, match="n_nodes=2: mode=local is this machine"):
        run(config)


@pytest.fixture
def two_nodes(monkeypatch):
    with ray_cluster.cluster(2) as nodes:
        for name, value in nodes.environment.items():
            monkeypatch.setenv(name, value)
        yield nodes


def words(root: Path, folder: str, *more: str) -> list[str]:
    return [
        "dpo",
        "experiment_name=e",
        "trial_name=t",
        f"fileroot={root}/{folder}",
        f"actor.path={root}/model",
        f"dataset.train_path={root}/pairs.jsonl",
        "dataset.train_bs_n_seqs=4",
        "max_steps=4",
        *more,
    ]


@pytest.mark.slow
def test_a_cluster_of_two_nodes_gives_the_numbers_of_one_process(root, tmp_path, two_nodes):
    ray_words = ["mode=ray", f"ray_address={two_nodes.address}"]
    three = Command(*words(root, "three", "ref.device_mesh=2", *ray_words), cwd=tmp_path)
    code, out = three.end()
    assert (
        code == 2 and "needs 3 devices and the Ray cluster has 2 CPUs" in out and "1 too few" in out
    ), out
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    hooks = [
        f"imports=[{write_hooks(tmp_path)}]",
        f"ref_inf.post_hooks=[{{function: count_arenas, args: {{folder: {arenas}}}}}]",
    ]
    two = Command(*words(root, "two", "ref.device_mesh=1", *hooks, *ray_words), cwd=tmp_path)
    code, out = two.end()
    assert code == 0 and two.none_left(), out
    # The settings of the heap reach processes that another program's Ray starts.
    assert platform.libc_ver()[0] != "glibc" or list(count_arenas(arenas).values()) == [1]
    assert run_forked(*words(root, "alone"), cwd=tmp_path)[0] == 0
    assert timeless(root / "two" / "e" / "t") == timeless(root / "alone" / "e" / "t")
    assert all(process.poll() is None for process in two_nodes.nodes), (
        "the cluster is not ours to stop"
    )


@pytest.mark.slow
def test_where_no_cluster_answers_the_error_names_the_option(root, tmp_path):
    command = Command(*words(root, "nobody", "mode=ray", "ray_address=127.0.0.1:1"), cwd=tmp_path)
    code, out = command.end()
    assert code == 2 and "ray_address='127.0.0.1:1': no Ray cluster answers there" in out, out
    assert len([line for line in out.splitlines() if "error" in line.lower()]) == 1, out


def test_a_ray_that_does_not_start_is_tried_twice(root, monkeypatch):
    tried = []

    def start(*_: object) -> object:
        tried.append(1)
        raise RunError(
            "Ray did not start on this machine: The current node timed out during startup"
        )

    monkeypatch.setattr("weft.runtime.ray.RayCluster.start", start)
    with pytest.raises(RunError, match="Ray did not start on this machine"):
        launch_devices(placed(root, "twice").build(), "local")
    assert len(tried) == 2


class Starting:
    """Ray that runs, and devices that never come."""

    def __init__(self) -> None:
        self.cluster, self.closed = self, 0

    def wait_for_devices(self) -> object:
        raise RunError("no devices today")

    def close(self) -> None:
        self.closed += 1


def test_the_plan_is_shown_before_the_devices_are_waited_for(root, monkeypatch, capsys):
    started = Starting()
    monkeypatch.setattr("weft.launch.cluster.start_early", lambda _: started)
    monkeypatch.setattr("weft.launch.cluster.launch_devices", lambda _, mode, cluster: cluster)
    with pytest.raises(RunError, match="no devices today"):
        run(placed(root, "early"))
    assert started.closed
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "starting 2 processes, one for each device"
    labels = [line.split()[0] for line in lines]
    assert labels[0] == "nodes" and {"memory", "layouts", "devices"} <= set(labels)
    memory = next(line for line in lines if line.startswith("memory"))
    assert "GiB on each device, of" in memory and "GiB in total" in memory


def test_devices_start_after_the_checks_that_need_no_data(root, monkeypatch):
    started, order = Starting(), []
    monkeypatch.setattr("weft.launch.cluster.start_early", lambda _: started)
    monkeypatch.setattr(
        "weft.launch.cluster.launch_devices", lambda *_: order.append("devices") or started
    )
    config = placed(root, "checks")
    config.actor.layout = "t3"
    with pytest.raises(ConfigError, match="layout"):
        run(config)
    assert not order and started.closed == 1
    config = placed(root, "rows")
    config.dataset.train_path = str(root / "missing.jsonl")
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        run(config)
    assert not order


def test_devices_are_ended_where_the_data_are_wrong(root, tmp_path, monkeypatch):
    started = Starting()
    monkeypatch.setattr("weft.launch.cluster.start_early", lambda _: started)
    monkeypatch.setattr("weft.launch.cluster.launch_devices", lambda *_: started)
    config = placed(root, "wrong")
    config.dataset.train_path = str(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"prompt": 1}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        run(config)
    assert started.closed


@pytest.mark.parametrize(
    ("device", "layout", "mode", "early"),
    [
        (None, "d2", "local", True),
        ("cpu", "d2", "local", True),
        ("cuda", "d2", "local", False),
        (None, "d1", "local", False),
        (None, "d2", "ray", False),
    ],
)
def test_ray_starts_before_torch_is_loaded_where_all_devices_are_cpus(
    root, monkeypatch, device, layout, mode, early
):
    monkeypatch.setattr(cluster, "GPU_FILES", ())
    config = placed(root, "where")
    config.device, config.actor.layout, config.ref.device_mesh = device, layout, None
    assert cluster.can_start_early(config.build(), mode) == early


def test_a_machine_with_a_gpu_waits_for_torch(root, monkeypatch):
    monkeypatch.setattr(cluster, "GPU_FILES", ("null",))
    assert not cluster.can_start_early(placed(root, "gpu").build(), "local")
