"""Assignment of pipeline stages to pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Assignment of pipeline stages to pipeline ranks.

    By default, rank r has the stages r, r + `ranks`, r + 2 * `ranks`, and so on.

    Attributes:
        ranks: Number of pipeline ranks.
        stages_per_rank: Number of stages per rank.
        turns: If True, every second group of `ranks` stages is assigned in reverse, from the last
            rank to the first. With two stages per rank, this is the V-shaped assignment of the
            schedule ZBV.
    """

    ranks: int
    stages_per_rank: int = 1
    turns: bool = False

    @property
    def num_stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def get_rank(self, stage: int) -> int:
        row, rank = divmod(stage, self.ranks)
        return self.ranks - 1 - rank if self.turns and row % 2 else rank

    def list_stages(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.num_stages) if self.get_rank(stage) == rank)

    @property
    def last_rank(self) -> int:
        """Pipeline rank that has the last stage."""
        return self.get_rank(self.num_stages - 1)
