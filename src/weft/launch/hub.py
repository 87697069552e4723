"""Models that are named and not on this machine: whether the hub has them, and their config.json before all else."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from weft.errors import CheckpointError, nearest
from weft.experiment import Experiment

HUB_SECONDS = 10.0  # for the hub to say whether it has a model
FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")


def fetch_configs(experiment: Experiment) -> bool:
    """Bring the config.json of every role's model that only the hub has into its cache; whether there was any to bring.

    Lengths that nobody sets come from there. Raises `CheckpointError` where the hub has no such model.
    """
    fetched = False
    for role, spec in experiment.roles.items():
        if spec.path is None or Path(spec.path).expanduser().exists() or _cached(spec.path, FILES[:1]):
            continue
        check_there(f"{role}.path", spec.path)
        huggingface_hub.hf_hub_download(spec.path, FILES[0])
        fetched = True
    return fetched


def _cached(path: str, files: tuple[str, ...]) -> bool:
    return any(isinstance(huggingface_hub.try_to_load_from_cache(path, name), str) for name in files)


def check_there(option: str, path: str) -> None:
    """That a path is on this machine, in the hub's cache, or a name that the hub has: asked once, where reading would retry.

    Raises `CheckpointError` naming the option, and the local name most like it.
    """
    place = Path(path).expanduser()
    try:
        if place.exists() or _cached(path, FILES):
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
