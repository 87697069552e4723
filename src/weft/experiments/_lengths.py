"""Default sequence lengths, derived from the context of the run's models."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from weft.data.spec import DatasetSpec
from weft.engine.spec import MAX_NEW_TOKENS, GenerationSpec, ModelSpec
from weft.engine.spec_parts import compute_scaled_context
from weft.errors import ConfigError
from weft.experiments import checks
from weft.experiments.common import RunConfig

# Keys of config.json for the maximum number of positions, which differ by model family.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
)


def find_context(config: RunConfig) -> int | None:
    """Return the smallest context length of the run's models, in tokens.

    Context lengths are read from the config.json files that are available. The reward model is
    ignored, since its tokenizer can differ. Returns None if no context length is known.
    """
    named = {}
    for spec in fields(config):
        if spec.name != "rew":
            named[spec.name] = getattr(config, spec.name)
    contexts = []
    for value in named.values():
        if isinstance(value, ModelSpec):
            contexts.append(read_model_context(value))
    return min((each for each in contexts if each is not None), default=None)


def read_model_context(spec: ModelSpec) -> int | None:
    """Return a model's context length in tokens, or None if no available config.json states it.

    The length takes RoPE scaling and the tokens of a trained prefix into account.
    """
    values = checks.read_model_config(spec)
    for holder in (values, values.get("text_config")):
        if isinstance(holder, dict):
            lengths = []
            for key in CONTEXT_KEYS:
                if isinstance(holder.get(key), int) and holder[key] > 0:
                    lengths.append(holder[key])
            if lengths:
                return compute_scaled_context(
                    spec.rope_scaling, int(lengths[0])
                ) - checks.count_prefix_tokens(spec)
    return None


def with_answers(config: RunConfig, dataset: DatasetSpec) -> DatasetSpec:
    """Return the options of a dataset whose rows contain answers, with `max_seqlen` filled in.

    If the user did not set `max_seqlen`, it becomes the context length of the run's models.
    """
    return replace(dataset, max_seqlen=dataset.max_seqlen or find_context(config))


@dataclass(frozen=True)
class SampleLengths:
    """Prompt dataset and sampling options of a run, with default lengths filled in."""

    dataset: DatasetSpec
    gen: GenerationSpec

    @classmethod
    def from_options(
        cls, config: RunConfig, dataset: DatasetSpec, gen: GenerationSpec, name: str
    ) -> SampleLengths:
        """Return the dataset and sampling options with default lengths filled in.

        Values that the user set are kept. The default of `max_new_tokens` is `MAX_NEW_TOKENS`. It
        is reduced so that it fits into the context: to the context length minus `max_prompt_len`,
        or to half of the context length if `max_prompt_len` is not set. The default of
        `max_prompt_len` is the context length minus `max_new_tokens`. `name` is the option group of
        `gen`, for messages. Raises `ConfigError` if no room is left for a prompt or a completion.
        """
        context = find_context(config)
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
        return cls(replace(dataset, max_prompt_len=given), replace(gen, max_new_tokens=most))


def compute_max_length(dataset: DatasetSpec, gen: GenerationSpec) -> int | None:
    """Return the maximum number of tokens of a prompt together with its completion.

    If only one of the two has a maximum length, the other counts as 1 token. Returns None if
    neither has one.
    """
    if dataset.max_prompt_len is None and gen.max_new_tokens is None:
        return None
    return (dataset.max_prompt_len or 1) + (gen.max_new_tokens or 1)
