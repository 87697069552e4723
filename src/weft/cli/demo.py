"""`weft demo`: a small model learns sums from an unreliable teacher, then surpasses it.

SFT is followed by a reward model, PPO and GRPO. Each running stage has one progress line, which is
removed when the stage ends. All other output of the runs is in their logs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from weft.algorithms.advantages import GAEAdvantages
from weft.algorithms.reward import RewardLoss
from weft.cli.examples import CHARACTERS, CHAT_TEMPLATE
from weft.cli.parsing import CommandParser
from weft.experiments import GenConfig, GRPOConfig, PPOConfig, RWConfig, SFTConfig
from weft.observe.memory import measure_peak_memory_gb
from weft.observe.metrics import find_title, format_duration, format_number
from weft.observe.pace import RunPace
from weft.observe.progress import DisplayOptions
from weft.writing import write

TEACHER_ACCURACY = 0.55  # share of the teacher's answers that are correct


@dataclass(frozen=True)
class AdditionProblem:
    """Addition of a two-digit number, `left`, and a one-digit number, `right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def draw_problems(
    seed: int, num_held_out: int
) -> tuple[list[AdditionProblem], list[AdditionProblem]]:
    """Split all 810 addition problems at random into (training problems, held-out problems).

    `num_held_out` is the number of held-out problems.
    """
    problems = []
    for left in range(10, 100):
        for right in range(1, 10):
            problems.append(AdditionProblem(left, right))
    random.Random(seed).shuffle(problems)
    return problems[num_held_out:], problems[:num_held_out]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one JSON object per line, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def build_prompt_rows(problems: Iterable[AdditionProblem], times: int = 1) -> list[dict[str, Any]]:
    """Return `times` equal rows per problem, each with the prompt and the correct answer."""
    return [
        {"prompt": problem.prompt, "answer": problem.answer}
        for problem in problems
        for _ in range(times)
    ]


def build_lesson_rows(
    problems: Iterable[AdditionProblem], seed: int, times: int
) -> list[dict[str, Any]]:
    """Return `times` rows per problem, each with a prompt and an answer that may be wrong.

    An unreliable teacher gives the answers: each is correct with probability `TEACHER_ACCURACY`.
    """
    generator = random.Random(seed)
    result: list[dict[str, Any]] = []
    for problem in problems:
        for _ in range(times):
            answer = problem.answer
            if generator.random() >= TEACHER_ACCURACY:
                answer = change_digit(answer, generator)
            result.append({"prompt": problem.prompt, "answer": answer})
    return result


def change_digit(answer: str, generator: random.Random) -> str:
    """Return the answer with one random digit replaced by another."""
    position = generator.randrange(len(answer))
    other_digit = generator.choice([digit for digit in "0123456789" if digit != answer[position]])
    return answer[:position] + other_digit + answer[position + 1 :]


def write_model(directory: Path) -> Path:
    """Write the tokenizer and the configuration of a Llama with 1.3 million parameters.

    The first run initializes the weights. Returns the directory.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["</s>"],
        pad_token_id=vocabulary["<pad>"],
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    return directory


def compute_accuracy(generations: Path) -> float:
    """Return the fraction of correct completions in a file `generations.jsonl`."""
    rows = [json.loads(line) for line in generations.read_text().splitlines()]
    return sum(is_correct(row["prompt"], row["completion"]) for row in rows) / len(rows)


def is_correct(prompt: str, completion: str) -> bool:
    """Return whether `completion` is the correct answer to `prompt`, ignoring end tokens."""
    return completion.replace("</s>", "").strip() == compute_sum(prompt)


def compute_sum(prompt: str) -> str:
    """Return the correct answer to a prompt such as `47+8=`."""
    left, right = prompt.rstrip("=").split("+")
    return str(int(left) + int(right))


def build_preference_rows(
    generations: Path, problems: Iterable[AdditionProblem], seed: int, times: int
) -> list[dict[str, Any]]:
    """Return preference pairs in which a correct sum is preferred to a wrong one.

    There are two kinds of wrong sums: the model's own mistakes in `generations`, and correct sums
    with one random digit replaced. `times` is the number of replacements for each of `problems`.
    Duplicates are dropped.

    The model's mistakes alone would be too few and too similar: a reward model would memorize them
    instead of learning to add, and PPO would find wrong answers that the reward model never saw.
    """
    generator = random.Random(seed)
    rows = [json.loads(line) for line in generations.read_text().splitlines()]
    answers = [(row["prompt"], row["completion"].replace("</s>", "").strip()) for row in rows]
    for problem in problems:
        for _ in range(times):
            answers.append((problem.prompt, change_digit(problem.answer, generator)))
    mistakes = dict.fromkeys(
        (prompt, answer) for prompt, answer in answers if answer and not is_correct(prompt, answer)
    )
    result: list[dict[str, Any]] = []
    for prompt, wrong in mistakes:
        result.append(
            {"prompt": prompt, "pos_answers": [compute_sum(prompt)], "neg_answers": [wrong]}
        )
    return result


BAR_WIDTH = 30  # columns of the progress bar


class StageView:
    """Progress display of a run in one terminal line.

    The line shows a progress bar, the steps, the headline metric and the elapsed time. If the
    output is not a terminal, nothing is printed.
    """

    def __init__(self, console: Console, activity: str) -> None:
        self._activity = activity
        self._pace = RunPace()
        is_interactive = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(self, console=console, transient=True) if is_interactive else None

    @property
    def width(self) -> int | None:
        return None

    def start(self) -> None:
        if self._live is not None:
            self._live.start()

    def expect(
        self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self._pace.expect(total, done, earlier)

    def record_step(self, numbers: Mapping[str, float], *, is_shown: bool) -> list[str]:
        self._pace.record_step(numbers)
        return [self._pace.format_line()] if is_shown else []

    def show_sample(self, step: int, row: Mapping[str, Any]) -> None:
        """Do nothing; the run's report shows sampled completions."""

    def show_activity(self, activity: str) -> AbstractContextManager[None]:
        return nullcontext()

    def print_note(self, line: str) -> None:
        """Do nothing; the run's log has the notes."""

    def show_stop_request(self, line: str) -> None:
        self._activity = line

    def close(self, status: str, *, is_flagged: bool = False) -> list[str]:
        if self._live is not None:
            self._live.stop()
        return [self._pace.format_summary(status)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pace = self._pace
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True, overflow="ellipsis")
        texts = [self._activity]
        if pace.done:
            texts = [pace.format_step()]
            texts += (
                [f"{find_title(pace.name)} {format_number(pace.values[-1])}"]
                if pace.name is not None and pace.values
                else []
            )
        texts.append(format_duration(pace.elapsed))
        bar = ProgressBar(
            pace.total or 1, pace.done if pace.total else 0, width=BAR_WIDTH, complete_style="cyan"
        )
        grid.add_row("  ", bar, "  ".join(texts))
        yield grid


FOLDER_NAME = "demo"
HELD_OUT = 200  # number of problems held out from training
FINAL_STEPS = 10  # number of final steps averaged for a stage's result


@dataclass
class Demo:
    """Execution of the demo: a series of training and sampling runs.

    The runs are in the folder `root/{name}`. `accuracy` maps each training stage, such as "sft", to
    the accuracy on held-out problems after that stage; "start" is the untrained model. `seconds`
    maps the name of each run to its duration.
    """

    root: Path
    name: str
    seed: int
    console: Console = field(default_factory=lambda: Console(highlight=False))
    accuracy: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def material(self) -> Path:
        return self.folder / "material"

    def build_options(self, trial: str, **overrides: Any) -> dict[str, Any]:
        """Return the options for the run of one stage of the demo.

        These are the options of all stages and `overrides`, which take precedence. `trial` is the
        trial name of the run.
        """
        options = {
            "experiment_name": self.name,
            "trial_name": trial,
            "fileroot": str(self.root),
            "seed": self.seed,
        }
        return {**options, **overrides}

    def run_stage(self, config: Any, activity: str = "starting") -> Any:
        """Run one stage, and return its result.

        Progress is shown in one line, which has the text `activity` until the first step is
        finished. The duration is stored in `seconds` under the trial name.
        """
        from weft.launch.run import run

        started = time.monotonic()
        result = run(config, show=DisplayOptions(view=StageView(self.console, activity)))
        self.seconds[config.trial_name] = time.monotonic() - started
        return result

    def generate(self, model: Path, rows: Path, trial: str, temperature: float = 1.0) -> Path:
        """Sample a completion of each prompt in `rows`; return the path of generations.jsonl."""
        config = GenConfig(**self.build_options(trial, progress=False))
        config.model.path = str(model)
        config.model.init_from_scratch = model == self.material / "model"
        config.dataset.path = str(rows)
        config.dataset.train_bs_n_seqs = 400
        config.gen.max_new_tokens = 5
        config.gen.temperature = temperature
        return self.run_stage(config, "sampling").directory / "generations.jsonl"

    def measure_accuracy(self, stage: str, model: Path) -> float:
        """Sample answers to the held-out problems, and return the fraction of correct answers.

        The fraction is also stored in `accuracy` under the key `stage`.
        """
        rows = self.material / "held_out.jsonl"
        self.accuracy[stage] = compute_accuracy(self.generate(model, rows, f"accuracy-{stage}"))
        return self.accuracy[stage]


def write_material(demo: Demo) -> None:
    """Write training data, held-out problems, a tokenizer and a model configuration."""
    training, held_out_problems = draw_problems(demo.seed, HELD_OUT)
    write_rows(demo.material / "sft.jsonl", build_lesson_rows(training, demo.seed, times=10))
    write_rows(demo.material / "prompts.jsonl", build_prompt_rows(training))
    write_rows(demo.material / "mistakes.jsonl", build_prompt_rows(training, times=3))
    write_rows(demo.material / "held_out.jsonl", build_prompt_rows(held_out_problems, times=4))
    write_model(demo.material / "model")


def train_sft(demo: Demo) -> Path:
    """Train a randomly initialized model with SFT, and return the path of its checkpoint.

    The model learns to add, and to copy the teacher's errors.
    """
    config = SFTConfig(**demo.build_options("sft", max_steps=400))
    config.model.path = str(demo.material / "model")
    config.model.init_from_scratch = True
    config.model.optimizer.lr = 1e-3
    config.model.optimizer.lr_scheduler_type = "linear"
    config.model.optimizer.warmup_steps = 20
    config.dataset.train_path = str(demo.material / "sft.jsonl")
    config.dataset.train_bs_n_seqs = 128
    return demo.run_stage(config).checkpoint("model")


def train_reward_model(demo: Demo, model: Path) -> tuple[Path, float, float]:
    """Train a reward model that prefers correct sums to wrong ones.

    The wrong sums are the model's own mistakes, sampled at a high temperature, and sums with a
    random digit changed. Returns (checkpoint, fraction of correctly ordered pairs in the first
    step, mean of this fraction over the last steps).
    """
    samples = demo.generate(model, demo.material / "mistakes.jsonl", "mistakes", temperature=1.5)
    training, _ = draw_problems(demo.seed, HELD_OUT)
    rows = build_preference_rows(samples, training, demo.seed, times=30)
    config = RWConfig(**demo.build_options("reward", max_steps=220))
    config.model.path = str(model)
    config.model.optimizer.lr = 5e-4
    config.model.optimizer.warmup_steps = 10
    # Center the scores, so that the critic need not learn a separate level for each problem.
    config.rw.loss = RewardLoss(center=0.01)
    config.dataset.train_path = str(write_rows(demo.material / "pairs.jsonl", rows))
    config.dataset.train_bs_n_seqs = 64
    result = demo.run_stage(config)
    accuracies = [line["train/accuracy"] for line in result.metrics]
    return (
        result.checkpoint("model"),
        accuracies[0],
        sum(accuracies[-FINAL_STEPS:]) / len(accuracies[-FINAL_STEPS:]),
    )


def train_ppo(demo: Demo, model: Path, reward: Path) -> Path:
    """Train with PPO against the reward model, with a KL penalty to the supervised model.

    Returns the path of the policy's checkpoint.
    """
    config = PPOConfig(**demo.build_options("ppo", max_steps=40))
    for role in (config.actor, config.ref):
        role.path = str(model)
    for role in (config.critic, config.rew):
        role.path = str(reward)
    config.actor.optimizer.lr = 5e-5
    config.critic.optimizer.lr = 3e-4
    for role in (config.actor, config.critic):
        role.optimizer.lr_scheduler_type = "constant"
        role.optimizer.warmup_steps = 5
    config.dataset.path = str(demo.material / "prompts.jsonl")
    config.dataset.train_bs_n_seqs = 64
    config.ppo.samples_per_prompt = 4
    config.ppo.gen.max_new_tokens = 5
    config.ppo.ppo_n_minibatches = 2
    # Without a strong KL penalty PPO would exploit errors of the reward model.
    config.ppo.advantages = GAEAdvantages(kl_ctl=0.3)
    return demo.run_stage(config).checkpoint("actor")


def train_grpo(demo: Demo, model: Path) -> Path:
    """Train with GRPO and a verifier, whose reward is 1 for the correct number and otherwise 0.

    Returns the path of the policy's checkpoint.
    """
    config = GRPOConfig(**demo.build_options("grpo", max_steps=80, reward="gsm8k"))
    for role in (config.actor, config.ref):
        role.path = str(model)
    config.actor.optimizer.lr = 1e-4
    # Decay the learning rate, so that the result depends less on the last few batches.
    config.actor.optimizer.lr_scheduler_type = "linear"
    config.actor.optimizer.warmup_steps = 5
    config.dataset.path = str(demo.material / "prompts.jsonl")
    config.dataset.train_bs_n_seqs = 32
    config.grpo.group_size = 8
    config.grpo.ppo_n_minibatches = 2
    config.grpo.gen.max_new_tokens = 5
    return demo.run_stage(config).checkpoint("actor")


def run_stages(demo: Demo, print_line: Callable[[str], None]) -> None:
    """Run all stages, and print the accuracy on held-out problems before and after each."""
    write_material(demo)
    print_line("[bold]weft demo[/]: a small model learns to add, and surpasses its teacher.")
    print_line("Accuracy is the share of correct answers to 200 sums that no stage trains on.")
    print_line("")
    print_line("[bold]1. SFT[/]  random weights learn sums such as 47+8 from an unreliable teacher")
    demo.measure_accuracy("start", demo.material / "model")
    actor = train_sft(demo)
    print_line(
        _format_rise(demo, "start", actor, "sft")
        + f"; the teacher is right in {TEACHER_ACCURACY:.0%}"
    )
    print_line(
        "[bold]2. Reward model[/]  learns to prefer correct sums to the model's own mistakes"
    )
    reward, first_accuracy, last_accuracy = train_reward_model(demo, actor)
    print_line(
        f"   pairs in the right order {first_accuracy:.0%} -> [bold]{last_accuracy:.0%}[/] in "
        f"{format_duration(demo.seconds['reward'])}"
    )
    print_line("[bold]3. PPO[/]  with that reward model")
    actor = train_ppo(demo, actor, reward)
    print_line(_format_rise(demo, "sft", actor, "ppo"))
    print_line("[bold]4. GRPO[/]  with a verifier: 1 for the correct number, 0 otherwise")
    actor = train_grpo(demo, actor)
    print_line(_format_rise(demo, "ppo", actor, "grpo"))


def _format_rise(demo: Demo, earlier_stage: str, model: Path, stage: str) -> str:
    """Measure the accuracy of `model`, and return a line that compares it with an earlier one.

    `stage` is the stage that trained `model`, and `earlier_stage` is the stage of the earlier
    accuracy.
    """
    accuracies = (
        f"{demo.accuracy[earlier_stage]:.1%} -> [bold]{demo.measure_accuracy(stage, model):.1%}[/]"
    )
    return f"   held-out accuracy {accuracies} in {format_duration(demo.seconds[stage])}"


def print_conclusion(demo: Demo, print_line: Callable[[str], None]) -> None:
    """Print the total time, the peak memory, and the commands and files to look at next."""
    print_line("")
    print_line(
        f"Done in {format_duration(sum(demo.seconds.values()))}, with "
        f"{measure_peak_memory_gb():.1f} GB of memory at most."
    )
    print_line(f"  report  {demo.folder / 'grpo' / 'report.html'}")
    print_line(f"  chat    weft chat {demo.folder / 'grpo'}    (then type 47+8)")
    print_line(f"  logs    {demo.folder}/*/log.txt")


def find_free_name(root: Path) -> str:
    """Return "demo" or, if earlier demos exist in `root`, the first unused "demo-N"."""
    names = [FOLDER_NAME, *(f"{FOLDER_NAME}-{i}" for i in range(2, 10_000))]
    return next(name for name in names if not (root / name).exists())


def main(argv: list[str]) -> int:
    """Run `weft demo` and return the exit code 0."""
    parser = CommandParser(prog="weft demo", description=__doc__)
    parser.add_argument("--fileroot", default="./runs", help="folder of runs (default ./runs)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of weights, problems and sampling (default 1)"
    )
    arguments = parser.parse_args(argv)

    root = Path(arguments.fileroot)
    demo = Demo(root, find_free_name(root), arguments.seed)

    def print_line(line: str) -> None:
        demo.console.print(line, soft_wrap=True)

    run_stages(demo, print_line)
    print_conclusion(demo, print_line)
    return 0
