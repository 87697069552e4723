"""Options of `eval_suite`: tasks on which a run evaluates the model that it trains.

The names and meanings are the same as for the command `weft eval suite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from weft.errors import ConfigError
from weft.options import option
from weft.reading import find_url_problem


def _find_limit_problem(limit: float) -> str | None:
    if 0 < limit < 1 or (limit >= 1 and limit == int(limit)):
        return None
    return "must be a number of items, or a share below 1"


def _find_folder_problem(folders: Sequence[str]) -> str | None:
    return next((problem for each in folders if (problem := find_url_problem(each))), None)


@dataclass
class EvalSuiteSpec:
    """Options of the evaluation on tasks during a run, which `tasks` enables."""

    tasks: list[str] = option(
        [],
        "tasks, groups or tags by name, patterns such as mmlu_*, or task files; setting it enables "
        "the evaluation of the trained model on them at every evaluation, with the extra eval",
    )
    include_path: list[str] = option([], "folders of task files", check=_find_folder_problem)
    data_dir: str | None = option(
        None,
        "copies of data sets of the hub, in DIR/OWNER/NAME; absent: ~/.cache/weft/eval",
        check=find_url_problem,
    )
    data: dict[str, str] = option(
        {},
        "files or folders of data sets of weft's own tasks, such as {gsm8k: data/gsm8k}",
        check=lambda data: _find_folder_problem([*data.values()]),
    )
    limit: int | float | None = option(
        None, "first items of each task, or their share if below 1", check=_find_limit_problem
    )
    num_fewshot: int | None = option(
        None, "examples in each prompt; absent: the task's own number", at_least=0
    )
    apply_chat_template: bool = option(
        False, "ask in conversations, rendered by the model's chat template"
    )
    fewshot_as_multiturn: bool | None = option(
        None, "make each example a turn of its own; absent: with a chat template"
    )
    system_instruction: str | None = option(None, "system message, or text before each prompt")
    gen_kwargs: dict[str, Any] = option(
        {}, "options of generation that override the tasks' own, such as {max_gen_toks: 64}"
    )
    num_samples: int | None = option(None, "answers per item: pass@k, maj@k", at_least=1)
    allow_code: bool = option(
        False, "run programs that the model writes, in the sandbox of the code reward"
    )
    judge: str | None = option(None, "URL of the judge, an OpenAI-compatible endpoint")
    judge_model: str | None = option(None, "name of the judge's model")
    batch: int | None = option(
        None,
        "maximum tokens of a forward pass on each data-parallel device; absent: "
        "max_tokens_per_microbatch",
        at_least=1,
    )
    log_samples: bool = option(True, "store each item's prompt, answer and score")
    seed: int | None = option(None, "seed; absent: lm-evaluation-harness' own seeds", at_least=0)

    def check(self) -> None:
        """Raise `ConfigError` for options that have no effect without another one."""
        if not self.tasks:
            for spec in fields(self):
                value = getattr(self, spec.name)
                if value != getattr(EvalSuiteSpec(), spec.name):
                    raise ConfigError(
                        f"eval_suite.{spec.name}={value}: only used with eval_suite.tasks; set that "
                        f"too"
                    )
        if (self.judge is None) != (self.judge_model is None):
            raise ConfigError(
                f"eval_suite.judge={self.judge} and eval_suite.judge_model={self.judge_model}: "
                f"belong together; set both"
            )
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise ConfigError(
                "eval_suite.fewshot_as_multiturn=true: needs eval_suite.apply_chat_template=true; "
                "set that too"
            )

    def describe(self) -> list[str]:
        """Return a line for the plan of a run, or an empty list if there are no tasks."""
        if not self.tasks:
            return []
        parts = [", ".join(self.tasks)]
        if self.limit is not None and self.limit < 1:
            parts.append(f"the first {self.limit:.3g} of the items of each task")
        elif self.limit is not None:
            parts.append(f"at most {self.limit:,.0f} items of each task")
        if self.num_fewshot is not None:
            parts.append(f"{self.num_fewshot} examples in each prompt")
        if self.apply_chat_template:
            parts.append("asked in conversations")
        return [f"eval_suite: {'; '.join(parts)}"]
