"""Templates of the job files of `weft eval submit`, for Slurm, Ray and Beaker.

    template = read_template("slurm", None)     # the default, or a file of the user
    template.render(values)                     # the job file; `PLACEHOLDERS` describes the values

A template is a jinja file. Mistakes in it are reported with its path and line, before anything is
written.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.errors import ConfigError, find_nearest
from weft.reading import make_folder, parse_yaml, read_text
from weft.writing import write

# system -> ending of its job files
SYSTEMS = {"slurm": "sh", "ray": "sh", "beaker": "yaml"}
PLACEHOLDERS = {
    "command": "shell text that runs `weft eval suite`, once for each GPU",
    "name": "name of the job",
    "model_name": "--model_name",
    "model": "path or URL of the model where the job runs",
    "tasks": "--tasks",
    "results": "folder of the result files",
    "folder": "folder of the job file",
    "num_gpus": "--num_gpus",
    "clusters": "list of --cluster",
    "workspace": "--workspace, or none",
    "priority": "--priority, or none; on Beaker low for preemptible",
    "preemptible": "true for --priority preemptible",
    "secrets": "list of the names of secrets",
    "image": "--image",
    "mounts": "list of Beaker's mounts, each with path, kind (beaker or hostPath) and source",
}
TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True)
class JobTemplate:
    """Text of a template for `system`; messages name it by `label`, its path."""

    system: str
    text: str
    label: str

    def check(self) -> None:
        """Raise `ConfigError` for wrong syntax and for names that do not exist."""
        environment = _build_environment()
        try:
            tree = environment.parse(self.text)
            names = meta.find_undeclared_variables(tree)
        except jinja2.TemplateSyntaxError as error:  # also an unknown filter or test
            raise ConfigError(f"{self.label}:{error.lineno}: {error.message}") from error
        unknown = names - {*PLACEHOLDERS, *environment.globals}
        for node in tree.find_all(nodes.Name):
            if node.name not in unknown:
                continue
            near = find_nearest(node.name, PLACEHOLDERS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(PLACEHOLDERS)}"
            raise ConfigError(
                f"{self.label}:{node.lineno}: unknown placeholder {{{{ {node.name} }}}}; {hint}"
            )

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the job file. Raises `ConfigError` for a mistake in the template."""
        self.check()
        environment = _build_environment()
        code = environment.compile(self.text, filename=self.label)
        template = jinja2.Template.from_code(environment, code, environment.globals)
        try:
            text = template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            line = _find_line(error, self.label)
            raise ConfigError(f"{self.label}{line}: {error}") from error
        if self.system == "beaker":
            spec, _ = parse_yaml(text, f"{self.label}: the job file that it makes", ConfigError)
            if not isinstance(spec, dict) or not spec.get("tasks"):
                raise ConfigError(f"{self.label}: makes no Beaker spec, which has a list of tasks")
        return text


def read_template(system: str, path: Path | None) -> JobTemplate:
    """Return the template in `path`, or the default one of a system if that is None."""
    if path is None:
        default = Path(__file__).with_name(f"job.{system}.jinja")
        return JobTemplate(system, default.read_text(encoding="utf-8"), default.name)
    text = read_text(path, f"--template {path}", ConfigError, TEMPLATE_BYTES)
    return JobTemplate(system, text, str(path))


def write_template(system: str, path: Path) -> None:
    """Write the default template of a system for editing. Raises `ConfigError` if `path` exists."""
    if path.exists() or path.is_symlink():
        raise ConfigError(
            f"--write_template {path}: exists already, and nothing is overwritten; name another "
            "file"
        )
    make_folder(path.parent, f"--write_template {path}", ConfigError)
    write(path, read_template(system, None).text)


def _build_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of templates, with filters that quote for shells, YAML and sbatch."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["yaml"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["sbatch"] = _format_directive
    return environment


def _format_directive(value: object) -> str:
    """Return the value of an option after `#SBATCH`, in quotes if it has blanks."""
    text = str(value)
    if any(character in text for character in "\n\"'\\"):
        raise ValueError(
            f"{text!r}: sbatch cannot read quotes, backslashes or line breaks; leave them out"
        )
    return f'"{text}"' if " " in text else text


def _find_line(error: BaseException, label: str) -> str:
    """Return `:LINE` for the innermost line of the template that an error passed, or ""."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == label:
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line
