"""The search against trying every placement of random small problems."""

from __future__ import annotations

import random

import pytest

from tests.planner.placements import build_random_problem, find_best, score_placement
from weft.planner.problem import PlacementProblem
from weft.planner.search import search_placement


def check_optimum(problem: PlacementProblem) -> None:
    excess, seconds = find_best(problem)
    found = search_placement(problem, [0] * len(problem.units))
    assert found.is_exhaustive
    assert found.best.excess_bytes == pytest.approx(excess, abs=1.0)
    assert found.best.step_seconds == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_all_placements_is_found(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        check_optimum(build_random_problem(draw, 200))


@pytest.mark.slow_cases("100", "101", "102")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_the_best_of_more_placements_is_found(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        check_optimum(build_random_problem(draw, 2000))


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_following_each_device(seed: int) -> None:
    draw = random.Random(1000 + seed)
    for _ in range(10):
        problem = build_random_problem(draw, 100_000)
        for _ in range(10):
            choice = [draw.randrange(len(unit.meshes)) for unit in problem.units]
            meshes = [unit.meshes[index] for unit, index in zip(problem.units, choice, strict=True)]
            excess, seconds, devices = problem.compute_score(choice)
            expected = score_placement(problem, meshes)
            assert excess == pytest.approx(expected[0], abs=1.0)
            assert seconds == pytest.approx(expected[1])
            assert devices == expected[2]
