"""How long sequences may be where nobody says: what the models' context allows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from weft.data.spec import DatasetSpec
from weft.engine import rope_scaling
from weft.engine.spec import MAX_NEW_TOKENS, GenerationSpec, ModelSpec
from weft.errors import ConfigError
from weft.experiments import _checks as checks
from weft.experiments.common import RunConfig

# Keys of config.json that hold the most positions a model was made for, by family.
CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
)


def context_of(config: RunConfig) -> int | None:
    """The shortest context of the run's models, in tokens; None where no config.json is at hand
    that states one.

    The reward model's does not count: it may read the text in tokens of its own.
    """
    named = {spec.name: getattr(config, spec.name) for spec in fields(config) if spec.name != "rew"}
    found = [model_context(value) for value in named.values() if isinstance(value, ModelSpec)]
    return min((each for each in found if each is not None), default=None)


def model_context(spec: ModelSpec) -> int | None:
    """A model's context in tokens; None where no config.json is at hand that states one."""
    values = checks.model_config(spec)
    for holder in (values, values.get("text_config")):
        if isinstance(holder, dict):
            found = [
                holder[key]
                for key in CONTEXT
                if isinstance(holder.get(key), int) and holder[key] > 0
            ]
            if found:
                return rope_scaling.context(
                    spec.rope_scaling, int(found[0])
                ) - checks.prefix_tokens(spec)
    return None


def with_answers(config: RunConfig, dataset: DatasetSpec) -> DatasetSpec:
    """The dataset of rows with answers, its `max_seqlen` the context where it is absent."""
    return replace(dataset, max_seqlen=dataset.max_seqlen or context_of(config))


@dataclass(frozen=True)
class Lengths:
    """A dataset of prompts and how they are sampled from, with `max_prompt_len` and
    `max_new_tokens` set as far as is known.
    """

    dataset: DatasetSpec
    gen: GenerationSpec

    @classmethod
    def of(cls, config: RunConfig, dataset: DatasetSpec, gen: GenerationSpec, name: str) -> Lengths:
        """Without a length of its own a completion has `MAX_NEW_TOKENS`, or what a set
        `max_prompt_len` leaves of the context, or half of the context, if that is less; a prompt
        what the completion leaves. Raises `ConfigError` where that is nothing.
        """
        context = context_of(config)
        given = dataset.max_prompt_len
        most = gen.max_new_tokens
        if most is None:
            left = MAX_NEW_TOKENS
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
        return cls(replace(dataset, max_prompt_len=given), replace(gen, max_new_tokens=most))


def asked_for(dataset: DatasetSpec, gen: GenerationSpec) -> int | None:
    """Most tokens of a prompt and its completion, where the user says so."""
    if dataset.max_prompt_len is None and gen.max_new_tokens is None:
        return None
    return (dataset.max_prompt_len or 1) + (gen.max_new_tokens or 1)
