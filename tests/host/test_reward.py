"""The reward node: functions in separate processes, weighted sums, deadlines and failures."""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.bounds import rounded
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, UserError
from weft.host.base import HostContext, make_host_function
from weft.host.reward import RewardFunction
from weft.host.spec import RewardOptions, RewardPart, locate, parse_reward
from weft.registry import functions, verifiers

SOURCE = '''
"""Reward functions as a user writes them."""
import asyncio, os, sys, time


def ones(prompts, completions, **columns):
    return [1.0] * len(completions)

def count(prompts, completions, *, completion_ids, **columns):
    return [len(ids) for ids in completion_ids]

async def slow_twice(prompts, completions, target):
    await asyncio.sleep(0.01)
    return [2 * t for t in target]

def some(prompts, completions, **columns):
    return [None if "x" in c else 1 for c in completions]

def never(prompts, completions, **columns):
    return [None] * len(completions)

def raises(prompts, completions, **columns):
    return [1.0 / 0 if "x" in c else 0.0 for c in completions]

def leaves(prompts, completions, **columns):
    sys.exit(3)

def dies(prompts, completions, **columns):
    os._exit(5)

def nan(prompts, completions, **columns):
    return [float("nan") if "x" in c else 0.0 for c in completions]

def huge(prompts, completions, **columns):
    return [1e308 if "x" in c else -1e17 for c in completions]

def text(prompts, completions, **columns):
    return ["good"] * len(completions)

def short(prompts, completions, **columns):
    return [1.0] * (len(completions) + 1)

def number(prompts, completions, **columns):
    return 1.0

def hangs(prompts, completions, **columns):
    if any("x" in c for c in completions):
        time.sleep(600)
    return [1.0] * len(completions)

def hangs_with_child(prompts, completions, mark, **columns):
    import subprocess
    child = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
    child += "file.write('locked'); file.flush(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child, mark[0]])
    while True:
        pass

def written(prompts, completions, mark, **columns):
    with open(mark[0], "a") as file:
        file.write(" ".join(completions) + "\\n")
    return [len(c) for c in completions]

def process(prompts, completions, **columns):
    return [os.getpid()] * len(completions)

def noisy(prompts, completions, **columns):
    print("noise on stdout")
    return [float(sys.stdin.read() == "")] * len(completions)

def seen(prompts, completions, *, completion_ids, answer, extra=7):
    return [float((p, c, i, a, e) == ("ab", "c!", [3, 0, 9], "A", 7)) for p, c, i, a, e in
            zip(prompts, completions, completion_ids, answer, [extra] * len(prompts))]

def scaled(prompts, completions, *, by):
    return [by] * len(completions)

def by_token(prompts, completions, *, completion_ids, **columns):
    """1 for each "a"; nothing is said of other tokens."""
    return [[1.0 if i == 1 else None for i in ids] for ids in completion_ids]

def by_step(prompts, completions, **columns):
    """A step ends with "!"; it is worth its number."""
    return [{n + 1: float(c[: n + 1].count("!")) for n, letter in enumerate(c) if letter == "!"} for c in completions]

def too_few(prompts, completions, **columns):
    return [[1.0] for _ in completions]

def beyond(prompts, completions, **columns):
    return [{99: 1.0} for _ in completions]

def measured(prompts, completions, **columns):
    return [1.0] * len(completions), {"calls": 1, "letters": sum(len(c) for c in completions)}

def wrongly_measured(prompts, completions, **columns):
    return [1.0] * len(completions), {"calls": float("inf")}

class Judge:
    def __call__(self, prompts, completions, **columns):
        return tuple(len(c) for c in completions)

judge = Judge()
value = 3
'''


class Letters:
    """Tokenizer in which 1 is a, 2 is b, ..., 0 is "!", and 9 is the end token."""

    def decode_after(
        self, before: Sequence[int], ids: Sequence[int], skip_special: bool = False
    ) -> str:
        return self.decode(ids, skip_special)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return "".join("!" if i == 0 else chr(96 + i) for i in ids if not (skip_special and i == 9))


