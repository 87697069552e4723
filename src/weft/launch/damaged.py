"""Search for damaged weight files, after a run has failed with non-finite numbers."""

from __future__ import annotations

from weft.checkpoints.hf_io import find_weights
from weft.checkpoints.weight_files import WeightFiles
from weft.engine.service_spec import NO_NETWORK
from weft.errors import CheckpointError
from weft.experiment import Experiment
from weft.experiments.models import find_option_role


def find_damaged_weights(experiment: Experiment) -> CheckpointError | None:
    """Return an error that names a role whose weight files contain non-finite values.

    Returns None if the files of all roles are intact. Reads all weight files again, which can take
    a long time, so it should be called only after a run has failed.
    """
    for role, spec in experiment.roles.items():
        if spec.path is None or spec.init_from_scratch or spec.backend in NO_NETWORK:
            continue
        damage = WeightFiles(find_weights(spec.path)).find_not_finite()
        if damage is not None:
            option = f"{find_option_role(experiment.config, role, spec.path)}.path"
            return CheckpointError(
                f"{option}={spec.path}: the weights are damaged: they have non-finite values "
                f"({damage}); "
                "take another checkpoint, or download the model again"
            )
    return None
