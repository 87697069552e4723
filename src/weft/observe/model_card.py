"""Model card of a checkpoint: its `README.md`, in the form of the Hugging Face hub.

The card describes the model, its use, the data and options of its training, and the metrics over
time. It is made from the run's files: `config.yaml`, `run.json` and `metrics.jsonl`. It contains no
times, hosts or folders, and no options that only determine where a run works. A run that was killed
and resumed, or that used other devices, therefore writes the same card.

The last line is a checksum of the text. `weft push` completes a card with the results of
evaluations, unless the checksum shows that the user has edited it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from weft.errors import ConfigError
from weft.observe.configuration import (
    find_algorithm,
    find_changed_options,
    flatten_options,
    format_value,
    is_unset,
)
from weft.observe.jsonl import CHECKPOINTS, STEP, read_config, read_json, read_rows
from weft.observe.metrics import (
    EVAL,
    INFORMATIVE,
    NOT_TRAINING,
    compute_rank,
    find_title,
    format_number,
    get_last_part,
)
from weft.observe.place_names import is_hub_name, shorten_place, shorten_places
from weft.observe.run_files import CONFIG, METRICS, RECORD, RunFiles
from weft.reading import read_text, shorten
from weft.redaction import mask_values
from weft.writing import write

README = "README.md"
# Placeholder for the model's name in examples; `weft push` replaces it.
THIS_FOLDER = "PATH_OF_THIS_FOLDER"
ADAPTER_FOLDER = "adapter"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
LIBRARIES = ("weft", "torch", "transformers")  # versions that the card names
MACHINE_METRICS = ("tokens_per_second",)  # depend on the machine
MAX_CURVES = 14
MAX_EVALUATIONS = 12  # maximum rows of the validation table
MAX_COLUMNS = 5  # maximum metrics of the validation table
MAX_OPTIONS = 80
MAX_VALUE_LENGTH = 160  # maximum characters of an option's value
MAX_BARS = 24  # maximum characters of a curve
BARS = "▁▂▃▄▅▆▇█"
CHECKSUM_LINE = re.compile(r"<!-- written by weft, checksum ([0-9a-f]{16}) -->\n?\Z")
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
SUITE = "eval_suite"
# First parts of options that name a run, or that do not change its result.
UNRELATED = frozenset(
    (
        *("experiment_name", "trial_name", "fileroot", "mode", "env", "launch", "slurm", "search"),
        *("device", "ray_address", "n_nodes", "n_gpus_per_node", "allocation_mode", "imports"),
        *("recover_mode", "recover_freq_steps", "resume_from", "profile_steps"),
        *("progress", "log_freq_steps", "logger", "loggers"),
        *("eval_at_start", "eval_prompts", "eval_prompts_max_new_tokens", SUITE),
    )
)
# Last parts of the names of options that place a role or a call on devices.
PLACEMENT = frozenset(("device_mesh", "layout", "pre_hooks", "post_hooks", "cache_dir"))
ALGORITHMS = {
    "sft": "supervised fine-tuning",
    "rw": "reward modelling on preference pairs",
    "dpo": "direct preference optimization (DPO)",
    "online_dpo": "online DPO",
    "ppo": "proximal policy optimization (PPO)",
    "grpo": "group relative policy optimization (GRPO)",
    "distill": "distillation from a teacher",
}


@dataclass(frozen=True)
class CardFacts:
    """Facts about a run at one step, from which the cards of its roles are made.

    `run` has the lines of metrics up to `step`. `options` are the options that determine the
    result and differ from their defaults, with paths reduced to names. `defaults` has the known
    defaults of changed options. `chosen` has the names of options whose values weft chose.
    """

    run: RunFiles
    step: int | None
    options: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    chosen: frozenset[str] = frozenset()

    @classmethod
    def read(cls, directory: Path, step: int | None) -> CardFacts:
        """Read the facts of the run in `directory`, ignoring missing or damaged files."""
        try:
            config = dict(mask_values(read_config(directory / CONFIG)))
        except ConfigError:
            config = {}
        lines = []
        for row in read_rows(directory / METRICS):
            if step is not None and row["step"] <= step:
                lines.append(row)
        record = mask_values(read_json(directory / RECORD))
        run = RunFiles(directory=directory, lines=lines, config=config, record=record)
        changed = find_changed_options(run)
        if changed is None:
            changed = {name: (value, None) for name, value in flatten_options(config)}
        folder = _read_start_folder(record)
        options = {}
        needs_suite = _needs_suite(config)
        for name, (value, _) in changed.items():
            is_suite_option = needs_suite and name.split(".")[0] == SUITE
            if (is_suite_option or _is_relevant(name)) and not is_unset(value):
                options[name] = shorten_places(value, folder)
        chosen = record.get("chosen")
        return cls(
            run,
            step,
            options,
            {name: default for name, (_, default) in changed.items() if default is not None},
            frozenset(map(str, chosen)) if isinstance(chosen, list) else frozenset(),
        )

    @property
    def folder(self) -> Path:
        """Folder in which the run was first started; paths in its options are relative to it."""
        return _read_start_folder(self.run.record)

    def find_base(self, role: str) -> str | None:
        """Return the path or hub name of the model that a role was initialized from, or None."""
        roles = self.run.config.get("roles")
        for group in (self.run.config, roles if isinstance(roles, Mapping) else {}):
            spec = group.get(role)
            if isinstance(spec, Mapping) and isinstance(spec.get("path"), str):
                return str(spec["path"])
        return None


def _read_start_folder(record: Mapping[str, Any]) -> Path:
    starts = record.get("starts")
    first = starts[0] if isinstance(starts, list) and starts else None
    return Path(str(first.get("folder") or ".")) if isinstance(first, Mapping) else Path(".")


def _needs_suite(config: Mapping[str, Any]) -> bool:
    """Return whether `save_best` names a metric of `eval_suite`, so that the run needs both."""
    suite, metric = config.get(SUITE), config.get("save_best")
    has_tasks = isinstance(suite, Mapping) and bool(suite.get("tasks"))
    return has_tasks and isinstance(metric, str) and metric.startswith(EVAL)


def _is_relevant(option: str) -> bool:
    """Return whether an option can affect the trained model."""
    return option.split(".")[0] not in UNRELATED and option.rsplit(".", 1)[-1] not in PLACEMENT


# -- files


def write_card(checkpoint: Path, facts: CardFacts, role: str) -> None:
    """Write the `README.md` of a new checkpoint."""
    text = append_checksum(build_card(checkpoint, facts, role))
    write(checkpoint / README, text)


def read_card(checkpoint: Path) -> str | None:
    """Return the text of a checkpoint's `README.md`, or None if the file does not exist."""
    path = checkpoint / README
    return read_text(str(path), str(path)) if path.is_file() else None


