"""DPO against TRL's `DPOTrainer`, both with a frozen reference."""

from benchmarks.training import Case, main

CASE = Case(
    name="dpo",
    about=str(__doc__),
    rows="pairs",
    batch=8,
    longest=512,
    steps=4,
    target="15x tokens/s, a third of the memory",
)

if __name__ == "__main__":
    main(CASE)
