"""Pages in a real browser: their script, and their layout on a telephone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observe.plans import make_plan
from tests.observe.test_report import line, write_run
from tests.observe.webdriver import MISSING, Browser, browser
from weft.cli.dashboard import open_server
from weft.observe.compare import build_comparison
from weft.observe.dashboard import Dashboard
from weft.observe.plan_page import build_plan_page
from weft.observe.report import build_report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
WIDER = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def long_run(folder: Path, steps: int = 60) -> Path:
    """Write a run whose samples have per-token values."""
    rows = [
        {
            "step": s,
            "id": f"p{s}",
            "k": k,
            "prompt": f"question {s}",
            "completion": "one two",
            "reward": 0.5 * k,
            "tokens": ["one", " two"],
            "logprobs": [-0.1, -3.0],
            "advantage": k - 0.5,
            "finish_reason": "stop",
        }
        for s in (1, 30, 60)
        for k in (0, 1)
    ]
    lines = "".join(
        json.dumps(line(s) | {"actor_train/num_tokens": 100.0}) + "\n" for s in range(1, steps + 1)
    )
    return write_run(
        folder,
        steps,
        metrics__jsonl=lines,
        samples__jsonl="".join(json.dumps(r) + "\n" for r in rows),
    )


def test_a_report_reacts_to_its_controls(window: Browser, tmp_path: Path) -> None:
    window.open(build_report(long_run(tmp_path / "run")).as_uri())
    ticks = "return [...document.querySelectorAll('.large .tick.x')].map(e => e.textContent)"
    whole = window.run(ticks)
    window.drag(".large .plot", 0.25, 0.5)
    zoomed = window.run(ticks)
    assert zoomed != whole and not window.run("return document.getElementById('reset').hidden")
    window.run(
        "document.querySelector('.large .plot').dispatchEvent(new MouseEvent('dblclick', "
        "{bubbles: true}))"
    )
    assert len(window.run(ticks)) >= 3 and window.run(
        "return document.getElementById('reset').hidden"
    )
    for choice, word in (("tokens", "tokens"), ("time", ":")):
        window.run(
            "const x = document.getElementById('x'); x.value = arguments[0]; x.dispatchEvent(new "
            "Event('input'))",
            choice,
        )
        assert word in " ".join(window.run(ticks))
    window.run("document.getElementById('log-scale').click()")
    assert "0.2" in window.run(
        "return [...document.querySelectorAll('.large .tick.y')].map(e => e.textContent)"
    )

    assert (
        window.run("return [...document.querySelectorAll('.panel')].filter(p => !p.hidden).length")
        == 1
    )
    window.run(
        "const c = document.getElementById('colour'); c.value = 'logprobs'; c.dispatchEvent(new "
        "Event('input'))"
    )
    shown = ".panel:not([hidden]) .tok"
    assert (
        window.run(f"return [...document.querySelectorAll('{shown}')].map(t => t.textContent)")
        == ["one", " two"] * 2
    )
    assert "log-prob -3" in window.run(f"return document.querySelectorAll('{shown}')[1].title")
    search = "const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))"
    window.run(search, "question 30")
    assert window.run("return document.getElementById('found').textContent") == "1 prompt found"
    window.run(search, "")

    window.run("document.getElementById('step-back').click()")
    assert window.run("return document.getElementById('which').textContent").startswith("Step 59,")
    assert window.run("return document.querySelectorAll('#gantt .lane').length") == 2
    assert window.errors() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_the_page(window: Browser, tmp_path: Path, width: int) -> None:
    one, two = (
        long_run(tmp_path / name / "with-a-rather-long-name-of-a-trial") for name in ("a", "b")
    )
    window.resize(width, 900)
    for page in (build_report(one), build_comparison([one, two], tmp_path / "compare.html")):
        window.open(page.as_uri())
        assert window.run(WIDER) <= 0
        outside = window.run(
            "return [...document.querySelectorAll('.chart')].filter(c => "
            "[...c.querySelectorAll('.tick')].some(t => {"
            "const [a, b] = [c.getBoundingClientRect(), t.getBoundingClientRect()];"
            "return b.width && (b.left < a.left - 1 || b.right > a.right + 1)})).map(c => "
            "c.textContent)"
        )
        assert outside == []
        words = "return [...document.querySelectorAll('.lane-name, .chart-title')].map(e => e.scrollWidth - e.clientWidth)"
        assert max(window.run(words)) <= 0
    window.resize(1280, 900)


@pytest.mark.parametrize("width", [1280, 390])
def test_bars_of_a_plan_are_seen_on_every_screen(
    window: Browser, tmp_path: Path, width: int
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(build_plan_page(make_plan()).render())
    window.resize(width, 900)
    window.open(path.as_uri())
    assert window.run(WIDER) <= 0
    for selector in (".track", ".track i"):
        widths = window.run(
            f"return [...document.querySelectorAll('{selector}')].map(e => e.clientWidth)"
        )
        assert widths and min(widths) > 0
    tall = (
        "return [...document.querySelectorAll('.scroll')].map(e => e.scrollHeight - e.clientHeight)"
    )
    assert max(window.run(tall)) <= 0
    window.resize(1280, 900)


def test_a_dashboard_updates_itself_and_keeps_the_position(window: Browser, tmp_path: Path) -> None:
    for name in ("one", "two"):
        long_run(tmp_path / "runs" / "exp" / name)
    server = open_server(Dashboard(tmp_path / "runs"), "token", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_address[1]}/token/"
        window.open(base)
        assert window.run("return document.querySelectorAll('table.runs tbody tr').length") == 2
        window.run("document.querySelectorAll('input[name=run]').forEach(box => box.click())")
        assert (
            window.run("return document.getElementById('compare').textContent") == "Compare 2 runs"
        )
        window.run("document.getElementById('compare').click()")
        window.until("return document.querySelectorAll('.versus li').length === 2")
        window.run("document.querySelector('a.brand').click()")
        window.until("return document.querySelector('table.runs a[href$=one]')")
        window.run("document.querySelector('table.runs a[href$=one]').click()")
        window.until("return document.querySelector('.large .plot')")
        window.run("document.querySelector('[data-key=log]').open = true")
        window.run("window.scrollTo({top: 700, behavior: 'instant'})")
        window.run("document.querySelector('.tabs button').click(); window.before = window.scrollY")
        with (tmp_path / "runs" / "exp" / "one" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line(61)) + "\n")
        window.until("return document.querySelector('.lede').textContent.startsWith('61 steps')")
        assert (
            window.run("return document.querySelector('.tabs button').getAttribute('aria-pressed')")
            == "true"
        )
        assert window.run("return document.querySelectorAll('details[open][data-key]').length") == 1
        assert abs(window.run("return window.scrollY - window.before")) < 3
        assert window.errors() == []
    finally:
        server.shutdown()
        server.server_close()