def find_facts(checkpoint: Path) -> tuple[CardFacts, str]:
    """Return the facts and the role of a checkpoint, read from its run.

    The facts are empty and the role is "" for a folder that is not a checkpoint of a run.
    """
    path = checkpoint.absolute()
    match = STEP.fullmatch(path.name)
    if match is None or path.parent.parent.name != CHECKPOINTS:
        return CardFacts(RunFiles(directory=path), None), ""
    return CardFacts.read(path.parent.parent.parent, int(match[1])), path.parent.name


def name_model(directory: Path) -> str:
    """Return the name of a model directory: `E/T@step40` for a run's checkpoint."""
    return shorten_place(str(directory.absolute()), Path()).removesuffix(":model")


def append_checksum(text: str) -> str:
    """Return the text of a card with its checksum appended."""
    return f"{text}\n<!-- written by weft, checksum {_compute_checksum(text)} -->\n"


def strip_checksum(text: str) -> str | None:
    """Return a card without its checksum, or None if it was edited or not written by weft."""
    match = CHECKSUM_LINE.search(text)
    if match is None:
        return None
    body = text[: match.start()].removesuffix("\n")
    return body if match[1] == _compute_checksum(body) else None


def _compute_checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_front_matter(text: str) -> dict[str, Any]:
    """Return the metadata at the top of a card, or an empty dict if it is missing or invalid."""
    match = FRONT_MATTER.match(text)
    try:
        values = yaml.safe_load(match[1]) if match is not None else None
    except yaml.YAMLError:
        return {}
    return dict(values) if isinstance(values, dict) else {}


# -- the base model


