"""The metric of the best checkpoint: its direction, its name, and the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.errors import CheckpointError, ConfigError
from weft.observe.best import (
    BestRecord,
    build_missing_error,
    check_metric_name,
    check_options,
    find_best_checkpoint,
    find_direction,
)


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("eval/loss", -1),
        ("eval/held/perplexity", -1),
        ("critic_train/value_loss", -1),
        ("eval/reward", 1),
        ("eval/rewards/accuracies", 1),
        ("eval/gsm8k/exact_match", 1),
        ("eval/humaneval/pass@1", 1),
        ("eval/arc/acc_norm,none", 1),
        ("eval/wiki/bits_per_byte,none", -1),
    ],
)
def test_the_name_tells_the_direction(metric: str, direction: int) -> None:
    assert find_direction(metric) == direction
    assert find_direction(metric, "max") == 1 and find_direction(metric, "min") == -1


@pytest.mark.parametrize("metric", ["actor_train/kl", "eval/response_length", "time/train/loss"])
def test_a_name_that_does_not_tell_needs_the_mode(metric: str) -> None:
    with pytest.raises(ConfigError, match=f"^save_best={metric}: .* add save_best_mode=max or"):
        find_direction(metric)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, "min", None, 0.0), "save_best_mode=min: only used with save_best=METRIC"),
        ((None, None, 3, 0.0), "early_stop_patience=3: only used with save_best=METRIC"),
        (("eval/loss", "down", None, 0.0), "save_best_mode='down': must be max or min"),
        (("eval/loss", None, 0, 0.0), "early_stop_patience=0: must be at least 1"),
        (("eval/loss", None, 1, -1.0), "early_stop_min_delta=-1.0: must be at least 0"),
        (("eval/loss", None, None, 0.1), "early_stop_min_delta=0.1: only used with early_stop_pat"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_options(*options)


@pytest.mark.parametrize(
    ("metric", "evaluates", "message"),
    [
        ("eval/loss", False, "there is nothing to evaluate on; set dataset.valid_path"),
        ("loss", True, "must be the name of a metric in metrics.jsonl, such as eval/loss or"),
        ("actor_trian/loss", False, "such as actor_train/loss"),
        ("eval/", True, "must be the name of a metric"),
        ("eval_loss", True, "must be the name of a metric"),
    ],
)
def test_a_name_of_nothing_is_refused_before_the_run(
    metric: str, evaluates: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^save_best={metric}: .*{message}"):
        check_metric_name(metric, ["gen", "actor_train"], evaluates=evaluates)
    check_metric_name("actor_train/loss", ["gen", "actor_train"], evaluates=False)
    check_metric_name("eval/anything", ["gen"], evaluates=True)


def test_a_metric_that_the_run_lacks_is_refused_with_those_that_it_has() -> None:
    names = ["step", "time/gen", "eval/loss", "eval/accuracy"]
    error = str(build_missing_error("eval/acuracy", names))
    assert "did you mean eval/accuracy?" in error
    assert error.endswith("it has eval/accuracy, eval/loss")


def test_a_record_is_read_as_far_as_it_is_one(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints" / "best.json"
    assert BestRecord.read(tmp_path) is None
    file.parent.mkdir()
    for wrong in ("", "[]", '{"step": "4", "value": 1}', '{"step": 4, "value": null}'):
        file.write_text(wrong)
        assert BestRecord.read(tmp_path) is None
    file.write_text(json.dumps({"step": 4, "metric": "eval/loss", "value": 1.25}))
    record = BestRecord.read(tmp_path)
    assert record == BestRecord(4, "eval/loss", 1.25)
    assert record.format_text() == "step 4, eval/loss 1.25"


def test_the_best_checkpoint_is_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no best checkpoint; a run with save_best=MET"):
        find_best_checkpoint(tmp_path, "actor")
    folder = tmp_path / "checkpoints" / "actor" / "step4"
    folder.mkdir(parents=True)
    record = {"step": 4, "metric": "eval/loss", "value": 1.25}
    (tmp_path / "checkpoints" / "best.json").write_text(json.dumps(record))
    assert find_best_checkpoint(tmp_path, "actor") == folder
    with pytest.raises(CheckpointError, match=r"critic/step4, is missing"):
        find_best_checkpoint(tmp_path, "critic")
