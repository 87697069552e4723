"""A reward model from pairs against TRL's `RewardTrainer`."""

from benchmarks.training import Case, main

CASE = Case(
    name="rw",
    about=str(__doc__),
    rows="pairs",
    batch=8,
    longest=512,
    steps=5,
    target="2.5x tokens/s",
)

if __name__ == "__main__":
    main(CASE)
