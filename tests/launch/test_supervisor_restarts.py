"""A run of several devices that loses them comes back by itself, and ends with the numbers of one
that never did.

What weft does then is tested with forked devices, which start in a fraction of a second; how Ray's
processes are found dead, replaced, and gone at the end, with real ones.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from tests import overlap
from tests.launch.cases import prepare
from tests.runtime.placed import Command, run_forked, timeless, write_hooks
from weft.runtime import directory

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.overlap]
DEVICE = "ray::_Device"
# Ten steps, which a nap in each makes last ten seconds: two kills take up to three of them each.
LONG = ("max_steps=10", "total_train_epochs=4")
SLOW = (*LONG, "ref_inf.pre_hooks=[{function: nap, args: {seconds: 1.0}}]")


def until(command: Command, there: Callable[[], bool], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert command.process.poll() is None, command.process.communicate()[0]
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def restarts(run: Path) -> int:
    return (run / "log.txt").read_text().count("continuing with new processes")


def restarted(run: Path, times: int) -> bool:
    return restarts(run) == times


def beyond(run: Path, step: int) -> bool:
    return steps(run) > step


def steps(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["step"] if lines else 0


def status_of(run: Path) -> str:
    return str(json.loads((run / "status.json").read_text())["status"])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recover")
    prepare(folder)
    write_hooks(folder)
    return folder


def words(root: Path, folder: str, *more: str) -> list[str]:
    """PPO with critic, reference and reward model on a device of their own, a recovery point after
    every step.
    """
    return [
        "ppo",
        "experiment_name=e",
        "trial_name=t",
        f"fileroot={root}/{folder}",
        f"actor.path={root}/model",
        f"critic.path={root}/model",
        f"rew.path={root}/model",
        "actor.optimizer.lr=1e-3",
        "critic.optimizer.lr=1e-3",
        f"dataset.path={root}/prompts.jsonl",
        "dataset.train_bs_n_seqs=4",
        "ppo.gen.max_new_tokens=6",
        "max_steps=6",
        "total_train_epochs=2",
        "ppo.value_norm=true",
        "ppo.use_adaptive_kl_ctl=true",
        "ppo.ppo_n_minibatches=2",
        "recover_freq_steps=1",
        "critic.device_mesh=1",
        "ref.device_mesh=1",
        "rew.device_mesh=1",
        f"imports=[{root}/placed_hooks.py]",
        *more,
    ]


def die(root: Path, call: str, step: int, flag: str) -> str:
    return f"{call}.pre_hooks=[{{function: die, args: {{step: {step}, flag: {root}/{flag}}}}}]"


def undisturbed(root: Path, folder: str, *more: str) -> Path:
    """The directory of a run that nothing happens to."""
    code, out = run_forked(*words(root, folder, *more), cwd=root)
    assert code == 0, out
    return root / folder / "e" / "t"


@pytest.fixture(scope="module")
def whole(root) -> Iterator[Future[Path]]:
    with overlap.start(undisturbed, root, "whole") as run:
        yield run


@pytest.fixture(scope="module")
def long(root) -> Iterator[Future[Path]]:
    with overlap.start(undisturbed, root, "long", *LONG) as run:
        yield run


@pytest.mark.parametrize("sign", ["raylet/raylet", "gcs/gcs_server"])
def test_where_ray_itself_is_killed_no_step_is_lost(root, whole, sign):
    """The run goes on with another Ray, or has its last steps already, or Ray ends the process
    before that could hear of its loss: then the same command goes on, unless all steps are done.
    """
    folder = sign.split("/")[0]
    run = root / folder / "e" / "t"
    command = Command(*words(root, folder), cwd=root)
    command.after(run / "metrics.jsonl")
    assert command.kill(sign) == 1
    code, out = command.end()
    if code != 0 and status_of(run) != "finished":
        code, out = Command(*words(root, folder), cwd=root).end()
        assert code == 0, out
    assert status_of(run) == "finished" and command.none_left(), out
    assert timeless(run) == timeless(whole.result())


def test_a_device_that_dies_is_replaced_and_the_numbers_stay(root, whole):
    command = Command(*words(root, "died", die(root, "ref_inf", 3, "once")), cwd=root)
    code, out = command.end()
    assert code == 0 and command.none_left(), out
    run = root / "died" / "e" / "t"
    assert timeless(run) == timeless(whole.result())
    assert (run / "samples.jsonl").read_text() == (whole.result() / "samples.jsonl").read_text()
    log = (run / "log.txt").read_text()
    # others may be under way there, too
    died = next(line for line in log.splitlines() if " died in call " in line)
    assert (
        "call 'ref_inf' of role 'ref'" in died
        and "restart 1 of 3" in died
        and "resuming after step 3" in log
    )
    assert json.loads((run / "status.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_ray_s_processes_killed_at_random_moments_leave_no_trace(root, long, kills):
    """A kill comes up to two seconds after a step that was made since the last restart."""
    draw, run = random.Random(1), root / f"shot{kills}" / "e" / "t"
    command = Command(*words(root, f"shot{kills}", *SLOW), cwd=root)
    seen = 0
    command.after(run / "metrics.jsonl")
    for number in range(1, kills + 1):
        until(command, partial(beyond, run, seen))
        time.sleep(draw.uniform(0.0, 2.0))
        assert command.kill(DEVICE, draw) == 2
        until(command, partial(restarted, run, number))
        seen = steps(run)
    code, out = command.end()
    assert code == 0 and command.none_left(), out
    assert restarts(run) == kills, out
    assert_same_end(run, long.result())


# seeds whose third deaths are drawn by the seventh step
@pytest.mark.parametrize("seed", [7, pytest.param(14, marks=pytest.mark.exhaustive)])
def test_devices_that_die_at_random_moments_leave_no_trace(root, long, seed):
    """Each of two devices dies three times, up to a second after it has begun one of its calls.

    A step naps for more than half of that second, so a device that is to die passes over the draw
    of one step at most.
    """
    deaths = [root / f"deaths{seed}-{device}" for device in (0, 1)]
    for folder in deaths:
        folder.mkdir()
    perish = [
        f"{{function: perish, args: {{seed: {seed}, folder: {folder}}}}}" for folder in deaths
    ]
    nap = "{function: nap, args: {seconds: 0.6}}"
    run = root / f"perished{seed}" / "e" / "t"
    hooks = (f"actor_train.pre_hooks=[{perish[0]}]", f"ref_inf.pre_hooks=[{perish[1]}, {nap}]")
    code, out = run_forked(*words(root, f"perished{seed}", *LONG, *hooks), cwd=root)
    assert code == 0, out
    assert [len(list(folder.iterdir())) for folder in deaths] == [3, 3] and 3 <= restarts(
        run
    ) <= 6, out
    assert_same_end(run, long.result())


def assert_same_end(run: Path, other: Path) -> None:
    assert timeless(run) == timeless(other)
    assert directory.compute_checksums(run / "checkpoints") == directory.compute_checksums(
        other / "checkpoints"
    )


def test_before_the_first_recovery_point_a_run_begins_anew(root, whole):
    code, out = run_forked(
        *words(root, "early", die(root, "actor_train", 0, "early-flag")), cwd=root
    )
    run = root / "early" / "e" / "t"
    assert code == 0, out
    assert (
        "the run stopped before its first recovery point; starting again"
        in (run / "log.txt").read_text()
    )
    assert timeless(run) == timeless(whole.result())


def test_recover_mode_disabled_ends_with_one_message(root):
    asked = words(root, "off", "recover_mode=disabled", die(root, "ref_inf", 1, "off-flag"))
    code, out = run_forked(*asked, cwd=root)
    told = [line for line in out.splitlines() if line.startswith("error")]
    assert code == 1 and len(told) == 1 and "Traceback" not in out, out
    assert "device 1 (" in told[0] and "call 'ref_inf' of role 'ref'" in told[0]
    assert json.loads((root / "off" / "e" / "t" / "status.json").read_text())["status"] == "failed"


def test_a_call_that_hangs_is_named_and_made_again_on_other_devices(root, whole):
    hang = f"ref_inf.pre_hooks=[{{function: hang, args: {{step: 2, flag: {root}/hung}}}}]"
    code, out = run_forked(*words(root, "hung-run", "ref_inf.deadline_s=15", hang), cwd=root)
    run = root / "hung-run" / "e" / "t"
    assert code == 0, out
    log = (run / "log.txt").read_text()
    assert (
        "node 'ref_inf' (role 'ref', " in log
        and "did not finish within its deadline_s=15 seconds" in log
    )
    assert (
        "it waits for device 1 (" in log
        and "which is in hang (placed_hooks.py:" in log
        and "restart 1 of 3" in log
    )
    assert timeless(run) == timeless(whole.result())


def test_devices_that_die_again_and_again_end_the_run_with_one_message(root):
    """The hook kills whoever makes step 2, every time."""
    asked = words(root, "always", "ref_inf.pre_hooks=[{function: die, args: {step: 2}}]")
    code, out = run_forked(*asked, cwd=root)
    told = [line for line in out.splitlines() if line.startswith("error")]
    assert code == 1 and len(told) == 1, out
    assert "device 1 (" in told[0] and "3 restarts made no progress after step 2" in told[0]
    assert (
        json.loads((root / "always" / "e" / "t" / "status.json").read_text())["status"] == "failed"
    )
