"""Plan of two calls on two devices, for tests of pages."""

from __future__ import annotations

from weft.observe.shown_plan import ShownCall, ShownGroup, ShownPlan, ShownSpan

GIB = 2.0**30


def make_plan() -> ShownPlan:
    """Return a plan with sampling on device 0 and training on device 1, for two steps of 3 s."""
    spans = []
    for step in (1, 2):
        start = 3.0 * (step - 1)
        gen = ShownSpan("actor_gen", "call", step, [0], start + 0.5, 1.5, "")
        weights = ShownSpan(
            "actor_gen", "weights", step, [0, 1], start, 0.5, "waits for the weights of <train>"
        )
        train = ShownSpan(
            "actor_train", "call", step, [1], start + 2.0, 1.0, "waits for the outputs of actor_gen"
        )
        spans += [weights, gen, train]
    return ShownPlan(
        title="exp/one",
        device="H100",
        num_devices=2,
        per_node=8,
        step_seconds=3.0,
        num_tokens=3000,
        max_staleness=0,
        step_ends=[3.0, 6.0],
        groups=[
            ShownGroup("0", [[0, 1]], [[0.0, GIB], [0.5, 3 * GIB], [2.0, GIB]], 2 * GIB),
            ShownGroup("1", [[1, 2]], [[0.0, GIB], [2.0, 1.5 * GIB], [3.0, GIB]], 2 * GIB),
        ],
        calls=[
            ShownCall(
                "actor_gen",
                "actor",
                "d1",
                [0],
                1.5,
                0.5,
                GIB,
                "memory",
                {"products": 0.25, "memory": 1.25, "unheard-of": 0.0},
            ),
            ShownCall(
                "actor_train", "actor", "d1", [1], 1.0, 0.0, 0.0, "waiting", {"waiting": 1.0}
            ),
        ],
        spans=spans,
        assumptions=[["actor_gen", "8 sequences of 100 + <50> tokens a step"]],
        basis="the data sheet of H100",
        left_out=["rew"],
        notes=[],
    )
