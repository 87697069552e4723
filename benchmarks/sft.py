"""Supervised fine-tuning against TRL's `SFTTrainer`."""

from benchmarks.training import Case, main

CASE = Case(
    name="sft",
    about=str(__doc__),
    rows="instructions",
    batch=8,
    longest=512,
    steps=24,
    target="12x tokens/s, a third of the memory",
)

if __name__ == "__main__":
    main(CASE)
