"""Why numbers of a run are not finite, where the weights that it began with tell."""

from __future__ import annotations

from weft.checkpoints.hf_io import weights_of
from weft.checkpoints.weight_files import WeightFiles
from weft.engine.service_spec import NO_NETWORK
from weft.errors import CheckpointError
from weft.experiment import Experiment
from weft.experiments._models import option_of


def damaged_weights(experiment: Experiment) -> CheckpointError | None:
    """What is wrong with the weights that a role was read from; None where all are finite.

    Reads the files once more, so only where a run has failed.
    """
    for role, spec in experiment.roles.items():
        if spec.path is None or spec.init_from_scratch or spec.backend in NO_NETWORK:
            continue
        found = WeightFiles(weights_of(spec.path)).not_finite()
        if found is not None:
            option = f"{option_of(experiment.config, role, spec.path)}.path"
            return CheckpointError(
                f"{option}={spec.path}: the weights are damaged, and nothing finite comes of them "
                f"({found}); "
                "take another checkpoint, or download the model again"
            )
    return None
