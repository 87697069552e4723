"""Search for the placement of a graph's calls that fits in memory and has the shortest step time.

As in ReaL (Mei et al. 2024, arXiv 2406.14088, section 5), each call has its own devices and layout.
Calls are placed one after another, and a partial placement is dropped as soon as no completion can
be better than what was found (branch and bound), so that the best placement is found for certain.
If that takes too long, simulated annealing with a fixed seed improves the first placement, and the
result has a lower bound of the step time of all placements. The functions are pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.planner.mesh_table import Floats, Integers
from weft.planner.problem import PlacementEstimate, PlacementProblem
from weft.planner.scoring import PlacementScores
from weft.planner.symmetry import DeviceSymmetry, describe_pattern
from weft.topology import Layout, Mesh

# Placements that branch and bound may score before it gives up: at first, and after annealing
FIRST_PLACEMENTS = 100_000
MAX_PLACEMENTS = 2_000_000
BATCH = 20_000  # placements that are scored together, about
# Annealing: placements that change at the same time, and how often they do
CHAINS = 48
ANNEALING_STEPS = 400
RESULTS = 4  # results of annealing that are improved further
PAIR_PLACEMENTS = 20_000  # placements that are scored to move two units
# Temperatures of annealing at its start and end, in units of log step time
INITIAL_TEMPERATURE = 0.3
FINAL_TEMPERATURE = 0.003
SEED = 1


@dataclass(frozen=True)
class SearchResult:
    """Result of a search for a placement.

    Attributes:
        best: The best placement.
        first: The placement from which the search started.
        num_tried: Number of placements, whole and partial, that were scored.
        is_exhaustive: True if no placement that fits has a shorter step than `best`, for certain.
        next_best: The best placement that differs from `best` in more than the order of equal
            devices, among those that were scored; None if there is no other.
        bound_seconds: No placement that fits has a shorter step; equal to the step time of `best`
            if `is_exhaustive`.
    """

    best: PlacementEstimate
    first: PlacementEstimate
    num_tried: int
    is_exhaustive: bool
    next_best: PlacementEstimate | None = None
    bound_seconds: float = 0.0


def search_placement(problem: PlacementProblem, start: Sequence[int]) -> SearchResult:
    """Search for the best placement, starting from `start`, and return the result.

    Calls that are placed together form a unit. A placement has one index per unit, which selects
    the unit's mesh from `PlacementUnit.meshes`. The result is never worse than `start`. The search
    is deterministic.
    """
    search = _PlacementSearch(problem)
    begin = [int(numbers[0]) for numbers in problem.scorer.find_numbers(start)]
    search.descend(begin)
    # Equal devices are tried once. The first device is special: with it alone, no other process is
    # started.
    search.keep_first_device()
    search.drop_candidates()
    low = search.try_all(search.movable, search.get_best(), FIRST_PLACEMENTS)
    if low is not None:
        for numbers in search.anneal(begin):
            search.descend(numbers)
        search.descend_in_pairs()
        search.drop_candidates()
        low = search.try_all(search.movable, search.get_best(), MAX_PLACEMENTS)
    search.score_neighbors()
    scorer = problem.scorer
    best = problem.estimate(scorer.find_choice(search.get_best()))
    other = search.best_two[1] if len(search.best_two) > 1 else None
    if (
        low is not None
        and not best.excess_bytes
        and np.float32(low) >= np.float32(best.step_seconds)
    ):
        low = None  # no remaining placement has a shorter step
    return SearchResult(
        best,
        problem.estimate(start),
        scorer.num_scored,
        is_exhaustive=low is None,
        next_best=None if other is None else problem.estimate(scorer.find_choice(other.numbers)),
        bound_seconds=best.step_seconds if low is None else min(low, best.step_seconds),
    )


def list_uniform_placements(problem: PlacementProblem) -> list[list[int]]:
    """Return the placements in which all movable calls are data-parallel on the same devices.

    A placement is a list with one index per unit (a group of calls that are placed together). The
    index selects the unit's mesh from `PlacementUnit.meshes`. The calls of a unit with a single
    mesh are not movable.

    The movable calls use the first n devices, and there are up to three placements for each n: one
    with the weights of trained roles sharded in all calls, one without any sharded weights, and one
    with the weights of trained roles sharded only in the calls that train.
    """
    placements = []
    indices = []
    for unit in problem.units:
        indices.append({mesh: number for number, mesh in enumerate(unit.meshes)})
    for size in sorted({len(mesh.ranks) for unit in problem.units for mesh in unit.meshes}):
        for shards_training, shards_others in ((size, size), (1, 1), (size, 1)):
            choice = []
            for unit, index_of in zip(problem.units, indices, strict=True):
                if unit.trains:
                    shards = shards_training
                elif problem.is_trained(unit.role):
                    shards = shards_others
                else:
                    shards = 1
                wanted = Mesh(Layout(data=size, fsdp=shards), tuple(range(size)))
                if len(unit.meshes) == 1:
                    choice.append(0)
                elif wanted in index_of:
                    choice.append(index_of[wanted])
            if len(choice) == len(problem.units) and choice not in placements:
                placements.append(choice)
    return placements


@dataclass(frozen=True)
class _RankedPlacement:
    """Placement with its score.

    `numbers` are the numbers of its meshes. `pattern` is equal for placements that differ only in
    the order of equal devices.
    """

    score: tuple[float, float, int]
    numbers: list[int]
    pattern: Hashable


class _PlacementSearch:
    """State of a search: the candidates, and the best two placements that differ.

    Attributes:
        movable: Units with several candidates, in the order in which they are placed.
        best_two: The best placement, and the best one that differs from it.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._scorer = problem.scorer
        self._table = self._scorer.table
        self._candidates = list(self._scorer.numbers)
        self._firsts = [group.first for group in problem.devices.groups]
        self.best_two: list[_RankedPlacement] = []
        # Place trained units first, whose weights others use, and then those with the most work.
        movable = [unit for unit, each in enumerate(problem.units) if len(each.meshes) > 1]
        self.movable = sorted(
            movable,
            key=lambda unit: (not problem.units[unit].trains, -self._scorer.get_least_area(unit)),
        )
        self._symmetry = _find_symmetry(problem, movable)
        self._lists: dict[tuple[int, tuple[int, ...]], Integers] = {}

    def get_best(self) -> list[int]:
        """Return the mesh numbers of the best placement."""
        return self.best_two[0].numbers

    # -- the best placements

    def _keep_best(self, columns: Sequence[Integers], scores: PlacementScores) -> None:
        """Keep the best two different placements of those found so far and those of `columns`."""
        rounded = _round(scores)
        for index in rounded.sort():
            score = rounded.get(index)
            if len(self.best_two) > 1 and score >= self.best_two[1].score:
                return
            numbers = [int(each[index if len(each) > 1 else 0]) for each in columns]
            new = _RankedPlacement(score, numbers, self._describe(numbers))
            others = [each for each in self.best_two if each.pattern != new.pattern]
            same = [each for each in self.best_two if each.pattern == new.pattern]
            better = min([*same, new], key=lambda each: each.score)
            self.best_two = sorted([*others, better], key=lambda each: each.score)[:2]

    def _can_improve(self, scores: PlacementScores) -> npt.NDArray[np.bool_]:
        """Return which scores are better than those of the best two different placements."""
        if len(self.best_two) < 2:
            return np.ones(len(scores.seconds), np.bool_)
        return _is_less(_round(scores), self.best_two[1].score)

    def _describe(self, numbers: Sequence[int]) -> Hashable:
        table = self._table
        meshes = []
        for number in numbers:
            meshes.append((table.meshes[number].layout, table.runs[table.range_of[number]]))
        return describe_pattern(meshes, self._problem.rates.per_node, self._firsts)

    # -- candidates

    def _list_candidates(self, unit: int, used: Iterable[int]) -> Integers:
        """Return the candidates of a unit that differ in more than the order of equal devices.

        `used` are the numbers of meshes of other units.
        """
        if self._symmetry is None:
            return self._candidates[unit]
        table = self._table
        key = (unit, tuple(sorted({int(table.range_of[number]) for number in used})))
        if key not in self._lists:
            is_distinct = np.zeros(len(table.ranges), np.bool_)
            is_distinct[self._symmetry.list_distinct([table.runs[each] for each in key[1]])] = True
            numbers = self._candidates[unit]
            self._lists[key] = numbers[is_distinct[table.range_of[numbers]]]
        return self._lists[key]

    def drop_candidates(self) -> None:
        """Drop meshes with which no placement is better than those found.

        Of calls that share no weights with other calls, also drop meshes if another layout of the
        same devices is at least as fast and needs no more memory.
        """
        table = self._table
        for unit in self.movable:
            numbers = self._candidates[unit]
            self._candidates[unit] = numbers[~self._scorer.find_dominated(unit, numbers)]
        before = -1
        while before != (now := sum(len(each) for each in self._candidates)):
            before = now
            for unit in self.movable:
                numbers = self._candidates[unit]
                classes, examples = np.unique(table.classes[numbers], return_index=True)
                columns: list[Integers | None] = [None] * len(self._candidates)
                columns[unit] = numbers[examples]
                keep = self._can_improve(self._scorer.score(columns))
                is_kept = np.zeros(len(table.examples), np.bool_)
                is_kept[classes[keep]] = True
                remaining = numbers[is_kept[table.classes[numbers]]]
                # If none remains, the best placements cannot be improved. Keep one for the bounds.
                self._candidates[unit] = remaining if len(remaining) else numbers[:1]
            self._scorer.restrict(self._candidates)
        self._lists.clear()

    # -- improvement of one placement

    def descend(self, numbers: Sequence[int]) -> None:
        """Move one unit after the other to its best mesh, until no move improves the score."""
        current = list(numbers)
        columns = [np.array([each]) for each in current]
        scores = self._scorer.score(columns)
        self._keep_best(columns, scores)
        best = _round(scores).get(0)
        improved = True
        while improved:
            improved = False
            for unit in self.movable:
                candidates, scores = self._move(unit, current, best)
                if len(candidates):
                    first = scores.sort()[0]
                    if scores.get(first) < best:
                        best = scores.get(first)
                        current[unit] = int(candidates[first])
                        improved = True

    def _move(
        self, unit: int, numbers: Sequence[int], best: tuple[float, float, int] | None = None
    ) -> tuple[Integers, PlacementScores]:
        """Move one unit of a placement to each of its candidates, and keep the best results.

        Returns the candidates that can be better than `best` or than the best placements so far,
        with their scores.
        """
        others = [number for other, number in enumerate(numbers) if other != unit]
        columns = [np.array([each]) for each in numbers]
        columns[unit] = self._list_candidates(unit, others)
        rough = self._scorer.score(columns, moves=False)
        keep = self._can_improve(rough)
        if best is not None:
            keep |= _is_less(_round(rough), best)
        columns[unit] = columns[unit][keep]
        if not keep.any():
            return columns[unit], rough.select(keep)
        scores = self._scorer.score(columns)
        self._keep_best(columns, scores)
        return columns[unit], _round(scores)

    def keep_first_device(self) -> None:
        """Keep the placement of all units on the first device, if they can be placed there."""
        numbers = []
        for meshes in self._scorer.numbers:
            at_first = (self._table.starts[meshes, 0] == 0) & (self._table.sizes[meshes] == 1)
            if not at_first.any():
                return
            numbers.append(meshes[at_first][:1])
        self._keep_best(numbers, self._scorer.score(numbers))

    def descend_in_pairs(self) -> None:
        """Move two units at a time to their best meshes, until no move improves the score."""
        before = None
        while before != self.best_two[0].score:
            before = self.best_two[0].score
            for pair in itertools.combinations(self.movable, 2):
                self.try_all(pair, self.get_best(), PAIR_PLACEMENTS)

    def score_neighbors(self) -> None:
        """Score all placements that differ from the best one in one unit."""
        self._candidates = list(self._scorer.numbers)
        self._lists.clear()
        best = self.get_best()
        for unit in self.movable:
            self._move(unit, best)

    def anneal(self, start: Sequence[int]) -> list[list[int]]:
        """Return the best placements that simulated annealing finds, a few of them.

        Several placements change at the same time. In each step, one or two units of each are moved
        to random meshes. The time to copy weights is left out.
        """
        draw = np.random.default_rng(SEED)
        shares = [self._compute_shares(unit) for unit in range(len(self._candidates))]
        current = np.repeat(np.array(start, np.int64)[:, None], CHAINS, axis=1)
        energy = self._compute_energy(self._scorer.score(list(current), moves=False))
        best, least = current.copy(), energy.copy()
        for turn in range(ANNEALING_STEPS):
            heat = INITIAL_TEMPERATURE * (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** (
                turn / ANNEALING_STEPS
            )
            new = current.copy()
            count = min(len(self.movable), int(draw.integers(1, 3)))
            for unit in draw.choice(self.movable, count, replace=False):
                drawn = np.searchsorted(shares[unit], draw.random(CHAINS))
                new[unit] = self._candidates[unit][drawn]
            new_energy = self._compute_energy(self._scorer.score(list(new), moves=False))
            # Accept a worse placement with a probability that falls with the temperature.
            accepted = draw.random(CHAINS) < np.exp(np.minimum(0.0, (energy - new_energy) / heat))
            current = np.where(accepted, new, current)
            energy = np.where(accepted, new_energy, energy)
            best = np.where(energy < least, current, best)
            least = np.minimum(energy, least)
        chosen = []
        for chain in np.argsort(least, kind="stable")[:RESULTS]:
            chosen.append([int(number) for number in best[:, chain]])
        return chosen

    def _compute_shares(self, unit: int) -> Floats:
        """Return the cumulative probabilities with which annealing draws the unit's candidates.

        All layouts of a range's size are equally likely, and then all of its positions.
        """
        classes = self._table.classes[self._candidates[unit]]
        _, which, counts = np.unique(classes, return_inverse=True, return_counts=True)
        shares = np.cumsum(1.0 / counts[which])
        return shares[:-1] / shares[-1]

    def _compute_energy(self, scores: PlacementScores) -> Floats:
        """Return the values that annealing minimizes: log step times plus a penalty for memory.

        The penalty is proportional to the bytes that exceed a device's capacity.
        """
        capacity = max(self._problem.rates.capacity, 1.0)
        return np.log(np.maximum(scores.seconds, 1e-12)) + 10.0 * scores.excess / capacity

    # -- branch and bound

    def try_all(self, units: Sequence[int], numbers: Sequence[int], most: int) -> float | None:
        """Place `units` in all ways that may be better than the best placements; keep other units.

        `numbers` are the meshes of all units, and `most` is the number of placements that may be
        scored. Returns None if nothing is left to try, or else a lower bound of the step time of
        all placements of these units.
        """
        if not units:
            return None
        limit = self._scorer.num_scored + most
        nothing = PlacementScores(np.zeros(1), np.zeros(1), np.zeros(1, np.int64))
        # Partial placements by the number of placed units, [placements, units], from the best on
        pending = {0: (np.zeros((1, 0), np.int64), nothing)}
        while pending:
            level = max(pending)
            rows, scores = pending.pop(level)
            keep = self._can_improve(scores)
            rows, scores = rows[keep], scores.select(keep)
            if not len(rows):
                continue
            if self._scorer.num_scored >= limit:
                pending[level] = rows, scores
                return self._compute_bound([each for _, each in pending.values()])
            count = self._place_next(units, numbers, level, rows, pending)
            if count < len(rows):
                pending[level] = rows[count:], scores.select(slice(count, None))
        return None

    def _place_next(
        self,
        units: Sequence[int],
        numbers: Sequence[int],
        level: int,
        rows: Integers,
        pending: dict[int, tuple[Integers, PlacementScores]],
    ) -> int:
        """Place one more unit in the first of the partial placements `rows`.

        Complete placements are compared with the best ones; partial ones are added to `pending` if
        they can become the best. Returns the number of rows that were used.
        """
        unit = units[level]
        others = [numbers[each] for each in range(len(numbers)) if each not in units]
        lists: list[Integers] = []
        while len(lists) < len(rows) and (not lists or len(lists) * len(lists[-1]) < BATCH):
            lists.append(self._list_candidates(unit, [*others, *rows[len(lists)]]))
        parents = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
        placed = np.column_stack([rows[parents], np.concatenate(lists)])
        # Score without the time to copy weights, then with it, as far as placements can be the
        # best.
        for moves in (False, True):
            columns: list[Integers | None] = [np.array([each]) for each in numbers]
            for place, placed_unit in enumerate(units):
                columns[placed_unit] = placed[:, place] if place <= level else None
            scores = self._scorer.score(columns, moves=moves)
            keep = self._can_improve(scores)
            placed, scores = placed[keep], scores.select(keep)
            if not len(placed):
                return len(lists)
        if level + 1 == len(units):
            complete = [np.array([number]) for number in numbers]
            for place, placed_unit in enumerate(units):
                complete[placed_unit] = placed[:, place]
            self._keep_best(complete, scores)
        else:
            order = scores.sort()
            pending[level + 1] = placed[order], scores.select(order)
        return len(lists)

    def _compute_bound(self, pending: Iterable[PlacementScores]) -> float:
        """Return a lower bound of the step time of the placements that were not tried."""
        low = np.inf
        for scores in pending:
            possible = scores.select(self._can_improve(scores))
            if len(possible.seconds):
                low = min(low, float(np.where(possible.excess > 0, 0, possible.seconds).min()))
        return low


def _round(scores: PlacementScores) -> PlacementScores:
    """Return the scores with seconds rounded to float32, so that rounding errors don't count."""
    return scores._replace(seconds=scores.seconds.astype(np.float32).astype(np.float64))


def _is_less(scores: PlacementScores, other: tuple[float, float, int]) -> npt.NDArray[np.bool_]:
    """Return which scores are less than another one."""
    excess, seconds, devices = other
    fewer = (scores.seconds == seconds) & (scores.devices < devices)
    equal = scores.excess == excess
    return (scores.excess < excess) | (equal & ((scores.seconds < seconds) | fewer))


def _find_symmetry(problem: PlacementProblem, movable: Sequence[int]) -> DeviceSymmetry | None:
    """Return the symmetries of the devices, or None if the candidates do not have them.

    Processes that share cores are not alike: a run starts all of them up to the last in use.
    """
    scorer = problem.scorer
    table = scorer.table
    candidates = [scorer.numbers[unit] for unit in movable]
    if problem.rates.cores is not None or not candidates:
        return None
    if not all(table.is_adjacent[numbers].all() for numbers in candidates):
        return None
    # Each unit must have candidates on all ranges of a size and kind, with the same layouts.
    counts: dict[object, int] = {}
    positions = {}
    for number in np.unique(np.concatenate(candidates)):
        positions[int(table.range_of[number])] = table.class_positions[table.classes[number]]
    for position in positions.values():
        counts[position] = counts.get(position, 0) + 1
    for numbers in candidates:
        classes: dict[int, set[int]] = {}
        for each, own_class in zip(table.range_of[numbers], table.classes[numbers], strict=True):
            classes.setdefault(int(each), set()).add(int(own_class))
        by_position: dict[object, list[set[int]]] = {}
        for each, layouts in classes.items():
            by_position.setdefault(positions[each], []).append(layouts)
        for position, alike in by_position.items():
            if len(alike) != counts[position] or any(each != alike[0] for each in alike):
                return None
    runs = {table.runs[each][0]: each for each in positions}
    firsts = [group.first for group in problem.devices.groups]
    return DeviceSymmetry(runs, problem.num_devices, problem.rates.per_node, firsts)
