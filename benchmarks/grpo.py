"""GRPO steps (sampling, reward, training) against TRL's `GRPOTrainer`."""

from benchmarks.training import Case, main

CASE = Case(
    name="grpo",
    about=str(__doc__),
    rows="questions",
    batch=1,
    longest=128,
    steps=8,
    completions=8,
    new_tokens=64,
    target="6x a step",
)

if __name__ == "__main__":
    main(CASE)
