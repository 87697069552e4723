"""When copies of a role get its weights, and which parameters go; no process takes part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.runtime.toy import Toy
from weft.errors import ConfigError, RunError
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.runtime.commands import (
    BuiltEngines,
    MoveParameters,
    PrepareReallocation,
    SaveParameters,
    SyncOnSameMesh,
)
from weft.runtime.dispatch import DeviceJob
from weft.runtime.parameters import ParameterTransfers
from weft.topology import build_whole_slice

NAMES = {"base": (4, 6), "lora_a": (2, 6)}


@dataclass
class Recorder:
    """In the place of `JobDispatcher`: what is submitted, in order."""

    jobs: list[DeviceJob] = field(default_factory=list)

    def submit(self, *jobs: DeviceJob) -> None:
        self.jobs += jobs

    def commands(self) -> list[Any]:
        """What each job has its ranks do, since the last time."""
        made = [job.make_command(job.ranks[0])[0] for job in self.jobs]
        self.jobs.clear()
        return made


def experiment(root, **changes: Any) -> Experiment:
    """The actor is trained on device 0 and samples on device 1, where the reference is."""
    made = Toy(root).experiment().with_mfc("gen", device_mesh="1")
    return replace(
        made, roles={**made.roles, "ref": replace(made.roles["ref"], device_mesh="1")}, **changes
    )


def parameters(
    made: Experiment, trained: Any = frozenset({"lora_a"}), shapes: Any = NAMES
) -> tuple[ParameterTransfers, Recorder]:
    places = [*made.role_meshes.items(), *made.copies]
    held = {name: build_whole_slice(shape) for name, shape in shapes.items()}
    built = {
        rank: BuiltEngines(
            {}, {}, {"actor": trained}, {place: held for place in places if rank in place[1].ranks}
        )
        for rank in range(made.num_devices)
    }
    recorder = Recorder()
    return ParameterTransfers(recorder, made, built, ["a", "b"]), recorder


def moved(commands: list[Any], known: dict[str, PrepareReallocation]) -> list[list[str]]:
    """The parameters that each move takes along."""
    known |= {
        command.key: command for command in commands if isinstance(command, PrepareReallocation)
    }
    return [
        [each.name for each in known[c.key].transfers]
        for c in commands
        if isinstance(c, MoveParameters)
    ]


def fails(error: BaseException) -> None:
    raise error


def train(parameters: ParameterTransfers) -> DeviceJob:
    job = DeviceJob("train", [0], fails, fails, fails)
    parameters.copies.mark_outdated("actor", job)
    return job


def test_a_copy_gets_weights_once_after_each_change_and_only_what_training_changes(
    tmp_path,
) -> None:
    there, recorder = parameters(experiment(tmp_path))
    known: dict[str, PrepareReallocation] = {}
    (place,) = experiment(tmp_path).copies
    there.initialize()
    assert moved(recorder.commands(), known) == [], "it begins with the same weights"
    assert there.copies.update_copy(place, fails) == 0
    assert moved(recorder.commands(), known) == []
    trained = train(there)
    assert there.copies.update_copy(place, fails) == 1
    assert recorder.jobs[0].after == [trained] and list(recorder.jobs[0].ranks) == [0, 1]
    assert recorder.jobs[0].roles == {"actor"}, "what the role is asked for next waits for it"
    assert moved(recorder.commands(), known) == [["lora_a"]]
    assert there.copies.update_copy(place, fails) == 1
    assert moved(recorder.commands(), known) == []
    there.copies.reset()
    assert there.copies.update_copy(place, fails) == 2
    assert moved(recorder.commands(), known) == [["base", "lora_a"]]
    train(there)
    assert there.copies.update_copy(place, fails) == 3
    assert moved(recorder.commands(), known) == [["lora_a"]]


def lagging(root) -> tuple[ParameterTransfers, Recorder, tuple[str, Any]]:
    """The completions may be sampled with old weights, on device 1."""
    made = Toy(root, staleness=3, ema=None, device_mesh="1").experiment()
    there, recorder = parameters(made)
    there.initialize()
    recorder.commands()
    (place,) = made.copies
    return there, recorder, place


def step(there: ParameterTransfers, number: int, *, keeps: bool = False) -> DeviceJob:
    if keeps:
        there.copies.save_weights("actor", number, fails)
    job = DeviceJob("train", [0], fails, fails, fails)
    there.copies.record_training("actor", job, number + 1)
    return job


def test_a_copy_gets_the_weights_of_a_version_when_a_call_wants_them(tmp_path) -> None:
    there, recorder, place = lagging(tmp_path)
    assert there.copies.update_copy(place, fails, 0) == 0
    step(there, 0, keeps=True)
    assert there.copies.update_copy(place, fails, 0) == 0 and recorder.commands() == [], (
        "it has them"
    )
    step(there, 1, keeps=True)
    (job,) = recorder.jobs
    assert list(job.ranks) == [0] and job.roles == {"actor"}, (
        "after the step before, before the next one"
    )
    (kept,) = recorder.commands()
    last = step(there, 2, keeps=True)
    recorder.commands()
    assert there.copies.update_copy(place, fails, 1) == 1
    (job,) = recorder.jobs
    assert job.after == [last] and list(job.ranks) == [0, 1]
    (move,) = recorder.commands()
    assert (
        isinstance(kept, SaveParameters)
        and isinstance(move, MoveParameters)
        and (kept.saved_version, kept.key) == (move.saved_version, move.key) == (1, kept.key)
    )
    assert there.copies.update_copy(place, fails, 2) == 2 and [
        each.saved_version for each in recorder.commands()
    ] == [2]
    assert there.copies.update_copy(place, fails, 3) == 3 and [
        each.saved_version for each in recorder.commands()
    ] == [None], "the newest"
    assert there.copies.update_copy(place, fails, 3) == 3 and recorder.commands() == []


def test_a_call_that_takes_newer_weights_does_not_wait_for_them(tmp_path) -> None:
    there, recorder, place = lagging(tmp_path)
    assert there.copies.update_running_copy(place, fails, 0) == 0
    first = step(there, 0)
    assert there.copies.update_running_copy(place, fails) == 0, "while a call is under way"
    (job,) = recorder.jobs
    assert job.after == [first] and not job.roles, "nothing is held up by it"
    recorder.commands()
    assert there.copies.update_running_copy(place, fails, 0) == 0 and recorder.commands() == [], (
        "they are on their way"
    )
    step(there, 1)
    assert there.copies.update_running_copy(place, fails, 1) == 1
    assert [job.roles for job in recorder.jobs] == [frozenset()]
    recorder.commands()
    step(there, 2)
    step(there, 3)
    assert there.copies.update_running_copy(place, fails, 4) == 3, (
        "those that it may have are older"
    )
    assert [job.roles for job in recorder.jobs] == [{"actor"}]


def test_after_a_restart_the_first_weights_are_the_newest(tmp_path) -> None:
    there, recorder, place = lagging(tmp_path)
    step(there, 0)
    there.copies.reset()
    assert there.copies.update_copy(place, fails, 7) == 1
    assert moved(recorder.commands(), {}) == [["base", "lora_a"]]
    step(there, 7)
    step(there, 8, keeps=True)
    assert moved(recorder.commands(), {}) == []
    assert there.copies.update_copy(place, fails, 8) == 2 and [
        each.saved_version for each in recorder.commands()
    ] == [8]
    assert there.copies.update_copy(place, fails) == 3 and [
        each.saved_version for each in recorder.commands()
    ] == [None]


def test_ranks_that_could_not_get_ready_say_why(tmp_path) -> None:
    there, recorder = parameters(experiment(tmp_path))
    (place,) = experiment(tmp_path).copies
    there.initialize()
    train(there)
    told: list[BaseException] = []
    there.copies.update_copy(place, told.append)
    *ready, move = recorder.jobs
    for job in ready:
        job.on_failed(RunError("no room"))
    move.on_failed(KeyError("way 0"))
    assert [str(error) for error in told] == ["no room"]


def test_a_roles_own_engine_needs_nothing(tmp_path) -> None:
    made = experiment(tmp_path)
    there, recorder = parameters(made)
    train(there)
    assert there.copies.update_copy(("actor", made.role_meshes["actor"]), fails) is None
    assert recorder.jobs == []


def test_where_an_engine_does_not_tell_what_it_trains_all_goes(tmp_path) -> None:
    there, recorder = parameters(experiment(tmp_path), trained=None)
    (place,) = experiment(tmp_path).copies
    train(there)
    there.copies.update_copy(place, fails)
    assert moved(recorder.commands(), {}) == [["base", "lora_a"]]


def test_a_role_that_is_written_to_gives_all_of_it_to_its_copies(tmp_path) -> None:
    made = experiment(tmp_path)
    made = replace(
        made, graph=replace(made.graph, syncs=[ParamSync("ref", "actor", after="train")])
    )
    there, recorder = parameters(made)
    (place,) = made.copies
    there.start_sync(made.graph.syncs[0], print, fails, print)
    there.copies.update_copy(place, fails)
    assert moved(recorder.commands(), {}) == [["base", "lora_a"], ["base", "lora_a"]]


def test_roles_that_lie_alike_copy_by_themselves(tmp_path) -> None:
    made = Toy(tmp_path).experiment()
    there, recorder = parameters(made)
    there.start_sync(made.graph.syncs[0], print, fails, print)
    assert [type(command) for command in recorder.commands()] == [SyncOnSameMesh]


def test_what_goes_each_step_is_told(tmp_path) -> None:
    there, _ = parameters(experiment(tmp_path))
    told = {what: (way.num_bytes_moved, way.across) for what, way in there.list_plans("actor")}
    assert told == {
        "to ref after train": (4 * 36, 4 * 36),
        "to its copy on d1f1t1p1c1e1 (device 1) for gen": (4 * 12, 4 * 12),
    }


def test_a_sync_between_different_networks_is_refused_at_the_start(tmp_path) -> None:
    made = experiment(tmp_path)
    there, _ = parameters(made)
    other = next(place for place in made.role_meshes.items() if place[0] == "ref")
    there._transfers._built[1].slices[other] = {"base": build_whole_slice((4, 6))}
    with pytest.raises(
        ConfigError, match=r"actor -> ref: parameters differ between the two roles \(lora_a\)"
    ):
        there.initialize()


def test_a_version_that_is_not_kept_is_named(tmp_path) -> None:
    there, _, place = lagging(tmp_path)
    step(there, 0, keeps=True)
    step(there, 1, keeps=True)
    step(there, 2)
    with pytest.raises(
        RunError,
        match=r"needs version 7 of the weights of 'actor', which was not saved; saved .*: 0, 1",
    ):
        there.copies.update_copy(place, fails, 7)


def test_the_bytes_of_new_weights_are_those_of_the_next_call(tmp_path) -> None:
    there, _ = parameters(made := experiment(tmp_path))
    place = next(each for each in made.copies if each[0] == "actor")
    assert there.copies.take_moved_bytes(("actor", made.role_meshes["actor"])) == {}
    there.copies.update_copy(place, fails)  # it has read the same file
    assert there.copies.take_moved_bytes(place) == {"num_weight_bytes": 0.0}
    there.copies.mark_outdated("actor", None)
    there.copies.update_copy(place, fails)
    assert there.copies.take_moved_bytes(place) == {"num_weight_bytes": 4.0 * 12}
