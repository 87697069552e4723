"""Counts of requests and tokens, in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # seconds
TYPE = "text/plain; version=0.0.4; charset=utf-8"
HELP = {
    "weft_requests_total": "Requests answered, by endpoint and status.",
    "weft_request_seconds": "Seconds from a request's arrival to the end of its answer.",
    "weft_abandoned_total": "Requests whose client disconnected before the answer.",
    "weft_prompt_tokens_total": "Prompt tokens.",
    "weft_generated_tokens_total": "Sampled tokens.",
    "weft_scored_tokens_total": "Scored tokens.",
    "weft_load": "Waiting and running completions and rows, by model.",
}


@dataclass
class ServerMetrics:
    """Thread-safe counters of requests and tokens, and a histogram of request durations."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_answer(self, endpoint: str, status: str, seconds: float) -> None:
        with self._lock:
            self.requests[endpoint, status] += 1
            self.buckets[bisect_left(BUCKETS, seconds)] += 1
            self.seconds += seconds

    def count_abandoned(self) -> None:
        with self._lock:
            self.counts["weft_abandoned_total"] += 1

    def count_tokens(self, prompt: int = 0, generated: int = 0, scored: int = 0) -> None:
        with self._lock:
            self.counts["weft_prompt_tokens_total"] += prompt
            self.counts["weft_generated_tokens_total"] += generated
            self.counts["weft_scored_tokens_total"] += scored

    def format_text(self, loads: dict[str, int]) -> str:
        """Return all metrics in Prometheus's text format.

        `loads` maps the name of each model to its current load.
        """
        with self._lock:
            lines = _format_head("weft_requests_total", "counter")
            for (endpoint, status), count in sorted(self.requests.items()):
                lines.append(
                    f'weft_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
                )
            lines += _format_head("weft_request_seconds", "histogram")
            total = 0
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.buckets, strict=True):
                total += count
                lines.append(f'weft_request_seconds_bucket{{le="{bound}"}} {total}')
            lines += [
                f"weft_request_seconds_sum {self.seconds:.6f}",
                f"weft_request_seconds_count {total}",
            ]
            for name in HELP:
                if name.endswith("_total") and name != "weft_requests_total":
                    lines += [*_format_head(name, "counter"), f"{name} {self.counts[name]}"]
        lines += _format_head("weft_load", "gauge")
        for model, load in loads.items():
            lines.append(f'weft_load{{model="{_escape_label(model)}"}} {load}')
        return "\n".join(lines) + "\n"


def _format_head(name: str, kind: str) -> list[str]:
    return [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}"]


def _escape_label(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
