"""The verifier `ifeval`: checks that a completion follows the prompt's verifiable instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import ConfigError, DataError, build_unknown_name_error
from weft.host.verifiers._instructions import CHECKS
from weft.registry import register_verifier

SCORES = ("share", "all")


def is_followed(
    response: str, instruction: str, arguments: Mapping[str, Any], *, loose: bool = False
) -> bool:
    """Return whether a response follows one instruction with the given arguments.

    An empty response follows no instruction. With `loose`, it is enough that one of eight variants
    follows the instruction (the loose accuracy of the IFEval paper): the response, its copies
    without the first line, the last line or both, and each of these four texts without asterisks.
    Raises `DataError` for an unknown instruction or missing arguments.
    """
    if instruction not in CHECKS:
        raise DataError(str(build_unknown_name_error("instruction", instruction, CHECKS)))
    check = CHECKS[instruction]
    given = {}
    for name, value in arguments.items():
        if value is not None:
            given[name] = value
    try:
        return any(
            variant.strip() and check(variant, given)
            for variant in (build_variants(response) if loose else [response])
        )
    except KeyError as error:
        raise DataError(
            f"instruction {instruction!r} needs the argument {error}; it has {sorted(given)}"
        ) from error


def build_variants(response: str) -> list[str]:
    """Return the eight variants of a response that `is_followed` tries with `loose`."""
    lines = response.split("\n")
    cuts = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    variants = [response, *cuts]
    return [*variants, *(text.replace("*", "") for text in variants)]


@register_verifier("ifeval")
def ifeval(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    instruction_id_list: Sequence[Sequence[str] | None],
    kwargs: Sequence[Sequence[Mapping[str, Any]] | None],
    score: str = "share",
    loose: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return, for each completion, the fraction of its row's instructions that it follows.

    With `score` "all", the reward is instead 1 if the completion follows all instructions, else 0.
    The reward is None for rows without instructions.

    Reads the columns `instruction_id_list` and `kwargs` (one mapping per instruction), as in the
    IFEval data. With `loose`, slight variations of the completion are tried as well. Raises
    `DataError` for an unknown instruction or missing arguments.
    """
    if score not in SCORES:
        raise ConfigError(f"ifeval: score={score!r} must be share or all")
    rewards: list[float | None] = []
    for completion, ids, arguments in zip(completions, instruction_id_list, kwargs, strict=True):
        if not ids:
            rewards.append(None)
            continue
        if arguments is None or len(arguments) != len(ids):
            raise DataError(
                f"ifeval: kwargs must contain one mapping for each of the {len(ids)} instructions "
                f"{list(ids)}"
            )
        done = []
        for id, given in zip(ids, arguments, strict=True):
            done.append(is_followed(completion, id, given or {}, loose=loose))
        rewards.append(float(all(done)) if score == "all" else sum(done) / len(done))
    return rewards
