"""Lengths of sequences in tokens and of a run in steps, computed from the options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.data.spec import DatasetSpec
from weft.engine.spec import MAX_NEW_TOKENS, GenerationSpec, ModelSpec, Schedule
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.graph.mfc import MFCDef

if TYPE_CHECKING:
    from weft.data.batches import BatchLoader


# -- sequences


def fill_row_length(dataset: DatasetSpec, context: int | None) -> DatasetSpec:
    """Return the options of a dataset whose rows contain answers, with `max_seqlen` filled in.

    If the user did not set `max_seqlen`, it becomes `context`, the context length of the run's
    models.
    """
    return replace(dataset, max_seqlen=dataset.max_seqlen or context)


def fill_sample_lengths(
    dataset: DatasetSpec, gen: GenerationSpec, context: int | None, name: str
) -> tuple[DatasetSpec, GenerationSpec]:
    """Return the dataset and sampling options with default lengths filled in.

    Values that the user set are kept. `context` is the context length of the run's models, or None
    if it is unknown. The default of `max_new_tokens` is `MAX_NEW_TOKENS`. It is reduced so that it
    fits into the context: to the context length minus `max_prompt_len`, or to half of the context
    length if `max_prompt_len` is not set. The default of `max_prompt_len` is the context length
    minus `max_new_tokens`. `name` is the option group of `gen`, for messages. Raises `ConfigError`
    if no room is left for a prompt or a completion.
    """
    given = dataset.max_prompt_len
    most = gen.max_new_tokens
    if most is None:
        left = MAX_NEW_TOKENS  # tokens that the context leaves for a completion
        if context is not None:
            left = context // 2 if given is None else context - given
        most = max(min(MAX_NEW_TOKENS, left), gen.min_new_tokens, 1)
    if (
        gen.max_new_tokens is None
        and context is not None
        and given is not None
        and given >= context
    ):
        raise ConfigError(
            f"dataset.max_prompt_len={given}: leaves no room for a completion in the model's "
            f"context of {context} tokens; "
            f"lower it, or set {name}.max_new_tokens to go beyond that context"
        )
    if given is None and context is not None:
        given = context - most
        if given < 1:
            raise ConfigError(
                f"{name}.max_new_tokens={most}: leaves no room for a prompt in the model's "
                f"context of {context} tokens; "
                "lower it, or set dataset.max_prompt_len to go beyond that context"
            )
    return replace(dataset, max_prompt_len=given), replace(gen, max_new_tokens=most)


def compute_max_length(dataset: DatasetSpec, gen: GenerationSpec) -> int | None:
    """Return the maximum number of tokens of a prompt together with its completion.

    If only one of the two has a maximum length, the other counts as 1 token. Returns None if
    neither has one.
    """
    if dataset.max_prompt_len is None and gen.max_new_tokens is None:
        return None
    return (dataset.max_prompt_len or 1) + (gen.max_new_tokens or 1)


# -- runs


def count_updates(updates_per_firing: Mapping[str, int], call: MFCDef) -> int:
    """Return the number of optimizer steps that a call takes in one pass over its batch.

    Returns 1 for a call that does not train.
    """
    if not call.trains:
        return 1
    updates = updates_per_firing.get(call.name, 1)
    return max(1, updates // int(call.args.get("epochs", 1)))


@dataclass(frozen=True)
class RunLength:
    """Length of a run in steps.

    A run that trains and has `max_steps` set takes that many steps, over as many epochs as needed.
    Any other run takes `total_train_epochs` epochs, or `max_steps` steps if these are fewer.
    Filters that drop ids can only make the run shorter.

    Attributes:
        num_ids: Number of sample ids per epoch.
        firings: Number of firings (executions) of each node per epoch.
        steps_per_epoch: Number of steps per epoch.
        steps: Number of steps of the run.
        updates: Numbers of optimizer steps of each training node, per epoch and in the whole run.
        schedules: Learning rate schedule of each training node. It does not include the steps
            during which the node's role is frozen.
    """

    num_ids: int
    firings: Mapping[str, int]
    steps_per_epoch: int
    steps: int
    updates: Mapping[str, tuple[int, int]]
    schedules: Mapping[str, Schedule]

    @classmethod
    def from_experiment(cls, experiment: Experiment, loader: BatchLoader) -> RunLength:
        """Compute the length of a run. Raises `ConfigError` if it has no steps."""
        num_ids = loader.num_ids
        batches = loader.batches_per_epoch
        control = experiment.control
        firings = {}
        for node in experiment.graph.nodes:
            firings[node.name] = (
                math.ceil(num_ids / node.batch_size) if node.batch_size else batches
            )
        per_epoch = firings[experiment.steps_follow]
        epochs = control.total_train_epochs
        by_batch = experiment.graph.get_node(experiment.steps_follow).batch_size == 0
        steps = loader.count_batches(epochs) if by_batch else per_epoch * epochs
        if control.max_steps is not None:
            if steps and math.isinf(experiment.most_epochs):
                steps = control.max_steps
            else:
                steps = min(steps, control.max_steps)
        if steps < 1:
            raise ConfigError(
                f"the run has no steps: {num_ids} prompts per epoch, {epochs} epochs, "
                f"max_steps={control.max_steps}; "
                "give more rows or a smaller batch"
            )
        # Count optimizer steps; the last epoch can be incomplete.
        share = steps / per_epoch  # number of epochs, as a fraction
        updates = {}
        schedules = {}
        for node in experiment.trained_nodes:
            each = experiment.updates_per_firing.get(node.name, 1)
            in_epoch = firings[node.name] * each
            total = math.ceil(firings[node.name] * share - 1e-9) * each
            updates[node.name] = (in_epoch, total)
            optimizer = experiment.roles[node.role].optimizer
            schedules[node.name] = optimizer.build_schedule(total, in_epoch)
        return cls(num_ids, firings, per_epoch, steps, updates, schedules)

    def build_specs(
        self, experiment: Experiment, longest: int | None = None
    ) -> dict[str, ModelSpec]:
        """Return the model specs of all roles, completed with the options of the run.

        Specs of trained roles also get their learning rate schedule. `longest` is the number of
        tokens of the longest sequence, or None if it is not known.
        """
        control = experiment.control
        specs = {
            role: replace(
                spec,
                longest=longest,
                device=control.device,
                seed=control.seed,
                flash_attention=control.flash_attention,
                on_nonfinite=control.on_nonfinite,
            )
            for role, spec in experiment.roles.items()
        }
        for node in experiment.trained_nodes:
            specs[node.role] = replace(specs[node.role], schedule=self.schedules[node.name])
        return specs