def batch(groups: Sequence[Sequence[str]], **columns: Sequence[Any]) -> SequenceSample:
    """Return a batch with one id per group, the prompt "ab" and completions given as letters."""
    ids = [f"p{n}" for n in range(len(groups))]
    tokens = [[0 if c == "!" else ord(c) - 96 for c in text] for group in groups for text in group]
    lengths = {
        "prompt": [[2]] * len(groups),
        "completion": [[len(text) for text in group] for group in groups],
    }
    data = {
        "prompt": torch.tensor([1, 2] * len(groups)),
        "completion": torch.tensor([token for each in tokens for token in each]),
    }
    return SequenceSample.from_groups(ids, lengths, data, columns)


def replace_ids(sample: SequenceSample, ids: Sequence[str]) -> SequenceSample:
    return replace(sample, ids=tuple(ids))


def context() -> HostContext:
    return HostContext(tokenizer=cast(Tokenizer, Letters()))


def rewards(made: SequenceSample) -> list[float]:
    return [float(value) for value in made.data["rewards"]]


Make = Callable[..., RewardFunction]


def make_reward(reward: Any, **options: Any) -> RewardFunction:
    return RewardFunction(RewardOptions(reward, **options))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "my_reward_functions.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def make(source: Path) -> Iterator[Make]:
    """Return a builder of nodes for functions of the source file."""
    made = []

    def build(*names: Any, **options: Any) -> RewardFunction:
        parts = [
            {**name, "name": f"{source}:{name['name']}"}
            if isinstance(name, Mapping)
            else f"{source}:{name}"
            for name in names
        ]
        made.append(make_reward(parts, **{"num_workers": 1, **options}))
        return made[-1]

    yield build
    for function in made:
        function.pool.close()


def test_a_function_gets_texts_ids_and_columns(make: Make) -> None:
    made = make("seen")(batch([["c!i"], ["zz"]], answer=["A", "B"], unused=[1, 2]), context())
    assert rewards(made) == [1.0, 0.0]
    assert made.lengths["rewards"].tolist() == [1, 1]
    assert made.data["rewards"].dtype == torch.float32


def test_parts_are_weighted_and_measured(make: Make) -> None:
    again = {"name": "count", "args": {"other": 1}}
    function = make({"name": "count", "weight": 0.5}, {"name": "some", "weight": 10.0}, again)
    told = context()
    made = function(batch([["abc", "x"], ["ab", "abcd"]]), told)
    assert rewards(made) == [1.5 + 10 + 3, 0.5 + 1, 1 + 10 + 2, 2 + 10 + 4]
    assert made.group_of("rewards").tolist() == [0, 0, 1, 1]
    expected = {
        "reward/count": 2.5,
        "reward/some": 1.0,
        "reward/count_2": 2.5,
        "frac_reward_zero_std": 0.0,
    }
    expected |= {"reward": 45.0 / 4, "reward_std": (13.0 + 3.0) / 2 / 2**0.5}
    assert told.metrics == pytest.approx(expected)


def test_groups_of_one_are_measured_together(make: Make) -> None:
    told = context()
    make("count")(batch([["a"], ["abc"]]), told)
    assert told.metrics["reward_std"] == pytest.approx(2**0.5)
    assert told.metrics["frac_reward_zero_std"] == 0.0


def test_async_functions_objects_and_arguments(make: Make) -> None:
    function = make("slow_twice", "judge", {"name": "scaled", "args": {"by": 100}})
    assert rewards(function(batch([["abc"], ["a"]], target=[1, 2]), context())) == [
        2 + 3 + 100,
        4 + 1 + 100,
    ]


def test_tokens_and_steps_have_rewards_of_their_own(make: Make) -> None:
    """They are weighted, count for the whole completion, and keep their positions."""
    function = make(
        {"name": "by_token", "weight": 2.0},
        {"name": "by_step", "weight": 10.0},
        "some",
        by_token=True,
    )
    told = context()
    made = function(batch([["ab!a!", "b"], ["!x"]]), told)
    assert rewards(made) == [2 * 2 + 10 * (1 + 2) + 1, 1.0, 10.0]
    assert made.lengths["token_rewards"].tolist() == [5, 1, 2]
    nan = float("nan")
    expected = torch.tensor([2.0, nan, 10.0, 2.0, 20.0, nan, 10.0, nan])
    assert torch.equal(made.data["token_rewards"].nan_to_num(-1), expected.nan_to_num(-1))
    assert told.metrics["reward/by_token"] == 2.0, "the second and third have none"
    assert told.metrics["reward/by_step"] == pytest.approx(4 / 2)


