"""Fixtures for all tests, and their environment, which is made before anything else is imported."""

# ruff: noqa: E402
from __future__ import annotations

from tests import environment

environment.prepare()

import gc
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest
from packaging.version import Version

from tests import overlap
from tests.ranks import Ranks

hypothesis.settings.register_profile("weft", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("weft")

ROOT = Path(__file__).resolve().parent.parent
UNTIL = "WEFT_TEST_UNTIL"  # seconds since the epoch; no test begins after that
# Tests that make backward passes in two halves without weft's check of the version of torch.
TWO_HALVES = (
    "zero_bubble",
    "zbv",
    "test_one_rank_holds_all_stages",
    "test_hooks_of_parameters_see_both_halves",
    "test_processes_with_their_own_imports",
    "test_several_stages_on_each_of_two_processes",
    "test_two_ranks_that_leave_compute_as_those_that_stay[stages",
    "test_two_ranks_that_leave_compute_as_those_that_stay[lora",
    "test_layouts_that_a_network_cannot_have_are_refused_by_name[options2",
)
IS_OLD = Version(version("torch")) < Version("2.13")
NEEDS_TORCH = re.compile(  # weft's message
    r"pipeline_schedule=(zero_bubble|interleaved_zero_bubble|zbv) needs torch 2\.13"
)
# Files with a few tests that take minutes. At the end of a tier, they would leave a core idle.
STARTED_FIRST = (
    "tests/launch/test_cluster_failures.py",
    "tests/e2e/test_real_data.py",
    "tests/launch/test_supervisor_restarts.py",
    "tests/compat/easylm/test_commands_guide.py",
    "tests/launch/test_supervisor.py",
    "tests/cli/test_named_data.py",
)
TOO_LATE = f"not run: it would begin after {UNTIL}"


def pytest_configure() -> None:
    environment.reset_warnings()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave the modules and tests that collection creates to no garbage collection.

    They live until the end. Looking through them takes a third of collection itself, and afterwards
    more than a second in each full garbage collection of a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip tests, and their fixtures, once the time of a CI run is over: a machine at half the
    speed still ends in time.
    """
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(TOO_LATE)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_other_case(item, "default_cases"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and _is_other_case(item, "slow_cases"):
            item.add_marker(pytest.mark.exhaustive)
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)  # not in the default tier either
        if IS_OLD and any(sign in item.nodeid for sign in TWO_HALVES):
            item.add_marker(pytest.mark.skip(reason="zero-bubble schedules need torch 2.13"))


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_order_files(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files: `STARTED_FIRST`, then the others by number of tests, the largest first.

    Without `--no-loadscope-reorder`, `pytest -n` has its own order, and nothing is sorted here.
    """
    if config.getoption("loadscopereorder", True):
        return
    files = [item.nodeid.partition("::")[0] for item in items]
    counts = Counter(files)
    ranks = {}
    for file in counts:
        is_first = file in STARTED_FIRST
        ranks[file] = (STARTED_FIRST.index(file) if is_first else len(STARTED_FIRST), -counts[file])
    places = sorted(range(len(items)), key=lambda place: ranks[files[place]])
    items[:] = [items[place] for place in places]


def _is_other_case(item: pytest.Item, mark: str) -> bool:
    """Return whether the test has the given mark, which lists cases, and is not one of them."""
    cases = item.get_closest_marker(mark)
    return cases is not None and not any(part in item.callspec.id for part in cases.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that mostly wait at the same time."""
    return overlap.run_test(pyfuncitem) or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test in which weft refuses such passes because of the version of torch."""
    try:
        return (yield)
    except Exception as error:
        if IS_OLD and (refusal := NEEDS_TORCH.search(str(error))):
            pytest.skip(refusal[0])
        raise


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Warn of tests that were not run for lack of time, with the files that they are in."""
    reports = terminalreporter.stats.get("skipped", [])
    late = [report.nodeid for report in reports if TOO_LATE in str(report.longrepr)]
    if late:
        terminalreporter.section("NOT RUN FOR LACK OF TIME", red=True)
        files = sorted({name.partition("::")[0] for name in late})
        terminalreporter.write_line(f"!!! {len(late)} tests of: {', '.join(files)}")


def _data_dir() -> Path:
    return Path(os.environ.get("WEFT_TEST_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(autouse=True)
def _keep_environment() -> Iterator[None]:
    """Undo what a test, or what it imports, sets in the environment: Ray and deterministic torch
    do, for instance.
    """
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data; tests that need it skip where it is absent."""
    path = _data_dir()
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set WEFT_TEST_DATA to the folder that holds it")
    return path


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes that run functions together."""
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="module")
def forked_devices() -> Iterator[None]:
    """Let the runs of a module take forked processes as their devices, in place of Ray's actors,
    which start slowly.
    """
    from tests.runtime.forked_devices import fork_devices

    with pytest.MonkeyPatch.context() as patch:
        fork_devices(patch.setattr)
        yield
