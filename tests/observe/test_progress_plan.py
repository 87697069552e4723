"""Plan as a table: its layout at any width, and the lines that only the details have."""

from __future__ import annotations

from weft.observe.progress import RunPlan

PLAN = RunPlan(
    [
        (
            "nodes",
            "actor_gen -> rew_inf, ref_inf, critic_inf -> advantages -> actor_train, critic_train",
        ),
        ("data", "610 prompts per epoch, batches of 64 (last: 34)"),
        ("a long label of roles", "model, 1.34M parameters"),
    ],
    ["rows: 3 left out"],
    ["actor: every detail"],
)


def test_without_a_terminal_a_row_is_a_line() -> None:
    assert PLAN.format_short() == [
        "nodes           actor_gen -> rew_inf, ref_inf, critic_inf -> advantages -> actor_train, "
        "critic_train",
        "data            610 prompts per epoch, batches of 64 (last: 34)",
        "a long label of roles  model, 1.34M parameters",
        "rows: 3 left out",
    ]
    assert PLAN.format_whole() == [*PLAN.format_short(), "actor: every detail"]


def test_on_a_terminal_rows_are_set_in_and_no_line_ends_in_an_arrow() -> None:
    assert PLAN.format_short(60) == [
        "nodes           actor_gen -> rew_inf, ref_inf, critic_inf",
        "                -> advantages -> actor_train, critic_train",
        "data            610 prompts per epoch, batches of 64 (last:",
        "                34)",
        "a long label of roles  model, 1.34M parameters",
        "rows: 3 left out",
    ]


def test_rows_of_more_than_two_lines_are_cut_except_in_the_whole_plan() -> None:
    long = RunPlan([("nodes", " -> ".join(f"call{at}" for at in range(40)))])
    short = long.format_short(80)
    assert len(short) == 2 and short[1].endswith(" …") and all(len(line) <= 80 for line in short)
    assert "call39" in long.format_whole(80)[-1] and all(
        len(line) <= 80 for line in long.format_whole(80)
    )
