"""Tests with the mark `overlap`, which mostly wait: several of a module run at the same time.

The first one that is called starts all marked tests of its module that were selected, on threads.
Each test then waits for its own end and fails with its own error. A marked test therefore

- takes fixtures of the module or the session only, which the tests share;
- changes nothing of this process, such as its environment: a command gets variables of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import pytest

MARK = "overlap"
# Tests at a time: one with a Ray cluster needs a third of a core, and up to 2 GB of memory.
THREADS = 3
Result = TypeVar("Result")
RUNNING = pytest.StashKey[dict[str, Future[None]]]()


@contextmanager
def start(
    make: Callable[..., Result], *arguments: object, **options: object
) -> Iterator[Future[Result]]:
    """Make what tests compare with, on a thread, while they wait for other things."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(make, *arguments, **options)


def run_test(item: pytest.Function) -> bool:
    """Run a marked test, together with the others of its module; return False for other tests."""
    if item.get_closest_marker(MARK) is None:
        return False
    module = item.getparent(pytest.Module)
    assert module is not None
    if RUNNING not in module.stash:
        module.stash[RUNNING] = _start_tests(module, item)
    module.stash[RUNNING][item.nodeid].result()
    return True


def _start_tests(module: pytest.Module, first: pytest.Function) -> dict[str, Future[None]]:
    """Start the selected marked tests of a module, `first` ahead of the others."""
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix=MARK)
    # the tests that have begun end by themselves; their commands have limits of time
    module.addfinalizer(partial(pool.shutdown, cancel_futures=True))
    others = []
    for each in module.session.items:
        if (
            isinstance(each, pytest.Function)
            and each is not first
            and each.getparent(pytest.Module) is module
            and each.get_closest_marker(MARK) is not None
        ):
            others.append(each)
    return {
        each.nodeid: pool.submit(each.obj, **_find_arguments(each, first))
        for each in [first, *others]
    }


def _find_arguments(item: pytest.Function, first: pytest.Function) -> dict[str, object]:
    """Return a test's parameters and fixtures, which are set up for `first` where need be."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    arguments = {}
    for name in item._fixtureinfo.argnames:
        if name in parameters:
            arguments[name] = parameters[name]
            continue
        scope = item._fixtureinfo.name2fixturedefs[name][-1].scope
        assert scope not in ("function", "class"), f"{item.nodeid}: {name} is the test's own"
        arguments[name] = first._request.getfixturevalue(name)
    return arguments
