"""PPO steps (sampling, scoring, training of actor and critic) against `PPOTrainer`, which TRL has
until 1.12.
"""

import os
import sys
from pathlib import Path

from benchmarks.training import Case, main

TRL = "WEFT_BENCH_TRL_PPO"
CASE = Case(
    name="ppo",
    about=str(__doc__),
    rows="questions",
    batch=8,
    longest=128,
    steps=5,
    new_tokens=64,
    passes=4,
    target="3.5x a step",
    trl="1.12",
)

if __name__ == "__main__":
    if not os.environ.get(TRL) and "--trl" not in sys.argv and not {"-h", "--help"} & set(sys.argv):
        print(
            f"{TRL} is not set: TRL 1.12 is the last with PPOTrainer. Install it beside the "
            f"other,\n"
            "    pip install --no-deps --target DIR trl==1.12.0\nand set it to DIR, or give --trl "
            "DIR",
            file=sys.stderr,
        )
        raise SystemExit(2)
    main(CASE, trl_path=Path(os.environ.get(TRL, "")))
