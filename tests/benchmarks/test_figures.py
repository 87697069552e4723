"""What the benchmarks compute from what they measure, and the rows they measure on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import data, limit, scale
from benchmarks.model import SHAPES
from benchmarks.training import Case, prepare, summary


def test_parameters_are_those_of_the_network() -> None:
    """Without the norms, which are in no product; the embedding is the output matrix and counts
    once.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES["tiny"]
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=True,
    )
    network = LlamaForCausalLM(config)
    assert limit.parameters(shape) == sum(p.numel() for p in network.parameters() if p.ndim == 2)
    assert limit.parameters(SHAPES["12.7M"]) == pytest.approx(12.7e6, rel=0.01)
    assert limit.parameters(SHAPES["40M"]) == pytest.approx(40e6, rel=0.02)


def test_operations_of_a_step_agree_with_the_engine_s_own_count() -> None:
    import numpy as np

    from weft.engine.device import TokenCost

    shape, lengths = SHAPES["40M"], [100, 256]
    own = TokenCost(limit.parameters(shape), shape.layers * shape.hidden).count_training_flops(
        np.array(lengths)
    )
    assert limit.training_flops(shape, lengths) == pytest.approx(own)


@pytest.mark.parametrize(
    ("ys", "fit", "bend"), [([1.0, 2.0, 3.0], 1.0, 1.0), ([1.0, 4.0, 9.0], 0.9796, 5 / 3)]
)
def test_the_fit_of_a_line(ys: list[float], fit: float, bend: float) -> None:
    xs = [1.0, 2.0, 3.0]
    assert scale.r_squared(xs, ys) == pytest.approx(fit, abs=1e-4)
    assert scale.slope_ratio(xs, ys) == pytest.approx(bend)


@pytest.mark.parametrize(
    ("fit", "bend", "straight"),
    [
        (0.999, 1.0, True),
        (0.99, 1.5, True),
        (0.98, 1.0, False),
        (0.995, 1.6, False),
        (0.995, 0.6, False),
        (1.0, float("nan"), False),
    ],
)
def test_a_line_fits_and_does_not_bend(fit: float, bend: float, straight: bool) -> None:
    assert scale.is_straight(fit, bend) is straight


def test_what_is_written_of_a_comparison_names_no_folder(tmp_path: Path) -> None:
    case = Case("sft", "", rows="instructions", batch=8, longest=512, steps=1, target="")
    settings = {
        "work": str(tmp_path),
        "rows": str(tmp_path / "rows.jsonl"),
        "tokens": [300],
        "rest": 1.0,
    }
    step = {
        "seconds": 1.0,
        "cpu_seconds": 2.0,
        "stolen_seconds": 0.0,
        "tokens": 300,
        "peak_bytes": 1 << 20,
    }
    made = summary(case, settings, {"weft": [step], "trl": [{**step, "seconds": 3.0}]})
    assert (
        str(tmp_path) not in str(made)
        and made.settings["rows"] == "instructions"
        and made.settings["rest"] == 1.0
    )
    assert made.settings["speed_ratio"]["median"] == 3.0


def test_a_curve_that_a_line_fits_well_is_no_line() -> None:
    axis = scale.AXES[0]
    notes = scale.axis_notes(
        axis, {x: [{"seconds": x + 0.08 * x**2, "peak_bytes": 5.0 * x}] for x in (1, 2, 4, 6, 8)}
    )
    assert "not a straight line" in notes[0] and notes[1].endswith(": a straight line")
    assert float(notes[0].split("R2 ")[1].split(",")[0]) >= scale.STRAIGHT


@pytest.mark.parametrize("name", sorted(data.SOURCES))
def test_rows_fit_and_are_counted(name: str, data_dir: Path) -> None:
    lengths = data.Lengths(data_dir / "tokenizers" / "llama2" / "tokenizer.json")
    rows, tokens = data.take(data.SOURCES[name](data_dir), lengths, 5, 128)
    assert len(rows) == len(tokens) == 5
    assert all(
        max(lengths.row(row)) <= 128 and sum(lengths.row(row)) == count
        for row, count in zip(rows, tokens, strict=True)
    )


def test_tokens_of_a_step_are_those_that_weft_trains_on(data_dir: Path, tmp_path: Path) -> None:
    """What the tokens a second are counted from, against the engine's own count."""
    from benchmarks import weft_side

    case = Case("sft", "", "instructions", batch=2, longest=128, steps=2, target="", shape="tiny")
    settings = prepare(case, data_dir, tmp_path, 1)
    counted: list[dict[str, float]] = []
    last = weft_side.train({**settings, "work": str(tmp_path / "run")}, counted.append)
    assert len(counted) == settings["all_steps"]
    assert last["train/num_tokens"] == settings["tokens"][-1]
    assert all(step["seconds"] > 0 and step["peak_bytes"] > 0 for step in counted)
