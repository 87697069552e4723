"""The books of a master: lines in the order of decisions, of the step that they belong to."""

from __future__ import annotations

from weft.graph.ready import Firing
from weft.runtime.firings import FiringMetrics, StepLedger


def measured(value: float) -> FiringMetrics:
    return FiringMetrics({"loss": value}, 2, 1.0)


def test_a_line_holds_its_own_step_in_the_order_of_decisions() -> None:
    books = StepLedger()
    first, ahead, train = (
        Firing("gen", ("a", "b"), 0),
        Firing("gen", ("c", "d"), 1),
        Firing("train", ("a", "b"), 0),
    )
    for firing in (first, ahead, train):
        books.add_firing(firing)
    books.record_measurements("train", FiringMetrics({"rounds": 2.0}, 1, 0.0))
    assert books.has_open_firings({"c", "d"}) and books.collect_open_ids() == {"a", "b", "c", "d"}
    books.finish_firing(train, measured(3.0))
    books.finish_firing(first, measured(1.0))
    assert not books.has_open_firings({"c", "d"}) and books.has_open_firings()
    assert list(books.close_step({"c", "d"}).items()) == [
        ("time/gen", 1.0),
        ("time/train", 1.0),
        ("gen/loss", 1.0),
        ("train/loss", 3.0),
        ("train/rounds", 2.0),
    ]
    books.finish_firing(ahead, measured(2.0))
    assert books.close_step() == {"time/gen": 1.0, "gen/loss": 2.0}


def test_what_was_measured_ahead_survives_a_restart() -> None:
    books, other = StepLedger(), StepLedger()
    firing = Firing("gen", ("c", "d"), 1)
    books.add_firing(firing)
    books.finish_firing(firing, measured(2.0))
    assert books.close_step({"c"}) == {}
    other.load_state_dict(books.state_dict())
    assert not other.has_open_firings() and other.close_step() == books.close_step() == {
        "time/gen": 1.0,
        "gen/loss": 2.0,
    }
