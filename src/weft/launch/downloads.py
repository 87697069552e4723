"""Download of the small files that a run is checked with, before torch is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weft.checkpoints import config_file, names
from weft.data.spec import list_source_specs
from weft.experiment import Experiment
from weft.experiments.models import find_option_role
from weft.storage.copies import complete


def fetch_configs(experiment: Experiment, *, data: bool = True) -> bool:
    """Check that models and datasets can be downloaded, and fetch the config.json of each model.

    Models and datasets at local paths or in the local cache are not checked. Returns whether any
    file was downloaded. If so, the caller must build the experiment again, with the values in the
    files.

    Without `data`, only models are checked, not tokenizers and datasets. Raises `CheckpointError`
    for a model or `DataError` for a dataset if it is not on the hub or the hub does not answer. The
    message names the option.
    """
    # the import of the hub's library takes a noticeable part of a second
    import huggingface_hub

    from weft.data import hub
    from weft.data.sources import check_available

    fileroot = experiment.control.fileroot
    fetched = False
    for role, spec in experiment.roles.items():
        if spec.path is not None and data and not (spec.planned or spec.init_from_scratch):
            complete(spec.path)  # the weights of a model in a bucket
        for path, kind in ((spec.path, "path"), (spec.tokenizer.path, "tokenizer.path")):
            if path is None or Path(path).expanduser().exists() or not (data or kind == "path"):
                continue
            if not data and kind == "path" and config_file.find_shipped_config(path) is not None:
                continue  # a plan uses the config.json that is shipped with weft
            option = f"{find_option_role(experiment.config, role, path) if kind == 'path' else role}.{kind}"
            hint = names.suggest_path(path, fileroot)
            if kind == "path" and config_file.find_shipped_config(path) is not None:
                hint = "--dry-run=config plans the run from the config.json that weft ships"
            hub.check_model(option, path, hint)
            if kind == "path" and not hub.is_cached(path, ["config.json"]):
                huggingface_hub.hf_hub_download(path, "config.json")
                fetched = True
    for option, path in _iterate_datasets(experiment) if data else ():
        check_available(path, option)
    return fetched


def _iterate_datasets(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield (option name, path) for every dataset that is given by a path."""
    dataset = experiment.dataset
    for option in ("train_path", "valid_path", "path"):
        path = getattr(dataset, option)
        if path is not None:
            typed = experiment.config.get("dataset", {}).get("path") == path
            yield "dataset.path" if typed else f"dataset.{option}", path
    for index, source in enumerate(list_source_specs(dataset)):
        for option, path in (("path", source.path), ("valid_path", source.valid_path)):
            if path and source.named is None:
                yield f"dataset.sources[{index}].{option}", path
