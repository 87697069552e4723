"""From an experiment to a session that can run: tokenizers, data, engines, in the order in which mistakes are cheapest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import huggingface_hub

from weft.data.loader import LoadedData, load_data
from weft.data.tokenizer import Tokenizer
from weft.engine.device import resolve_device, set_deterministic
from weft.errors import CheckpointError, ConfigError, nearest
from weft.experiment import Experiment
from weft.launch.memory import forecast, held_memory
from weft.launch.plan import plan_lines
from weft.runtime.check import check_calls
from weft.runtime.directory import RunDirectory
from weft.runtime.evaluate import Evaluator
from weft.runtime.group import WorkerGroup
from weft.runtime.local import LocalGroup
from weft.runtime.master import Master
from weft.runtime.samples import Samples
from weft.runtime.schedule import Horizon
from weft.runtime.session import Parts, Session
from weft.runtime.worker import Worker

HUB_SECONDS = 10.0  # for the hub to say whether it has a model


def assemble(experiment: Experiment, directory: RunDirectory) -> Session:
    """Raises `UserError` for anything that can be known to be wrong before the first step; writes nothing."""
    control = experiment.control
    device = resolve_device(control.device)
    set_deterministic(control.deterministic)
    check_calls(experiment)
    tokenizers = load_tokenizers(experiment)
    data = load_data(experiment.dataset, experiment.dataset_type, tokenizers[experiment.data_role], seed=control.seed)
    horizon = Horizon.of(experiment, data.train)
    specs = horizon.specs(experiment)
    shared = experiment.dataset.cache_dir
    cache = Path(shared).expanduser() / "outputs" if shared is not None else directory.path / "cache"
    baseline = held_memory(device)
    group = LocalGroup(lambda: Worker(experiment, specs, tokenizers, str(device), cache), device)
    facts = group.describe()
    expected = forecast(experiment, facts, data, device, baseline)
    return Session(
        Parts(
            experiment=experiment,
            directory=directory,
            group=group,
            master=Master(experiment, group, data.train, tokenizers),
            evaluator=_evaluator(experiment, group, data, tokenizers),
            samples=Samples(experiment.graph, group, tokenizers[experiment.data_role]),
            horizon=horizon,
            plan=plan_lines(experiment, horizon, facts, group.numerics(), data, expected),
            farewell=lambda: expected.compared(group.most_memory_gb()),
        )
    )


def load_tokenizers(experiment: Experiment) -> dict[str, Tokenizer]:
    """Every role's tokenizer; roles that name the same one share it."""
    shared: dict[str, Tokenizer] = {}
    tokenizers = {}
    found: set[str] = set()
    for role, spec in experiment.roles.items():
        if spec.path is None and spec.tokenizer.path is None:
            raise ConfigError(f"{role}.path is missing: give a Hugging Face directory or a hub name")
        for option, path in ((f"{role}.path", spec.path), (f"{role}.tokenizer.path", spec.tokenizer.path)):
            if path is not None and path not in found:
                check_there(option, path)
                found.add(path)
        key = repr((spec.tokenizer, spec.tokenizer.path or spec.path, spec.trust_remote_code))
        if key not in shared:
            shared[key] = Tokenizer.load(spec.tokenizer, spec.path, spec.trust_remote_code)
        tokenizers[role] = shared[key]
    return tokenizers


def check_there(option: str, path: str) -> None:
    """That a path is on this machine, in the hub's cache, or a name that the hub has: asked once, where reading would retry.

    Raises `CheckpointError` naming the option, and the local name most like it.
    """
    place = Path(path).expanduser()
    files = ("config.json", "tokenizer_config.json", "tokenizer.json")
    try:
        if place.exists() or any(isinstance(huggingface_hub.try_to_load_from_cache(path, name), str) for name in files):
            return
        huggingface_hub.HfApi().model_info(path, timeout=HUB_SECONDS)
    except Exception as error:  # whatever its HTTP library raises: the hub has not said that it has it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        siblings = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
        close = nearest(place.name, siblings, 1)
        hint = f"did you mean {place.parent / close[0]}?" if close else "check the spelling"
        raise CheckpointError(
            f"{option}={path!r}: there is no such directory, and the hub hands out no model of this name ({reason}); {hint}"
        ) from error


def _evaluator(
    experiment: Experiment, group: WorkerGroup, data: LoadedData, tokenizers: Mapping[str, Tokenizer]
) -> Evaluator | None:
    if experiment.evaluation is None or not data.valid:
        return None
    return Evaluator(experiment, experiment.evaluation, group, data.valid, tokenizers)
