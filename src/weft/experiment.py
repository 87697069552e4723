"""An experiment: roles, graph, placement, datasets, control. The single value handed to the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.data.spec import DatasetSpec
from weft.engine.spec import ModelSpec
from weft.errors import unknown_name
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef, Node
from weft.topology import Layout


@dataclass(frozen=True)
class Evaluation:
    """How the run is evaluated on `valid_path`: its own small graph, run over the validation set at `eval_freq_*`.

    Nodes call `evaluate` (or generate/inference plus a host function). Metrics are means over ids, logged as
    `eval/{source}/{metric}` for every validation source and `eval/{metric}` over all.
    """

    graph: DataflowGraph
    batch_size: int


@dataclass(frozen=True)
class Control:
    """Where, how long and how often: the run options."""

    experiment_name: str
    trial_name: str
    fileroot: str = "./runs"
    seed: int = 1
    device: str | None = None
    total_train_epochs: int = 1
    max_steps: int | None = None
    save_freq_steps: int | None = None
    save_freq_epochs: int | None = None
    save_freq_secs: float | None = None
    eval_freq_steps: int | None = None
    eval_freq_epochs: int | None = None
    eval_freq_secs: float | None = None
    log_freq_steps: int = 1
    save_total_limit: int | None = None
    save_milestone_freq_steps: int | None = None
    save_milestone_freq_epochs: int | None = None
    recover_mode: str = "auto"
    recover_freq_steps: int | None = None
    resume_from: str | None = None
    max_tokens_per_microbatch: int = 16384
    deterministic: bool = False
    on_nonfinite: str = "stop"
    loggers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    imports: Sequence[str] = ()
    progress: bool = True


@dataclass(frozen=True)
class Experiment:
    """`steps_follow` names the node whose firings are the run's steps (one line of metrics.jsonl each)."""

    control: Control
    roles: Mapping[str, ModelSpec]
    graph: DataflowGraph
    dataset: DatasetSpec
    dataset_type: str
    data_role: str  # the role whose tokenizer makes the token ids
    placement: Mapping[str, Layout] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    init_from: Mapping[str, str] = field(default_factory=dict)  # role -> role it starts as a copy of
    saved_roles: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)  # the resolved options, written to config.yaml
    steps_follow: str = ""
    updates_per_firing: Mapping[str, int] = field(default_factory=dict)  # trained node -> optimizer steps of one firing
    plan_notes: Sequence[str] = ()  # lines printed before the run: sizes and counts

    def node(self, name: str) -> Node:
        for node in self.graph.nodes:
            if node.name == name:
                return node
        raise unknown_name("node", name, [n.name for n in self.graph.nodes])

    def with_mfc(self, name: str, **changes: Any) -> Experiment:
        """A copy in which the node `name` has other fields: `with_mfc("rew_inf", interface="x", post_hooks=[])`."""
        changed = replace(self.node(name), **changes)
        nodes = [changed if n.name == name else n for n in self.graph.nodes]
        return replace(self, graph=replace(self.graph, nodes=nodes))

    def trained_nodes(self) -> list[MFCDef]:
        return [n for n in self.graph.nodes if isinstance(n, MFCDef) and n.trains]


@dataclass(frozen=True)
class Scheduling:
    """What a registered experiment asks of the machines; `scheduling_setup()` returns it."""

    n_nodes: int = 1
    n_gpus_per_node: int = 0
    memory_gb: float | None = None
