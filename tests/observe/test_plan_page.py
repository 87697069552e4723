"""Page of a plan: devices, times, memory and parts of calls."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tests.observe.plans import GIB, make_plan
from tests.observe.test_report import Page
from weft.observe.page import write
from weft.observe.plan_page import build_plan_page, find_part_hues, format_moved, format_seconds
from weft.observe.shown_plan import ShownPlan


def render(plan: ShownPlan | None = None) -> str:
    return build_plan_page(plan or make_plan()).render()


def test_the_page_has_every_section_and_its_numbers() -> None:
    page = Page(render())
    assert page.sections() == ["top", "placement", "timeline", "memory", "bounds", "assumptions"]
    for text in (
        "A step takes about 3 s on 2 x H100",
        "actor_gen , mostly memory",
        "It does not fit into memory.",
        "Calls of rew are not included.",
        "1,000",  # tokens per second
        "d1 on device 0",
        "3.00 GiB at most",
        "memory (83%)",
        "waiting (100%)",
        "8 sequences of 100 + <50> tokens a step",
        "the data sheet of H100",
    ):
        assert text in page.text, text
    # 0.5 s of both devices and 2.5 s of one of them, in each step of 3 s
    assert "58%" in page.text


def test_bars_lie_where_and_when_calls_run() -> None:
    text = render()
    timeline = text[text.index('id="timeline"') : text.index('id="memory"')]
    bars = re.findall(r'left:([\d.]+)%;width:([\d.]+)%;[^"]*" title="([^"]*)"', timeline)
    assert (
        "33.333",
        "16.667",
        "actor_train, 1 s, step 1; waits for the outputs of actor_gen",
    ) in bars
    weights = [bar for bar in bars if bar[2].startswith("weights for actor_gen")]
    assert len(weights) == 4  # on both devices, in two steps
    placement = text[text.index('id="placement"') : text.index('id="timeline"')]
    assert re.findall(r'<i style="left:([\d.]+)%;width:([\d.]+)%', placement) == [
        ("0.000", "50.000"),
        ("50.000", "50.000"),
    ]


def test_a_table_has_the_texts_of_the_bars() -> None:
    page = Page(render())
    assert "weights for actor_gen" in page.text
    assert "waits for the weights of <train>" in page.text
    # What scrolls can be reached by the keyboard.
    scrolled = [attrs for tag, attrs in page.tags if attrs.get("role") == "region"]
    assert scrolled and all(attrs["tabindex"] == "0" for attrs in scrolled)


def test_the_page_needs_no_network() -> None:
    text = render()
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)
    assert "connect-src 'none'" in text


def test_unknown_parts_have_different_colours() -> None:
    plan = make_plan()
    hues = find_part_hues(plan.calls)
    assert list(hues) == ["products", "memory", "waiting"]
    assert len(set(hues.values())) == 3


def test_a_placement_that_fits_has_no_warning(tmp_path: Path) -> None:
    plan = make_plan()
    roomy = replace(plan, groups=[replace(group, capacity=1e12) for group in plan.groups])
    assert "does not fit" not in render(roomy) and 'class="readout bad"' not in render(roomy)
    unknown = replace(plan, groups=[replace(group, capacity=None) for group in plan.groups])
    assert "dashed line" not in render(unknown)
    assert write(tmp_path / "plan.html", render(unknown)).is_file()


def test_durations_have_three_digits_and_sizes_a_unit() -> None:
    assert format_moved(2048 * GIB) == "2.0 TiB" and format_moved(GIB) == "1.0 GiB"
    assert [format_seconds(each) for each in (0.0, 0.00123, 0.5, 12.345, 245.0)] == [
        "0 s",
        "1.23 ms",
        "0.5 s",
        "12.3 s",
        "4:05",
    ]
