"""DPO and related losses on pairs of completions.

The call `ref_inf` computes log-probs with the reference, then `actor_train` trains the actor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from weft.algorithms.dpo import (
    LABELLED,
    REFERENCE_FREE,
    TRANSPORTED,
    PreferenceLossOptions,
    build_preference_loss,
)
from weft.data.spec import DatasetSpec
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments._assemble import (
    ExperimentParts,
    assemble,
    build_evaluation_nodes,
    check_config,
    choose_dataset_type,
    fill_batch_sizes,
    get_batch_size,
)
from weft.experiments._roles import build_reference, with_lr
from weft.experiments.common import MFCOptions, RunConfig
from weft.experiments.models import find_context
from weft.graph.mfc import HostFunction, MFCDef, Node
from weft.options import include, option
from weft.planner.lengths import fill_row_length
from weft.registry import register_quickstart


@dataclass
class DPOOptions:
    """Options of DPO and related losses (`dpo.*`)."""

    loss: PreferenceLossOptions = include(PreferenceLossOptions)
    cache_ref_logprobs: bool = option(
        False, "compute the reference's log-probs once for each id and keep them on disk"
    )


@register_quickstart("dpo")
@dataclass
class DPOConfig(RunConfig):
    """Direct preference optimization and related losses, on pairs or rankings.

    The losses are DPO, IPO, RPO, APO, EXO, NCA, SPPO, AOT, SimPO, ORPO, KTO and BCO.
    """

    main_role: ClassVar[str] = "actor"
    trained_roles: ClassVar[tuple[str, ...]] = ("actor",)
    host_nodes: ClassVar[tuple[str, ...]] = (
        "kto_mismatch",
        "kto_baseline",
        "bco_shift",
        "optimal_transport",
    )
    algorithm: ClassVar[str] = "dpo"
    spellings: ClassVar[dict[str, str]] = {
        "beta": "dpo.beta",
        "loss_type": "dpo.loss_type",
        "label_smoothing": "dpo.label_smoothing",
        "precompute_ref_log_probs": "dpo.cache_ref_logprobs",
        "ref_model_name_or_path": "ref.path",
    }

    actor: ModelSpec = option(ModelSpec(), "the model that is trained")
    ref: ModelSpec = option(
        ModelSpec(), "the frozen reference; the actor's path if ref.path is absent"
    )
    dataset: DatasetSpec = option(
        DatasetSpec(), "rows of type paired_comparison, preference or ranking"
    )
    dpo: DPOOptions = option(DPOOptions(), "the loss")
    ref_inf: MFCOptions = option(MFCOptions(), "the call that scores with the reference")
    actor_inf: MFCOptions = option(
        MFCOptions(), "bco, aot: the call that scores with the actor before it is trained"
    )
    actor_train: MFCOptions = option(MFCOptions(), "the call that trains the actor")
    kl_actor_inf: MFCOptions = option(
        MFCOptions(), "kto: the call that scores mismatched completions with the actor"
    )
    kl_ref_inf: MFCOptions = option(
        MFCOptions(), "kto: the call that scores mismatched completions with the reference"
    )

    def build(self) -> Experiment:
        """Return the experiment, whose dataflow graph is `ref_inf -> actor_train`.

        Losses without a reference have no `ref_inf`. KTO, BCO and AOT have further nodes before
        `actor_train`, which compute statistics of the whole batch. Raises `UserError` if an option
        is invalid.
        """
        config = check_config(self)
        dataset = fill_row_length(fill_batch_sizes(config.dataset), find_context(config))
        if config.dpo.loss.loss_type == "kto":
            _check_kto(dataset)
        roles = {"actor": with_lr(config.actor.with_head("lm", trained=True), 1e-6)}
        init_from: dict[str, str] = {}
        if config.dpo.loss.loss_type not in REFERENCE_FREE:
            roles["ref"], init_from = build_reference(config.ref, config.actor)
        nodes = self._build_nodes(get_batch_size(dataset))
        return assemble(
            config,
            ExperimentParts(
                roles=roles,
                nodes=nodes,
                dataset=dataset,
                dataset_type=choose_dataset_type(dataset, "paired_comparison"),
                data_role="actor",
                steps_follow="actor_train",
                longest=config.dataset.limit,
                evaluation=build_evaluation_nodes(nodes, dataset),
                init_from=init_from,
                updates_per_firing={"actor_train": 1},
            ),
        )

    def _build_nodes(self, size: int) -> list[Node]:
        # Build the training call, and check the options of its loss.
        kind = self.dpo.loss.loss_type
        loss_args = self.dpo.loss.build_args()
        if kind in LABELLED:
            label_keys = ("label", LABELLED[kind])
        else:
            label_keys = ("rank", *(("partner",) if kind in TRANSPORTED else ()))
        train = MFCDef(
            name="actor_train",
            role="actor",
            interface="train",
            method="train_step",
            batch_size=size,
            input_keys=("prompt", "completion", *label_keys),
            optional_keys=("comparison", "loss_mask"),
            args={"loss": "dpo", "loss_args": loss_args},
        )
        build_preference_loss(**loss_args)  # raises ConfigError if options exclude each other
        if kind in REFERENCE_FREE:
            return [train]
        # Add the reference's scores, and the nodes of losses that compare the whole batch.
        ref_inf = _build_scoring("ref_inf", "ref", size)
        nodes: list[Node] = [
            replace(ref_inf, cache=self.dpo.cache_ref_logprobs),
            replace(train, input_keys=(*train.input_keys, "ref_logprobs")),
        ]
        if kind == "kto":
            return [*_build_baseline(size), *nodes]
        if kind == "bco" or kind in TRANSPORTED:
            return [*nodes[:1], *_build_comparison(kind, loss_args, size), *nodes[1:]]
        return nodes


def _build_comparison(kind: str, loss_args: Mapping[str, Any], size: int) -> list[Node]:
    """Return the nodes that compute the actor's log-probs and batch statistics for BCO or AOT.

    The log-probs are computed before the actor is updated. From the log-probs of the whole
    batch, a host function computes the reward shift of BCO or, for AOT, the value with which
    each completion is compared.
    """
    scoring = replace(
        _build_scoring("actor_inf", "actor", size),
        output_key_remap={"logprobs": "old_logprobs"},
    )
    bco = kind == "bco"
    statistics = HostFunction(
        name="bco_shift" if bco else "optimal_transport",
        function="bco_shift" if bco else "optimal_transport",
        batch_size=size,
        input_keys=(
            "prompt",
            "completion",
            "old_logprobs",
            "ref_logprobs",
            "label" if bco else "rank",
        ),
        optional_keys=("loss_mask",) if bco else ("loss_mask", "comparison"),
        output_keys=(LABELLED[kind] if bco else "partner",),
        args={"beta": loss_args["beta"]} if bco else {"loss_type": kind},
    )
    return [scoring, statistics]


def _check_kto(dataset: DatasetSpec) -> None:
    """Raise `ConfigError` if batches have only one prompt.

    KTO computes its baseline z0 from completions of other prompts in the batch.
    """
    for name in ("train_bs_n_seqs", "valid_bs_n_seqs"):
        if getattr(dataset, name) == 1:
            raise ConfigError(
                f"dataset.{name}=1: dpo.loss_type=kto computes its baseline from completions of "
                "other prompts in the batch, and a single prompt has no others; set it to 2 or "
                "more"
            )


def _build_scoring(name: str, role: str, size: int, prefix: str = "") -> MFCDef:
    """Return the call `name`, which computes the log-probs of completions with the role `role`.

    With a `prefix`, the completions are read from the key `{prefix}completion`, and the prefix is
    prepended to the output's key.
    """
    output_key = f"{prefix}logprobs" if role == "actor" else f"{prefix}ref_logprobs"
    return MFCDef(
        name=name,
        role=role,
        interface="infer",
        method="inference",
        batch_size=size,
        input_keys=("prompt", "completion"),
        input_key_remap={"completion": f"{prefix}completion"} if prefix else {},
        output_keys=("logprobs",),
        output_key_remap={"logprobs": output_key},
        args={"outputs": ["logprobs"]},
    )


def _build_baseline(size: int) -> list[Node]:
    """Return the nodes that compute KTO's baseline z0.

    Actor and reference score each prompt with the completions of another prompt
    (`weft.host.bco_shift`).
    """
    mismatch = HostFunction(
        name="kto_mismatch",
        function="kto_mismatch",
        batch_size=size,
        input_keys=("completion",),
        optional_keys=("loss_mask",),
        output_keys=("kl_completion", "kl_mask"),
    )
    baseline = HostFunction(
        name="kto_baseline",
        function="kto_baseline",
        batch_size=size,
        input_keys=("kl_logprobs", "kl_ref_logprobs", "kl_mask"),
        output_keys=("kl_baseline",),
    )
    return [
        mismatch,
        _build_scoring("kl_actor_inf", "actor", size, "kl_"),
        _build_scoring("kl_ref_inf", "ref", size, "kl_"),
        baseline,
    ]
