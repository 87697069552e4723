"""The pictures of docs/concepts.md: `python docs/hooks/pictures.py` writes them to docs/img; a test
compares them.

Each brings its own ground and both schemes, so it can be read on a light page and on a dark one.
"""

from __future__ import annotations

import tempfile
from html import escape
from pathlib import Path

from weft.experiments import GRPOConfig, PPOConfig
from weft.graph.draw import to_svg
from weft.observe.page import INDIGO, MAGENTA, ORANGE, SKY, TEAL, ColourPair

FOLDER = Path(__file__).resolve().parent.parent / "img"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
HUES = {"actor": INDIGO, "critic": ORANGE, "ref": TEAL, "rew": MAGENTA, "host": SKY}
LIGHT, DARK = (
    ("#ffffff", "#1b1d23", "#5c6370", "#d5d9e0"),
    ("#191b21", "#eceef2", "#a3a9b6", "#3a3f4a"),
)


class Picture:
    """Shapes on a ground of its own; positions in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        hue: str = "",
        text: str = "",
        *,
        style: str = "",
    ) -> None:
        kind = f"h-{hue}" if hue else "plain"
        self.parts.append(
            f'<rect class="{kind} {style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text)

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> None:
        self.parts.append(
            f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, style: str = "") -> None:
        self.parts.append(
            f'<path class="line {style}" d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(self.title)}">\n<style>{_style()}</style>\n'
            f'<defs>{head}<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>\n'
            f'<rect class="ground" width="{self.width}" height="{self.height}" rx="8"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def _style() -> str:
    shared = f"text{{font:13px {FONT}}}.small{{font-size:11px}}.bold{{font-weight:600}}rect{{stroke-width:1.5}}"
    shared += ".line{fill:none;stroke-width:1.5}.dashed{stroke-dasharray:5 4}.empty{fill-opacity:.25;stroke-dasharray:3 3}"

    def scheme(colours: tuple[str, str, str, str], side: str, mix: int) -> str:
        ground, ink, soft, edge = colours
        rules = f".ground{{fill:{ground};stroke:{edge};stroke-width:1}}text{{fill:{ink}}}.soft{{fill:{soft}}}"
        rules += f".plain{{fill:{ground};stroke:{edge}}}.line{{stroke:{soft}}}.tip{{fill:{soft}}}"
        for name, hue in HUES.items():
            colour = getattr(hue, side) if isinstance(hue, ColourPair) else hue
            rules += (
                f".h-{name}{{fill:color-mix(in srgb,{colour} {mix}%,{ground});stroke:{colour}}}"
            )
        return rules

    return (
        shared
        + scheme(LIGHT, "light", 14)
        + "@media (prefers-color-scheme:dark){"
        + scheme(DARK, "dark", 24)
        + "}"
    )


def call() -> Picture:
    """One model function call."""
    p = Picture(640, 190, "A model function call: keys in, a role's engine on a layout, keys out")
    p.text(95, 30, "keys in", "soft")
    for index, key in enumerate(("prompt", "completion")):
        p.box(30, 45 + 40 * index, 130, 28, "", key)
        p.arrow(160, 59 + 40 * index, 218, 80)
    p.box(220, 35, 200, 100, "ref")
    p.text(320, 62, "ref_inf", "bold")
    p.text(320, 84, "role ref, inference", "small")
    p.text(320, 104, "layout d2t2", "small")
    p.text(320, 124, "devices 4 to 7", "small")
    p.text(545, 30, "keys out", "soft")
    p.arrow(420, 80, 478, 80)
    p.box(480, 66, 130, 28, "", "ref_logprobs")
    p.text(
        320, 168, "a role, what it does, where it does it; edges follow from the keys", "small soft"
    )
    return p


def packing() -> Picture:
    """The same five sequences padded and packed."""
    p = Picture(
        640,
        250,
        "Five sequences of different lengths, padded to the longest and packed without padding",
    )
    lengths, hues = (190, 70, 120, 40, 150), ("actor", "critic", "ref", "rew", "host")
    p.text(30, 28, "padded: every row as long as the longest", "bold", "start")
    for index, (length, hue) in enumerate(zip(lengths, hues, strict=True)):
        y = 40 + 20 * index
        p.box(30, y, 190, 16, "", style="empty")
        p.box(30, y, length, 16, hue)
    p.text(300, 95, "950 places for 570 tokens", "small soft", "start")
    p.text(30, 175, "packed: one row, and attention ends where a sequence ends", "bold", "start")
    x = 30.0
    for length, hue in zip(lengths, hues, strict=True):
        p.box(x, 188, length, 18, hue)
        x += length
    p.text(30, 230, "570 places for 570 tokens", "small soft", "start")
    return p


def layout() -> Picture:
    """What each of eight devices has in d2t2p2."""
    p = Picture(
        640,
        260,
        "Layout d2t2p2: eight devices, two copies of the model, each cut by depth and by width",
    )
    for copy in range(2):
        left = 30 + 305 * copy
        p.text(left + 137, 30, f"copy {copy + 1}: half of the batch", "bold")
        for stage in range(2):
            for rank in range(2):
                x, y = left + 140 * rank, 45 + 95 * stage
                p.box(x, y, 130, 80, "actor" if copy == 0 else "critic")
                p.text(x + 65, y + 28, f"device {4 * stage + 2 * copy + rank}", "bold")
                p.text(
                    x + 65, y + 48, "layers 1 to 16" if stage == 0 else "layers 17 to 32", "small"
                )
                p.text(x + 65, y + 66, "left half" if rank == 0 else "right half", "small")
    p.text(
        320,
        246,
        "d2: two parts of the batch. t2: each layer on two devices. p2: two stages of layers.",
        "small soft",
    )
    return p


def reallocation() -> Picture:
    """Parameters on their way from a training layout to a sampling layout."""
    p = Picture(
        640,
        250,
        "Reallocation: weights trained on d2f1t2 go to the four whole copies of d4 that sample",
    )
    p.text(150, 28, "actor_train on d2f1t2", "bold")
    p.text(490, 28, "actor_gen on d4", "bold")
    for device in range(4):
        y = 44 + 44 * device
        half = device % 2
        p.text(40, y + 21, f"{device}", "soft")
        p.box(60, y, 90, 32, "", style="empty")
        p.box(150, y, 90, 32, "", style="empty")
        p.box(60 + 90 * half, y, 90, 32, "actor", "left" if half == 0 else "right")
        p.box(400, y, 90, 32, "actor", "left")
        p.box(490, y, 90, 32, "actor", "right")
        p.text(600, y + 21, f"{device}", "soft")
        p.arrow(250, y + 16, 392, y + 16, "dashed")
    p.text(
        320,
        236,
        "each device keeps the half that it has and receives the other one: no byte more",
        "small soft",
    )
    return p


def step() -> Picture:
    """A PPO step in time."""
    p = Picture(
        640,
        250,
        "A PPO step in time: sampling, three calls at once, advantages, two trainings at once, "
        "weights moved",
    )
    rows = (
        (
            "devices 0-3",
            (
                (0, 200, "actor", "actor_gen"),
                (345, 120, "actor", "actor_train"),
                (475, 45, "actor", "move"),
            ),
        ),
        ("devices 4-5", ((205, 70, "critic", "critic_inf"), (345, 150, "critic", "critic_train"))),
        ("device 6", ((205, 75, "ref", "ref_inf"),)),
        ("device 7", ((205, 90, "rew", "rew_inf"),)),
        ("CPU", ((298, 42, "host", "adv."),)),
    )
    for index, (where, spans) in enumerate(rows):
        y = 22 + 38 * index
        p.text(20, y + 19, where, "small soft", "start")
        for start, length, hue, name in spans:
            p.box(100 + start, y, length, 28, hue)
            p.text(100 + start + length / 2, y + 18, name, "small")
    p.arrow(100, 216, 625, 216)
    p.text(362, 236, "time; the next actor_gen waits for the actor's new weights", "small soft")
    return p


def graphs() -> dict[str, str]:
    """The graphs of PPO and GRPO, drawn as a run draws its own."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        rows.write_text('{"prompt": "a"}\n')
        ppo = PPOConfig(experiment_name="e", trial_name="t")
        ppo.actor.path, ppo.rew.path, ppo.dataset.path = "SFT", "REWARD", str(rows)
        grpo = GRPOConfig(experiment_name="e", trial_name="t", reward="gsm8k")
        grpo.actor.path, grpo.dataset.path = "SFT", str(rows)
        return {
            "ppo-graph.svg": to_svg(ppo.build().graph),
            "grpo-graph.svg": to_svg(grpo.build().graph),
        }


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    drawn = {
        "call": call,
        "packing": packing,
        "layout": layout,
        "reallocation": reallocation,
        "step": step,
    }
    return {f"{name}.svg": draw().svg() for name, draw in drawn.items()} | graphs()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg)
