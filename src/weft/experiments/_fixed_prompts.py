"""Build the graph for the option `eval_prompts`.

The only node of the graph is a call that answers the user's prompts at every evaluation.
"""

from __future__ import annotations

from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.experiment import Evaluation, Experiment
from weft.experiments.common import RunConfig
from weft.experiments.models import read_model_context
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef, Offload
from weft.options import to_mapping

NODE = "eval_prompts"
NEW_TOKENS = 128  # default answer length in a run that samples nothing else
COPIED_OPTIONS = (
    "stop",
    "stop_ids",
    "kv_cache_gb",
)  # options taken over from the run's own sampling


def build_fixed_prompts(config: RunConfig, experiment: Experiment) -> Evaluation | None:
    """Return the graph in which the trained model answers the prompts of the option `eval_prompts`.

    Returns None if the option is not set. If the run samples completions with the trained model,
    the same layout and devices are used for the answers. Raises `ConfigError` if the run trains no
    model that generates text.
    """
    path = config.eval_prompts
    most = config.eval_prompts_max_new_tokens
    if path is None:
        if most is not None:
            raise ConfigError(
                f"eval_prompts_max_new_tokens={most}: eval_prompts is not set; set it, or leave "
                "this out"
            )
        return None
    # Choose the length of answers.
    own, role = _find_sampler(config, experiment, path)
    given = dict(own.args) if own is not None else {}
    spec = experiment.roles[role]
    context = read_model_context(spec)
    usual = int(given.get("max_new_tokens") or NEW_TOKENS)
    if most is None:
        if own is not None or context is None:
            most = usual
        else:
            most = max(1, min(usual, context // 2))
    if context is not None and most >= context:
        raise ConfigError(
            f"eval_prompts_max_new_tokens={most}: leaves no room for a prompt in the model's "
            f"context of {context} tokens; "
            "lower it"
        )
    # Sample greedily, with default options except for COPIED_OPTIONS.
    args = to_mapping(GenerationSpec())
    args |= {name: given[name] for name in COPIED_OPTIONS if name in given}
    call = MFCDef(
        NODE,
        role,
        "generate",
        "generate",
        0,
        input_keys=("prompt",),
        output_keys=("completion", "logprobs", "versions", "finished"),
        args={**args, "max_new_tokens": most, "greedy": True, "samples_per_prompt": 1},
        layout=None if own is None else own.layout,
        device_mesh=None if own is None else own.device_mesh,
        post_hooks=(Offload("weights"),) if spec.offload else (),
    )
    return Evaluation(DataflowGraph([call], ("prompt",)), 0)


def _find_sampler(
    config: RunConfig, experiment: Experiment, path: str
) -> tuple[MFCDef | None, str]:
    """Return the run's call that samples with the trained policy, and the policy's role.

    The call is None if the run does not sample. `path` is the value of `eval_prompts`, for
    messages. Raises `ConfigError` if the run trains no model that generates text.
    """
    calls = experiment.graph.list_model_calls()
    trained = []
    for call in calls:
        if call.trains and experiment.roles[call.role].head == "lm":
            trained.append(call.role)
    if not trained and any(call.trains for call in calls):
        raise ConfigError(
            f"eval_prompts={path}: {config.algorithm or 'this run'} trains a model that scores "
            "texts but cannot generate any; leave eval_prompts out, or set it in a run that "
            "trains a policy (sft, dpo, ppo, grpo, ...)"
        )
    if not trained:
        raise ConfigError(
            f"eval_prompts={path}: this run trains no model; give the prompts as dataset.path"
        )
    own = next(
        (call for call in calls if call.role == trained[0] and call.method == "generate"), None
    )
    return own, trained[0]
