"""The books of a master: lines in the order of decisions, of the step that they belong to."""

from __future__ import annotations

from weft.graph.ready import Firing
from weft.runtime.books import Books
from weft.runtime.step_metrics import Measured


def measured(value: float) -> Measured:
    return Measured({"loss": value}, 2, 1.0)


def test_a_line_holds_its_own_step_in_the_order_of_decisions() -> None:
    books = Books()
    first, ahead, train = (
        Firing("gen", ("a", "b"), 0),
        Firing("gen", ("c", "d"), 1),
        Firing("train", ("a", "b"), 0),
    )
    for firing in (first, ahead, train):
        books.decide(firing)
    books.note("train", Measured({"rounds": 2.0}, 1, 0.0))
    assert books.are_open({"c", "d"}) and books.open_ids() == {"a", "b", "c", "d"}
    books.end(train, measured(3.0))
    books.end(first, measured(1.0))
    assert not books.are_open({"c", "d"}) and books.are_open()
    assert list(books.close({"c", "d"}).items()) == [
        ("time/gen", 1.0),
        ("time/train", 1.0),
        ("gen/loss", 1.0),
        ("train/loss", 3.0),
        ("train/rounds", 2.0),
    ]
    books.end(ahead, measured(2.0))
    assert books.close() == {"time/gen": 1.0, "gen/loss": 2.0}


def test_what_was_measured_ahead_survives_a_restart() -> None:
    books, other = Books(), Books()
    firing = Firing("gen", ("c", "d"), 1)
    books.decide(firing)
    books.end(firing, measured(2.0))
    assert books.close({"c"}) == {}
    other.load_state_dict(books.state_dict())
    assert not other.are_open() and other.close() == books.close() == {
        "time/gen": 1.0,
        "gen/loss": 2.0,
    }