def find_hub_base(base: str | None, folder: Path) -> tuple[str | None, str | None]:
    """Return (hub name, license) of a base model, each None if unknown.

    `base` is the hub name or the path of the model. For a path, both are read from the model's
    card. `folder` is the folder to which the path is relative.
    """
    if base is None:
        return None, None
    if is_hub_name(base, folder):
        return base, None
    try:
        card = read_card(folder / Path(base).expanduser())
    except (OSError, ValueError):
        card = None
    metadata = read_front_matter(card or "")
    name, license_name = metadata.get("base_model"), metadata.get("license")
    return (
        name if isinstance(name, str) else None,
        license_name if isinstance(license_name, str) else None,
    )


# -- the card


def build_card(checkpoint: Path, facts: CardFacts, role: str) -> str:
    """Return the text of a checkpoint's card, without a checksum.

    `checkpoint` is the folder with the model's files. `role` is its role in the run, or "" for a
    model that no run has written.
    """
    architecture = find_architecture(checkpoint)
    parts = [
        _format_front_matter(_build_metadata(checkpoint, facts, role, architecture)),
        *_describe_model(checkpoint, facts, role, architecture),
        *describe_use(checkpoint, architecture, THIS_FOLDER),
    ]
    if role:
        parts += [
            *_describe_data(facts),
            *_describe_command(facts),
            *_describe_options(facts),
            *_describe_curves(facts),
            *_describe_evaluations(facts),
        ]
    return "\n".join(parts).rstrip() + "\n"


def _build_metadata(
    checkpoint: Path, facts: CardFacts, role: str, architecture: str
) -> dict[str, Any]:
    """Return the metadata of a card: the fields that the hub reads."""
    base, license_name = find_hub_base(facts.find_base(role), facts.folder)
    algorithm = find_algorithm(facts.run)
    metadata: dict[str, Any] = {}
    if base is not None:
        metadata["base_model"] = base
    if license_name is not None:
        metadata["license"] = license_name
    is_adapter = (checkpoint / ADAPTER_CONFIG).is_file()
    metadata["library_name"] = "peft" if is_adapter else "transformers"
    if architecture.endswith("ForCausalLM"):
        metadata["pipeline_tag"] = "text-generation"
    elif architecture.endswith("ForSequenceClassification"):
        metadata["pipeline_tag"] = "text-classification"
    metadata["tags"] = ["weft", *([algorithm] if algorithm else [])]
    datasets = []
    for source in _list_sources(facts):
        name = source.get("path")
        if isinstance(name, str) and is_hub_name(name, facts.folder) and name not in datasets:
            datasets.append(name)
    if datasets:
        metadata["datasets"] = datasets
    return metadata


def find_architecture(checkpoint: Path) -> str:
    """Return the first architecture in a checkpoint's config.json, or "" if it lists none."""
    names = read_json(checkpoint / MODEL_CONFIG).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _format_front_matter(metadata: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)}---\n"


def _describe_model(
    checkpoint: Path, facts: CardFacts, role: str, architecture: str
) -> Iterator[str]:
    """Yield the title and a table of the model's properties."""
    algorithm = find_algorithm(facts.run)
    kind = "Model"
    if architecture.endswith("ForCausalLM"):
        kind = "Language model"
    elif architecture:
        kind = "Model that scores text"
    if not role:
        yield f"# {checkpoint.absolute().name}\n\n{kind}."
        return
    yield f"# {'/'.join(facts.run.title)}, step {facts.step}\n"
    method = ALGORITHMS.get(algorithm or "", algorithm or "an experiment of its own")
    yield f"{kind} trained with weft by {method}.\n"
    base = facts.find_base(role)
    rows = [("role", role), ("training steps", str(facts.step))]
    if architecture:
        rows.insert(0, ("architecture", architecture))
    if base is not None:
        rows.append(("starts from", shorten_place(base, facts.folder)))
    if (checkpoint / ADAPTER_FOLDER / ADAPTER_CONFIG).is_file():
        rows.append(("adapter", f"in `{ADAPTER_FOLDER}/`; the weights here include it"))
    versions = _read_versions(facts.run.record)
    if versions:
        rows.append(("made with", versions))
    yield _format_table(("", ""), rows)