@pytest.mark.parametrize(
    ("name", "by_token", "message"),
    [
        (
            "by_token",
            False,
            r"p0\[0\]: it returned a list for a completion; return a number, or set "
            r"reward_by_token=true",
        ),
        ("by_step", False, "returned a dict for a completion"),
        ("too_few", True, r"p0\[0\]: it returned 1 rewards for the 2 tokens of a completion"),
        (
            "beyond",
            True,
            "it returned the step 99: 1.0 for a completion of 2 characters; .* from 1 to 2",
        ),
        ("wrongly_measured", True, "it returned the metric calls=inf"),
    ],
)
def test_wrong_rewards_of_tokens_are_the_users_to_mend(
    make: Make, name: str, by_token: bool, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make(name, by_token=by_token)(batch([["a!"]]), context())


def test_metrics_of_a_function_are_summed_over_the_batch(make: Make) -> None:
    told = context()
    make("measured", chunk_size=1)(batch([["ab", "c"], ["def"]]), told)
    assert told.metrics["reward/measured/calls"] == 2
    assert told.metrics["reward/measured/letters"] == 6
    assert told.metrics["reward/measured"] == 1.0


def test_the_parts_are_kept_without_weights(make: Make) -> None:
    scores = SequenceSample.from_groups(
        ["p0"], {"scores": [[1, 1]]}, {"scores": torch.tensor([0.5, -1.0])}
    )
    function = make({"name": "count", "weight": 3.0}, "some", keep_parts=True)
    made = function(batch([["ab", "x"]]).update(scores), context())
    expected = torch.tensor([[2.0, 1.0, 0.5], [1.0, float("nan"), -1.0]])
    assert torch.equal(made.data["reward_parts"].nan_to_num(-9), expected.nan_to_num(-9))
    assert made.data["reward_parts"].dtype == torch.float32


def test_rows_name_their_verifiers() -> None:
    """One row has a name, one a name with a weight and options, and one is empty."""
    function = make_reward("length", column="graded_by", num_workers=1)
    own: list[Any] = [
        "exact",
        [{"name": "length", "weight": -2.0, "args": {"max": 2}}, "exact"],
        None,
    ]
    whole = batch([["a", "b"], ["abc", "c"], ["d"]], graded_by=own, answer=["a", "c", "z"])
    told = context()
    assert rewards(function(whole, told)) == [
        1.0,
        0.0,
        0.0,
        -2.0 + 1.0,
        rewards(function(whole, told))[4],
    ]
    assert told.metrics["reward/exact"] == 0.5
    begun = context()
    function.begin(whole.select(ids=["p1"]), context())
    assert rewards(function(whole, begun)) == rewards(function(whole, told))
    function.pool.close()


@pytest.mark.parametrize(
    ("reward", "value", "message"),
    [
        ("length", "exakt", "p0: column 'by': .*did you mean exact"),
        (
            "length",
            "os:system",
            "'os:system' is not a verifier; a row can name registered verifiers only",
        ),
        ("length", "rewards.py:f", "a row can name registered verifiers only"),
        ("length", {"name": "length", "args": {"maxi": 1}}, "p0: column 'by': .*did you mean max"),
        ("length", [["length", 1], {"name": "length", "args": {"max": 1}}], "names 'length' twice"),
        ("length", 7, "p0: column 'by': 7 cannot be read"),
        (
            "length",
            {"name": "judge", "args": {"url": "https://x/v1", "model": "m"}},
            "p0: column 'by': a row must not set url of 'judge'",
        ),
        (
            None,
            None,
            "p0: the column 'by' is empty in this row, and there is no default reward; set reward",
        ),
    ],
)
def test_what_a_row_may_not_name(reward: Any, value: Any, message: str) -> None:
    function = make_reward(reward, column="by", num_workers=1)
    with pytest.raises(UserError, match=message):
        function(batch([["a"]], by=[value]), context())
    function.pool.close()


def test_a_column_of_verifiers_must_be_there() -> None:
    function = make_reward("length", column="by", num_workers=1)
    with pytest.raises(UserError, match=r"reward_column='by' is not a column; .* are: answer"):
        function(batch([["a"]], answer=["a"]), context())
    function.pool.close()
    with pytest.raises(ConfigError, match="keep_parts needs the same parts in all rows"):
        make_reward("length", column="by", keep_parts=True)


def test_scores_of_a_reward_model_are_added(make: Make) -> None:
    scores = SequenceSample.from_groups(
        ["p0"], {"scores": [[1, 1]]}, {"scores": torch.tensor([0.5, -1.0])}
    )
    told = context()
    made = make("never", scores_weight=2.0)(batch([["a", "b"]]).update(scores), told)
    assert rewards(made) == [1.0, -2.0]
    assert told.metrics["reward/model"] == -0.25
    assert "reward/never" not in told.metrics


def test_a_worker_lives_on_between_batches(make: Make) -> None:
    function = make("process")
    first = rewards(function(batch([["a"], ["b"]]), context()))
    second = rewards(function(batch([["c"]]), context()))
    assert first == [second[0]] * 2
    assert second[0] != os.getpid()


def test_the_whole_batch_is_shared_out(make: Make) -> None:
    function = make("count", num_workers=2, chunk_size=1)
    groups = [["a" * (n % 5 + 1)] * 2 for n in range(11)]
    assert rewards(function(batch(groups), context())) == [
        len(text) for group in groups for text in group
    ]


def test_what_was_begun_with_is_not_computed_again(make: Make, tmp_path: Path) -> None:
    """One prompt is unchanged, one gets other completions, one never arrives, one was not begun."""
    mark = tmp_path / "mark"
    function = make("written", "ones")
    for groups, ids in ([["a", "bb"]], ["p0"]), ([["e"], ["f"]], ["p1", "p9"]):
        function.begin(replace_ids(batch(groups, mark=[str(mark)] * len(groups)), ids), context())
    told = context()
    whole = batch([["a", "bb"], ["ccc"], ["d", "gg"]], mark=[str(mark)] * 3)
    assert rewards(function(whole, told)) == [2.0, 3.0, 4.0, 2.0, 3.0]
    assert told.metrics["reward/written"] == pytest.approx(9 / 5)
    # which may have been cancelled in time
    computed = sorted(set(mark.read_text().splitlines()) - {"e", "f"})
    assert computed == ["a bb", "ccc", "d gg"]
    assert rewards(function(whole, context())) == [2.0, 3.0, 4.0, 2.0, 3.0]
    assert mark.read_text().count("a bb") == 2, "a head start serves one batch"
    other = tmp_path / "other"
    function.begin(batch([["a"]], mark=[str(mark)]), context())
    function(batch([["a"]], mark=[str(other)]), context())
    assert other.read_text() == "a\n", "another column is another call"


def test_calls_of_a_chosen_size_are_not_begun_with(make: Make, tmp_path: Path) -> None:
    function = make("written", chunk_size=2)
    whole = batch([["a"], ["b"]], mark=[str(tmp_path / "mark")] * 2)
    function.begin(whole.select(ids=["p1"]), context())
    function(whole, context())
    assert (tmp_path / "mark").read_text() == "a b\n"


def test_a_head_start_that_nobody_wants_takes_no_worker_for_long(make: Make) -> None:
    """It hangs, and its id comes with another completion, or never."""
    function = make("hangs", timeout_s=5.0)
    function.begin(batch([["x"]]), context())
    assert rewards(function(batch([["a"]]), context())) == [1.0]
    function.begin(replace_ids(batch([["x"]]), ["p9"]), context())
    function._num_batches += 1  # one batch has passed without it
    assert rewards(function(batch([["a"]]), context())) == [1.0]
    assert not function._prefetched_calls


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of seconds that a pool waits for replies, one entry per call."""
    seconds: list[float] = []

    def spy(replies: Any, longest: float) -> Any:
        seconds.append(longest)
        return concurrent.futures.wait(replies, longest)

    monkeypatch.setattr("weft.host._pool.wait", spy)
    return seconds


@pytest.mark.slow
def test_the_deadline_holds_while_a_worker_starts_again(
    make: Make, tmp_path: Path, waited: list[float]
) -> None:
    """The first call ends the only process, and the second one would hang in the next process."""
    source = tmp_path / "slow_to_import.py"
    source.write_text(
        f"import os, time\nif os.path.exists({str(tmp_path / 'died')!r}):\n    time.sleep(60)\n"
        "def f(prompts, completions, **columns):\n    if completions == ['x']:\n        "
        "time.sleep(600)\n"
        f"    open({str(tmp_path / 'died')!r}, 'w')\n    os._exit(5)\n"
    )
    function = make_reward(f"{source}:f", num_workers=1, timeout_s=2.5)
    with pytest.raises(UserError, match="it ended its process"):
        function(batch([["a"], ["x"]]), context())
    assert waited and max(waited) <= 2.5
    function.pool.close()


def test_a_pool_that_is_closed_leaves_what_waits(make: Make) -> None:
    pool = make("hangs").pool
    replies = [pool.submit((0, ["p"], [text], [[1]], {}, {})) for text in "axaax"]
    assert replies[0].result(20).value == ([1.0], {})
    pool.close()
    assert all(reply.cancelled() or reply.result(20).status == "died" for reply in replies[1:])
    assert not any(lane.worker for lane in pool._worker_threads)
    assert pool.submit((0, ["p"], ["a"], [[1]], {}, {})).result(20).value == ([1.0], {})


@pytest.mark.parametrize("name", ["raises", "dies"])
def test_what_goes_wrong_in_a_head_start_is_told_with_the_batch(make: Make, name: str) -> None:
    function, whole = make(name, num_workers=2), batch([["a"], ["x"]])
    function.begin(whole.select(ids=["p1"]), context())
    with pytest.raises(UserError, match=rf"'{name}' failed on p"):
        function(whole, context())


@pytest.mark.slow
def test_a_head_start_that_hangs_has_the_time_of_the_batch(make: Make) -> None:
    function, told = make("hangs", timeout_s=2.0, on_timeout=-5.0, num_workers=2), context()
    whole = batch([["a"], ["x"]])
    function.begin(whole.select(ids=["p1"]), context())
    assert rewards(function(whole, told)) == [1.0, -5.0]
    assert told.metrics["timeouts"] == 1
    assert rewards(function(batch([["a"]]), context())) == [1.0], (
        "another worker stands in for the killed one"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "raises",
            r"'raises' failed on p1\[0\], p1\[1\]: it raised "
            r"ZeroDivisionError.*\n.*my_reward_functions.py:\d+ in",
        ),
        ("leaves", r"'leaves' failed.*SystemExit: 3"),
        ("nan", r"'nan' failed on p1\[1\]: it returned nan; return a finite number"),
        (
            "huge",
            r"'huge' failed on p1\[1\]: it returned 1e\+308; the absolute value of a reward must "
            r"be at most 1e\+18",
        ),
        ("text", r"'text' failed on p0\[0\]: it returned 'good' \(str\)"),
        ("short", r"'short' failed.*it returned 2 rewards for 1 completions"),
        ("number", r"'number' failed.*it returned a float; return a list"),
        ("seen", r"'seen' failed.*it needs 'answer', but the dataset's columns are: question"),
        (
            "never",
            r"no reward applies to p0\[0\], p1\[0\], p1\[1\] \(3 of 3 completions\): never "
            r"returned None",
        ),
    ],
)
def test_wrong_results_are_the_users_to_mend(make: Make, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(name, chunk_size=1)(batch([["a"], ["b", "x"]], question=["q", "r"]), context())


def test_a_sum_of_rewards_that_is_too_large_is_named(make: Make) -> None:
    with pytest.raises(
        UserError,
        match=r"the reward of p1\[0\] is -1e\+26 with the weights of .*huge.*; its absolute value",
    ):
        make({"name": "huge", "weight": 1e9})(batch([[], ["b"]]), context())
    assert rewards(make("huge")(batch([["b"]]), context())) == [rounded(-1e17, 1)]


def test_after_an_error_the_next_batch_is_computed(make: Make) -> None:
    function = make("raises")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        function(batch([["x"]]), context())
    assert rewards(function(batch([["a"]]), context())) == [0.0]


def test_a_process_that_dies_is_named(make: Make) -> None:
    function = make("dies")
    with pytest.raises(
        UserError, match=r"'dies' failed on p0\[0\]: it ended its process \(exit code 5\)"
    ):
        function(batch([["a"]]), context())


def test_a_hung_call_stops_the_run(make: Make, waited: list[float]) -> None:
    with pytest.raises(
        UserError,
        match=r"'hangs' did not finish within reward_timeout_s=2 seconds on p1\[0\]; make it faster",
    ):
        make("hangs", timeout_s=2.0, num_workers=2, chunk_size=1)(
            batch([["a"], ["x"], ["b"]]), context()
        )
    assert waited and max(waited) <= 2.0


@pytest.mark.slow
def test_a_hung_call_may_get_a_reward_instead(make: Make) -> None:
    function = make("hangs", "ones", timeout_s=3.0, on_timeout=-5.0, num_workers=2, chunk_size=1)
    told = context()
    made = function(batch([["a"], ["x", "a"], ["b"]]), told)
    assert rewards(made) == [2.0, -4.0, -4.0, 2.0]
    assert told.metrics["timeouts"] == 2
    told = context()
    assert rewards(function(batch([["a"], ["b"]]), told)) == [2.0, 2.0]
    assert told.metrics["timeouts"] == 0


def test_what_a_hung_call_started_is_killed(make: Make, tmp_path: Path) -> None:
    """The child holds a lock until it ends.

    On a busy machine, the call gets more time, until the child exists.
    """
    mark = tmp_path / "mark"
    for seconds in (0.7, 5.0, 60.0):
        function = make("hangs_with_child", timeout_s=seconds, on_timeout=0.0)
        assert rewards(function(batch([["a"]], mark=[str(mark)]), context())) == [0.0]
        if mark.exists() and mark.read_text():
            break
    with mark.open() as file:
        assert file.read() == "locked"
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for the end of a child that is being killed


def test_workers_keep_away_from_standard_streams(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    assert rewards(make("noisy")(batch([["a"]]), context())) == [1.0]
    out, err = capfd.readouterr()
    assert "noise" not in out
    assert "noise" in err


@pytest.mark.parametrize("text", ["a", "x"])
def test_workers_end_with_the_process_that_started_them(source: Path, text: str) -> None:
    """Both idle workers and workers that hang ("x") end when that process is killed."""
    program = (
        "import os, time\nfrom weft.host._pool import RewardPool\nfrom weft.host.spec import "
        "RewardPart, locate\n"
        f"pool = RewardPool([locate(RewardPart({str(source) + ':hangs'!r}))], "
        f"1)\npool.start()\nprint(pool._worker_threads[0].worker.process.pid, flush=True)\n"
        f"task = (0, ['p'], [{text!r}], [[1]], {{}}, {{}})\n"
        "pool.submit(task)\ntime.sleep(0.5)\nos._exit(0)\n"
    )
    # Not its standard error: a worker that survives would keep it open, and this test would wait.
    run = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    worker, end = int(run.stdout), time.monotonic() + 30
    while _alive(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def test_verifiers_by_name() -> None:
    function = make_reward([{"name": "length", "args": {"max": 2}}, "gsm8k"], num_workers=1)
    # The column `max` is data; the option of that name is not taken from it.
    made = function(batch([["a", "abc"]], answer=["1"], max=[100]), context())
    assert rewards(made) == [1.0, 0.0]
    function.pool.close()


def test_a_verifier_of_user_code_is_found_again(tmp_path: Path) -> None:
    from weft.registry import import_user_code

    path = tmp_path / "my_registered_verifier.py"
    path.write_text(
        "from weft.registry import register_verifier\n\n\n"
        '@register_verifier("test-sevens")\n'
        "def sevens(prompts, completions, *, completion_ids, value=7.0, **columns):\n"
        "    return [value] * len(completions)\n"
    )
    import_user_code([str(path)])
    function = make_reward({"name": "test-sevens", "weight": 2.0}, num_workers=1)
    assert rewards(function(batch([["a"]], value=[1.0]), context())) == [14.0]
    function.pool.close()


def test_it_is_a_host_function(source: Path) -> None:
    made = cast(
        RewardFunction,
        make_host_function("reward", {"reward": f"{source}:ones", "timeout_s": 30.0}),
    )
    assert made.state_dict() == {}
    made.pool.close()
    with pytest.raises(UserError, match="tokenizer_role"):
        made(batch([["a"]]), HostContext())


@pytest.mark.parametrize(
    "reward",
    [
        {"gsm8k": 0.5, "f.py:g": 1},
        [["gsm8k", 0.5], ("f.py:g", 1)],
        [{"gsm8k": 0.5}, "f.py:g"],
        [{"name": "gsm8k", "weight": 0.5}, {"f.py:g": 1.0}],
    ],
)
def test_weights_may_be_written_in_several_ways(reward: Any) -> None:
    assert parse_reward(reward) == [RewardPart("gsm8k", 0.5), RewardPart("f.py:g", 1.0)]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (None, "no reward is given"),
        ([], "no reward is given"),
        (3, "cannot be read"),
        ({"name": "gsm8k", "wieght": 2}, "cannot be read"),
        ({"name": "gsm8k", "weight": "2"}, "weight='2'"),
        ({"name": "gsm8k", "args": [1]}, r"args=\[1\]"),
        ({}, "no reward is given"),
        ({"gsm8k": 0, "length": 0.0}, "all weights are 0"),
        (["gsm8k", "length", "gsm8k"], "'gsm8k' appears twice"),
        ("rw.py", r"'rw.py' does not name a function in the file; write rw.py:FUNCTION"),
        (
            {"name": "length", "args": {"qqq": 3}},
            r"verifier 'length' has no option 'qqq'; its options: ",
        ),
        ({"gsm8k": "a lot"}, "weight='a lot' of 'gsm8k' must be a finite number"),
        ({"gsm8k": float("nan")}, "must be a finite number"),
        ({"gsm9k": 1.0}, "did you mean gsm8k"),
        (["gsm8k", 0.5], r"\[\['gsm8k', 0.5\]\]"),
        ([["gsm8k", 0.5, 1]], "cannot be read"),
        ([["gsm8k", None]], "weight=None"),
        ("gsm9k", "did you mean gsm8k"),
        ({"name": "length", "args": {"maxi": 3}}, "did you mean max"),
        ({"name": "format", "args": {"pattern": "("}}, "not a regular expression"),
        ("nowhere.py:f", "there is no file"),
        ("os.path:", "function's name"),
    ],
)
def test_wrong_specifications_are_refused(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reward(reward)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("no.such.module:f", "No module named"),
        ("os.path:jion", "there is no function 'jion' in os.path"),
        ("{source}:value", "'value' is of type int, not a function"),
        ({"name": "{source}:scaled", "args": {"times": 3}}, "takes no argument 'times'"),
    ],
)
def test_functions_that_cannot_be_imported_are_refused_at_once(
    source: Path, reward: Any, message: str
) -> None:
    filled = (
        {**reward, "name": reward["name"].format(source=source)}
        if isinstance(reward, dict)
        else reward.format(source=source)
    )
    with pytest.raises(UserError, match=message):
        make_reward(filled, num_workers=1)


@pytest.mark.parametrize("name", ["timeout_s", "num_workers", "chunk_size"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 must be above 0"):
        make_reward("length", **{name: 0})


def test_specifications() -> None:
    assert parse_reward("gsm8k") == [RewardPart("gsm8k")]
    assert parse_reward(["gsm8k", {"name": "m:f", "weight": 2, "args": {"a": 1}}]) == [
        RewardPart("gsm8k"),
        RewardPart("m:f", 2.0, {"a": 1}),
    ]
    assert locate(RewardPart("gsm8k")).module == "weft.host.verifiers.gsm8k"
    assert locate(RewardPart("os.path:f")).attribute == "f"


def test_every_shipped_verifier_and_function_is_registered() -> None:
    assert {"gsm8k", "math", "format", "ifeval", "length", "exact", "code", "judge"} <= set(
        verifiers.load_all()
    )
    shipped = {
        "gae_advantages",
        "group_advantages",
        "reward",
        "dynamic_sampling",
        "kto_mismatch",
        "kto_baseline",
    }
    assert shipped <= set(functions.load_all())


def test_workers_load_no_torch() -> None:
    code = "import sys, weft.host._worker, weft.host.spec; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
