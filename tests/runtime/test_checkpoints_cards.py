"""Every checkpoint has a model card, which depends on nothing but the run's options and metrics."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runtime.toy import Toy
from weft.errors import RunError
from weft.observe import model_card
from weft.observe.model_card import README, strip_checksum
from weft.runtime.checkpoints import CheckpointStore
from weft.runtime.directory import FREE

CONTROL = {"save_freq_steps": 2, "eval_freq_steps": 3, "recover_freq_steps": 1}


def read_cards(toy: Toy) -> dict[str, str]:
    folder = toy.path / "checkpoints"
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob(README))}


def test_each_checkpoint_has_the_card_of_its_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path, control=CONTROL)
    toy.run()
    cards = read_cards(toy)
    saved = sorted(path.name for path in (toy.path / "checkpoints" / "actor").glob("step*"))
    assert sorted(Path(name).parent.name for name in cards) == saved and len(saved) > 2
    for name, text in cards.items():
        step = Path(name).parent.name.removeprefix("step")
        assert strip_checksum(text) is not None
        assert f"# toy/run, step {step}\n" in text and f"steps 1 to {step}." in text
        assert str(tmp_path) not in text


@pytest.mark.slow
def test_a_run_that_was_stopped_writes_the_same_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Toy(tmp_path / "whole", control=CONTROL)
    whole.run()
    stopped = Toy(tmp_path / "stopped", control=CONTROL)
    save = CheckpointStore.save

    def fail_at_four(store: CheckpointStore, step: int, *, milestone: bool) -> list[Path]:
        if step == 4:
            raise RunError("stopped by the test")
        return save(store, step, milestone=milestone)

    monkeypatch.setattr(CheckpointStore, "save", fail_at_four)
    with pytest.raises(RunError, match="stopped by the test"):
        stopped.run()
    monkeypatch.undo()
    shutil.rmtree(stopped.path / "checkpoints")
    stopped.run()
    cards = read_cards(whole)
    made_again = read_cards(stopped)
    assert made_again and made_again == {name: cards[name] for name in made_again}


def test_options_that_may_differ_in_a_continuation_are_not_in_a_card() -> None:
    assert set(FREE) <= model_card.UNRELATED