def _read_versions(record: Mapping[str, Any]) -> str:
    starts = record.get("starts")
    first = starts[0] if isinstance(starts, list) and starts else None
    versions = first.get("versions") if isinstance(first, Mapping) else None
    if not isinstance(versions, Mapping):
        return ""
    return ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if name in versions)


def describe_use(checkpoint: Path, architecture: str, name: str) -> Iterator[str]:
    """Yield the section that shows how to load the model; `name` is its name in the examples.

    `architecture` is that of `find_architecture`. Yields nothing if it is unknown.
    """
    if (checkpoint / ADAPTER_CONFIG).is_file():
        code = [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")',
        ]
    elif architecture.endswith("ForCausalLM"):
        if (checkpoint / CHAT_TEMPLATE).is_file():
            prompt = '[{"role": "user", "content": "What is two plus two?"}]'
        else:
            prompt = '"Once upon a time"'
        code = [
            "from transformers import pipeline",
            "",
            f'generate = pipeline("text-generation", model="{name}")',
            f'print(generate({prompt}, max_new_tokens=64)[0]["generated_text"])',
        ]
    elif architecture.endswith("ForSequenceClassification"):
        code = [
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            f'model = AutoModelForSequenceClassification.from_pretrained("{name}")',
            'score = model(**tokenizer("a prompt and its answer", return_tensors="pt")).logits',
        ]
    else:
        return
    yield "\n".join(["## Use\n", "```python", *code, "```\n"])


def _list_sources(facts: CardFacts) -> list[dict[str, Any]]:
    """Return the sources of training rows, each as a mapping with `path` or `named`."""
    data = facts.run.config.get("dataset")
    if not isinstance(data, Mapping):
        return []
    sources = []
    path = data.get("path") or data.get("train_path")
    if path:
        sources.append({"path": path, "type": data.get("type")})
    for key in ("sources", "named"):
        entries = data.get(key)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, Mapping) and len(entry) == 1 and key == "named":
                name, options = next(iter(entry.items()))
                sources.append({"named": name, **(options if isinstance(options, Mapping) else {})})
            elif isinstance(entry, Mapping):
                sources.append(dict(entry))
            else:
                sources.append({key if key == "named" else "path": entry})
    return sources


def _describe_data(facts: CardFacts) -> Iterator[str]:
    """Yield a table of the training and validation rows."""
    rows = []
    for source in _list_sources(facts):
        name = source.get("path") or source.get("named") or source.get("name")
        share = ""
        for key in ("fraction", "size", "weight"):
            if source.get(key) is not None:
                share = f"{key} {source[key]}"
        kind = str(source.get("type") or "")
        rows.append((_format_code(shorten_place(str(name), facts.folder)), kind, share))
    data = facts.run.config.get("dataset")
    valid = data.get("valid_path") if isinstance(data, Mapping) else None
    if isinstance(valid, str):
        rows.append((_format_code(shorten_place(valid, facts.folder)), "", "validation"))
    if rows:
        yield "## Data\n"
        yield _format_table(("rows", "type", "share"), rows)


def _describe_command(facts: CardFacts) -> Iterator[str]:
    """Yield the command that trains the model again, if the run used a quickstart."""
    algorithm = find_algorithm(facts.run)
    if not algorithm:
        return
    experiment, trial = facts.run.title
    overrides = [f"experiment_name={experiment}", f"trial_name={trial}"]
    for name, value in facts.options.items():
        if name not in facts.chosen:
            overrides.append(f"{name}={format_override(value)}")
    lines = [f"weft quickstart {shlex.quote(algorithm)}", *map(shlex.quote, overrides)]
    yield "## Command\n"
    yield "```bash\n" + " \\\n  ".join(lines) + "\n```\n"
    yield (
        "Paths of files and folders are reduced to their names. Options that place the run on "
        "devices are left out.\n"
    )


