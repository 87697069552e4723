"""`weft plan cost`: GPUs by time and price, from options and config.json alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_plan import LARGE
from tests.tiny import prompt_answer_rows, write_jsonl
from weft.cli.main import main
from weft.cli.plan_run import build_planned_config
from weft.engine.torch.network_source import NetworkSource
from weft.errors import ConfigError
from weft.launch.plan_cost import DeviceOption, compare_devices, format_cost_table, parse_prices
from weft.models.network.transformer import Transformer

FITS = DeviceOption("H100", 2, 1.8, 2.0**30, 2.0**36, 2.5)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("cost")
    (folder / "large").mkdir()
    (folder / "large" / "config.json").write_text(json.dumps(LARGE))
    rows = write_jsonl(folder / "rows.jsonl", prompt_answer_rows())
    return [
        *("plan", "cost", "sft", f"model.path={folder / 'large'}", f"dataset.path={rows}"),
        *("dataset.max_seqlen=2048", "gradient_checkpointing=true", "dataset.train_bs_n_seqs=16"),
    ]


def test_prices_are_of_known_gpus() -> None:
    assert parse_prices(["h100=2.5", "A100=.9"]) == {"H100": 2.5, "A100": 0.9}
    for word, told in (
        ("H101=2", "did you mean H100"),
        ("H100", "write a GPU and its price"),
        ("H100=-1", "write a GPU and its price"),
        ("H100=0", "write a GPU and its price"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_prices([word])


def test_the_cost_is_that_of_all_gpus_for_all_hours() -> None:
    """500 steps of 1.8 s are a quarter of an hour, on two GPUs for 2.5 each."""
    assert FITS.compute_cost(500) == pytest.approx(2.5 * 2 / 4)
    assert replace(FITS, price=None).compute_cost(500) is None
    assert replace(FITS, step_seconds=None).compute_cost(500) is None


def test_the_cheapest_is_marked_or_else_the_fastest() -> None:
    slow = DeviceOption("A100", 1, 4.0, 2.0**30, 2.0**36, 1.0)
    small = DeviceOption("T4", 1, None, 2.0**36, 2.0**34, 0.2, "does not fit")
    lines = format_cost_table([FITS, slow, small], 900)
    assert "cost" in lines[0] and "run of 900 steps" in lines[0]
    assert lines[1].split() == [
        "2",
        "x",
        "H100",
        "1.8",
        "27:00",
        "2.25",
        "1.0",
        "GiB",
        "of",
        "64.0",
        "GiB",
    ]
    assert (
        lines[2].split()[:6] == ["1", "x", "A100", "4", "1:00:00", "1.00"]
        and "cheapest" in lines[2]
    )
    assert lines[3].split()[3:6] == ["-", "-", "-"] and "does not fit" in lines[3]
    plain = format_cost_table([replace(each, price=None) for each in (FITS, slow)], None)
    assert "cost" not in plain[0] and "1,000 steps" in plain[0] and "fastest" in plain[1]


def test_a_table_for_a_model_that_is_a_config_alone(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prices = ["--price", "H100=2.5", "--price", "L4=0.6"]
    assert main([*words, *prices, "--devices", "1,4,1", "--steps", "100"]) == 0
    header, *rows, lengths, placed, left_out = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "GPUs" and len(rows) == 4
    assert [row.split()[:3] for row in rows] == [
        [count, "x", gpu] for gpu in ("H100", "L4") for count in ("1", "4")
    ]
    assert "does not fit" in rows[0] and "does not fit" in rows[2]
    assert "cheapest" in rows[1] and "for rows of 512 + 1,536 tokens" in lengths
    assert "by allocation_mode=search" in placed and "without start-up" in left_out
    assert main([*words, *prices, "--devices", "4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["steps"] is None and made["options"][0]["step_seconds"] > 0


def test_networks_are_built_once_for_all_types_of_gpus(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_planned_config(words[2:])
    build = NetworkSource.build_network
    num_built = Counter[str]()

    def compare(*gpus: str) -> list[DeviceOption]:
        def count_and_build(self: NetworkSource, *args: Any, **options: Any) -> Transformer:
            num_built[" ".join(gpus)] += 1
            return build(self, *args, **options)

        monkeypatch.setattr(NetworkSource, "build_network", count_and_build)
        return compare_devices(config, dict.fromkeys(gpus, 1.0), [1, 2])

    together = compare("H100", "H800", "A100")
    assert together == [*compare("H100"), *compare("H800"), *compare("A100")]
    assert num_built["H100 H800 A100"] == num_built["H100"] > 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--devices", "0"], "write numbers of GPUs"),
        (["--steps", "0"], "at least one step"),
        (["--price", "H100=much"], "write a GPU and its price"),
        (["layout=d3"], "layout"),
    ],
)
def test_what_cannot_be_compared(
    more: list[str], told: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--devices", "1", *more]) == 2
    assert told in capsys.readouterr().err


def test_more_gpus_than_a_machine_has_are_whole_machines(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def find_seconds(*more: str) -> float:
        assert main([*words, "--price", "H100=1", "--json", *more]) == 0
        (option,) = json.loads(capsys.readouterr().out)["options"]
        return float(option["step_seconds"])

    assert find_seconds("--devices", "4", "n_nodes=2") == find_seconds("--devices", "4")
    one = find_seconds("--devices", "16", "n_gpus_per_node=16")
    assert find_seconds("--devices", "16") > one
    assert main([*words, "--devices", "12"]) == 2
    assert "--devices=12: is no number of whole machines of 8 GPUs" in capsys.readouterr().err


def test_the_start_up_is_part_of_hours_and_cost() -> None:
    known = replace(FITS, startup_seconds=900.0)
    assert known.compute_run_seconds(500) == 1800.0
    assert known.compute_cost(500) == pytest.approx(2.5 * 2 / 2)
    assert format_cost_table([known], 500)[1].split()[4:6] == ["30:00", "2.50"]


def test_a_layout_is_priced_on_as_many_gpus_as_it_has(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def find_rows(*more: str) -> list[str]:
        assert main([*words, "--price", "H100=1", "--devices", "4,8", *more]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    searched = find_rows()
    fixed = find_rows("allocation_mode=t4")
    assert fixed[0] != searched[0] and fixed[1].split()[3] == searched[1].split()[3]
    assert fixed[3].endswith("; 4 as allocation_mode=t4 says") and "says" not in searched[3]
    # It is a row of its own where `--devices` does not name its number.
    assert find_rows("allocation_mode=t2")[0].startswith("2 x H100")
    assert main([*words, "--price", "H100=1", "--devices", "4", "allocation_mode=x4"]) == 2
    assert "'x' is unknown" in capsys.readouterr().err


def test_a_plan_file_is_priced_on_as_many_gpus_as_it_has(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("weft_plan: 1\ncalls:\n  train: {layout: t4, devices: 0-3}\n")
    command = [*words, "--price", "H100=1", "--devices", "4"]
    assert main([*command, "allocation_mode=t4"]) == 0
    row, *_ = capsys.readouterr().out.splitlines()[1:]
    assert main([*command, f"allocation_mode={plan}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == row and lines[3].endswith(f"; 4 as allocation_mode={plan} says")