def format_override(value: Any) -> str:
    """Format the value of an option as in `key=value`: numbers, text, lists and mappings."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_format_item(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_format_item, value)) + "]"
    return str(value)


def _format_item(value: Any) -> str:
    """Format an item of a list or mapping; text with special characters is quoted."""
    if isinstance(value, str) and re.fullmatch(r"[\w./:@+-]+", value) is None:
        return json.dumps(value, ensure_ascii=False)
    return format_override(value)


def _describe_options(facts: CardFacts) -> Iterator[str]:
    """Yield a table of the options that differ from their defaults."""
    rows = []
    for name, value in facts.options.items():
        text = shorten(format_value(value), MAX_VALUE_LENGTH)
        default = shorten(format_value(facts.defaults.get(name)), MAX_VALUE_LENGTH)
        if name in facts.chosen:
            default = "chosen by weft"
        elif name not in facts.defaults:
            default = ""
        rows.append((_format_code(name), _format_code(text), default))
    if not rows:
        return
    yield "## Options\n"
    yield _format_table(("option", "value", "default"), rows[:MAX_OPTIONS])
    if len(rows) > MAX_OPTIONS:
        yield f"{len(rows) - MAX_OPTIONS} more options are set.\n"


# -- metrics


def _describe_curves(facts: CardFacts) -> Iterator[str]:
    """Yield a table of the training metrics, each with its curve."""
    names = []
    for name in facts.run.metric_names:
        last = get_last_part(name)
        if (
            last in INFORMATIVE
            and last not in MACHINE_METRICS
            and not name.startswith(NOT_TRAINING)
        ):
            names.append(name)
    rows = []
    for name in _drop_repeats(facts.run, sorted(names, key=compute_rank)):
        _, values = facts.run.get_series(name)
        numbers = (values[0], min(values), max(values), values[-1])
        rows.append((_format_code(name), draw_curve(values), *map(format_number, numbers)))
    if rows:
        last_step = facts.run.lines[-1]["step"]
        yield "## Training\n"
        yield f"Metrics of steps {facts.run.lines[0]['step']} to {last_step}.\n"
        head = ("metric", "curve", "first", "lowest", "highest", "last")
        yield _format_table(head, rows[:MAX_CURVES])


def _drop_repeats(run: RunFiles, names: Sequence[str]) -> list[str]:
    """Return the names without metrics whose last part and values equal those of an earlier one."""
    first_names = dict[tuple[str, tuple[float, ...]], str]()
    for name in names:
        _, values = run.get_series(name)
        first_names.setdefault((get_last_part(name), tuple(values)), name)
    return list(first_names.values())


def draw_curve(values: Sequence[float]) -> str:
    """Draw a series as a line of at most `MAX_BARS` characters, which are bars of eight heights.

    Each bar is the mean of a segment of the series. Segments have nearly the same length. The
    heights are relative to the lowest and highest mean.
    """
    count = min(MAX_BARS, len(values))
    means = []
    for index in range(count):
        segment = values[index * len(values) // count : (index + 1) * len(values) // count]
        means.append(sum(segment) / len(segment))
    low, high = min(means), max(means)
    if high == low:
        return BARS[3] * count
    max_height = len(BARS) - 1
    return "".join(BARS[round((mean - low) / (high - low) * max_height)] for mean in means)


def _describe_evaluations(facts: CardFacts) -> Iterator[str]:
    """Yield the table of evaluations on the validation rows: one row per step."""
    names = []
    for name in facts.run.metric_names:
        last = get_last_part(name)
        if name.startswith(EVAL) and last in INFORMATIVE and last not in MACHINE_METRICS:
            names.append(name)
    names.sort(key=lambda name: (name.count("/"), compute_rank(name)))
    names = _drop_repeats(facts.run, names)[:MAX_COLUMNS]
    rows = []
    for line in facts.run.lines:
        if any(line.get(name) is not None for name in names):
            values = [format_number(line.get(name)) for name in names]
            rows.append((str(line["step"]), *values))
    if not rows:
        return
    if len(rows) > MAX_EVALUATIONS:
        stride = (len(rows) - 1) / (MAX_EVALUATIONS - 1)
        rows = [rows[round(index * stride)] for index in range(MAX_EVALUATIONS)]
    yield "## Validation\n"
    titles = [find_title(name).removeprefix("eval ") for name in names]
    heads = (
        titles if len(set(titles)) == len(titles) else [name.removeprefix(EVAL) for name in names]
    )
    yield _format_table(("step", *heads), rows)


# -- Markdown


def _format_code(text: str) -> str:
    plain = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"
