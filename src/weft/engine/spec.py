"""User options of one role's network.

These dataclasses define the options `actor.*`, `model.*` and those of other roles. The module does
not import torch.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from weft.data.spec import TokenizerSpec
from weft.engine.spec_parts import (
    MIN_TEMPERATURE,
    LoRASpec,
    PrefixSpec,
    check_adapters,
    find_cache_problem,
    find_rope_problem,
    find_stop_ids_problem,
    find_stop_problem,
)
from weft.errors import ConfigError
from weft.extras import install
from weft.options import option
from weft.parallel.schedule import Kind, build_placement
from weft.storage.buckets import find_bucket_problem
from weft.topology import Layout, Mesh, parse_mesh

SCHEDULERS = ("constant", "linear", "cosine", "rsqrt")
OPTIMIZERS = ("adamw", "sgd", "lion", "palm")
FLASH = ("auto", "fa2", "fa3")  # versions of flash attention
DTYPES = ("float32", "bfloat16", "float16", "float64")
STATE_LIBRARY = "bitsandbytes"  # library for 8-bit optimizer states
QUANTIZE = ("8bit", "4bit")
FP8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # torchao's names
TPU = "tpu"  # value of the run's option `device` that only backend=jax has
ATTENTION_KERNELS = ("auto", "xla", "splash", "cudnn")  # of backend=jax
# What JAX keeps of a layer's activations, by the names of jax and EasyLM.
RECOMPUTE_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
STATE_DTYPES = ("float32", "bfloat16", "8bit")
Head = Literal["lm", "value", "score"]
LEARNING_RATE = 1e-5
# default backend: torch, or hf if weft has no family for the model's type
AUTO = "auto"
# environment variable by which JAX finds the other hosts of a run (`weft.engine.jax.hosts`)
JAX_COORDINATOR = "WEFT_JAX_COORDINATOR"
MAX_NEW_TOKENS = 1024  # default for a completion, if the model's context allows


@dataclass(frozen=True)
class Schedule:
    """Lengths of the phases of a role's learning-rate schedule, in optimizer steps.

    The runtime creates the schedule once it knows the number of steps of the run, and the engine
    applies it.
    """

    total_steps: int
    warmup_steps: int
    frozen_steps: int = 0  # optimizer steps skipped before these, while the role is frozen


@dataclass
class OptimizerSpec:
    """Optimizer, learning-rate schedule and clipping of a trained role."""

    type: str = option(
        "adamw",
        "optimizer: adamw, sgd, lion, or palm (Adafactor with whole moments: steps are scaled by "
        "each parameter's own size)",
        choices=OPTIMIZERS,
    )
    state_dtype: str = option(
        "float32",
        "dtype of adamw's two moments: float32, bfloat16 (rounded stochastically, half the "
        "memory), or 8bit (a quarter; "
        "embeddings keep float32; needs the extra 8bit)",
        choices=STATE_DTYPES,
    )
    lr: float | None = option(
        None,
        "peak learning rate; absent: 1e-5; for policies and DPO 1e-6, with adapters 1e-5, with a "
        "prefix 1e-2; for critics 5e-6",
        at_least=0.0,
    )
    weight_decay: float = option(
        0.0,
        "decoupled weight decay of matrices, times the learning rate, with palm times its square; "
        "norms and biases are not decayed",
        at_least=0.0,
    )
    beta1: float = option(0.9, "decay of the gradient's moving average", at_least=0.0, below=1.0)
    beta2: float = option(
        0.95,
        "decay of the squared gradient's moving average; with palm, the decay of step n is "
        "1 - n^-beta2",
        at_least=0.0,
        below=1.0,
    )
    eps: float = option(1e-8, "added to the denominator of the update", at_least=0.0)
    lr_scheduler_type: str = option(
        "cosine",
        "shape of the learning rate after warm-up; rsqrt has no rise: it is the peak until the "
        "end of warm-up and then falls with the root of the step",
        choices=SCHEDULERS,
    )
    warmup_steps_proportion: float | None = option(
        None,
        "share of optimizer steps used for warm-up; absent: 0.02, unless another warm-up is set",
        at_least=0.0,
        at_most=1.0,
    )
    warmup_steps: int | None = option(
        None, "optimizer steps used for warm-up; excludes the other warm-up options", at_least=0
    )
    warmup_epochs: float | None = option(
        None, "epochs used for warm-up; excludes the other warm-up options", at_least=0.0
    )
    min_lr_ratio: float | None = option(
        None,
        "final learning rate as a share of lr; absent: 0, unless end_lr is set",
        at_least=0.0,
        at_most=1.0,
    )
    end_lr: float | None = option(None, "final learning rate; excludes min_lr_ratio", at_least=0.0)
    max_grad_norm: float = option(
        1.0, "clip the gradient to this L2 norm; 0 switches clipping off", at_least=0.0
    )
    offload: bool = option(
        False,
        "keep masters (with f, a device's own rows) and optimizer state in host memory "
        "and update them there; the "
        "device has a copy for computing",
    )
    # epochs at the start in which the role is not trained
    frozen_epochs: float = option(0.0, "", at_least=0.0, hidden=True)

    def __post_init__(self) -> None:
        warmups = []
        for n in ("warmup_steps_proportion", "warmup_steps", "warmup_epochs"):
            if getattr(self, n) is not None:
                warmups.append(n)
        if len(warmups) > 1:
            raise ConfigError(
                f"optimizer: {' and '.join(warmups)} exclude each other; set one of them"
            )
        if self.state_dtype != "float32" and self.type != "adamw":
            raise ConfigError(
                f"optimizer: state_dtype={self.state_dtype} is for type=adamw, and type is "
                f"{self.type}; set one of the two"
            )
        if self.min_lr_ratio is not None and self.end_lr is not None:
            raise ConfigError(
                "optimizer: min_lr_ratio and end_lr exclude each other; set one of them"
            )

    def check_library(self) -> None:
        """Raise `ConfigError` if the library for 8-bit optimizer states is not installed."""
        if self.state_dtype == "8bit" and importlib.util.find_spec(STATE_LIBRARY) is None:
            raise ConfigError(
                f"optimizer.state_dtype=8bit: the package {STATE_LIBRARY!r} is not installed; "
                f"run: {install('8bit')}"
            )

    def build_schedule(self, total_steps: int, steps_per_epoch: float) -> Schedule:
        """Return the schedule of a run with `total_steps` optimizer steps.

        Steps in the first `frozen_epochs` epochs, in which the role is not trained, are not part of
        the schedule. Raises `ConfigError` if no steps are left.
        """
        frozen = round(self.frozen_epochs * steps_per_epoch)
        total_steps -= frozen
        if total_steps < 1:
            raise ConfigError(
                f"the run has no optimizer steps after {self.frozen_epochs:g} epochs without "
                f"training; raise total_train_epochs"
                if frozen
                else "the run has no optimizer steps: the dataset is smaller than one batch, or max_steps is 0"
            )
        if self.warmup_steps is not None:
            warmup = self.warmup_steps
        elif self.warmup_epochs is not None:
            warmup = round(self.warmup_epochs * steps_per_epoch)
        else:
            warmup = round(
                (0.02 if self.warmup_steps_proportion is None else self.warmup_steps_proportion)
                * total_steps
            )
        return Schedule(total_steps, min(warmup, total_steps), frozen)

    @property
    def peak_lr(self) -> float:
        """Peak learning rate: `lr`, or the default rate if `lr` is not set."""
        return LEARNING_RATE if self.lr is None else self.lr

    @property
    def last_lr(self) -> float:
        """Final learning rate, from `end_lr` or `min_lr_ratio`."""
        if self.end_lr is not None:
            return self.end_lr
        return self.peak_lr * (self.min_lr_ratio or 0.0)


@dataclass
class ParallelSpec:
    """Sizes of a role's pipeline, data and tensor parallelism."""

    pipeline_parallel_size: int = option(1, "pipeline stages", at_least=1)
    data_parallel_size: int = option(1, "data-parallel ranks", at_least=1)
    model_parallel_size: int = option(1, "tensor-parallel ranks", at_least=1)


@dataclass
class ModelSpec:
    """Options of one role's network, tokenizer and optimizer."""

    path: str | None = option(
        None,
        "Hugging Face directory (also gs://BUCKET/DIR), hub name, or a run: runs/E/T, "
        "runs/E/T@step40, runs/E/T@best",
        check=find_bucket_problem,
    )
    type: str | None = option(None, "model family; read from config.json when absent")
    init_from_scratch: bool = option(
        False, "take config and tokenizer from path, weights at random"
    )
    dtype: str | None = option(
        None,
        "dtype of the computation and of frozen weights; trained weights are float32, or float64 "
        "with float64, which is meant for "
        "comparing layouts. Absent: the actor's; for an actor or model, float32 on a CPU and the "
        "checkpoint's dtype on a GPU or TPU",
        choices=DTYPES,
    )
    backend: str = option(
        AUTO,
        "torch (weft's own network), hf (the transformers module), jax (weft's network on JAX; "
        "extra jax), null (a tokenizer alone); auto: torch, else hf",
    )
    gradient_checkpointing: bool = option(
        False, "recompute activations: less memory, a third more time to train"
    )
    recompute_every: int | None = option(
        None,
        "recompute only the activations of every n-th layer; 1 is the same as "
        "gradient_checkpointing=true, which it excludes",
        at_least=1,
    )
    recompute_policy: str | None = option(
        None,
        "activations of each layer that the backward pass finds in memory (backend=jax): all, none "
        "(the same as gradient_checkpointing=true, which it excludes), matrix products, or those of "
        "weights; attention scores are always recomputed",
        choices=RECOMPUTE_POLICIES,
    )
    attention: str = option(
        "auto",
        "kernel of attention with backend=jax: xla, splash (TPU), or cudnn (GPU; rows of one "
        "sequence, so short sequences cost as much as the longest); auto: splash on a TPU, else xla",
        choices=ATTENTION_KERNELS,
    )
    compile: bool = option(
        False,
        "have torch compile each block in training and scoring, once for all lengths; takes half "
        "a minute or more at the start",
    )
    fp8: bool = option(
        False,
        "8-bit matrix products in training and scoring; needs an H100 or later, torchao and "
        "compile=true",
    )
    fp8_recipe: str = option(
        "tensorwise",
        "torchao's recipe for fp8: one scale a tensor (fastest), one a row, or that with exact "
        "gradients of weights",
        choices=FP8_RECIPES,
    )
    quantize: str | None = option(
        None,
        "keep frozen weight matrices in 8 or 4 bits (NF4), with or without adapters on top "
        "(QLoRA: lora.r above 0); "
        "computation stays in dtype; 4bit needs the extra 8bit",
        choices=QUANTIZE,
    )
    offload: bool = option(False, "keep the weights in pinned host memory while the role is idle")
    trust_remote_code: bool = option(
        False, "run Python code found in the model directory (hf backend); off by default"
    )
    dropout: float | None = option(
        None, "dropout in training; absent: that of the model's config", at_least=0.0, below=1.0
    )
    residual_dropout: float = option(
        0.0,
        "dropout on the outputs of attention and MLP in training, instead of the "
        "config's own rate there",
        at_least=0.0,
        below=1.0,
    )
    residual_dropout_lima: bool = option(
        False,
        "raise residual_dropout from 0 in the first layer to its full value in the last, as in "
        "LIMA",
    )
    freeze_layers: int | None = option(
        None,
        "do not train the embeddings and this many first layers: no gradient, no optimizer state",
        at_least=0,
    )
    train_last_layers: int | None = option(None, "train only this many last layers", at_least=0)
    rope_scaling: Any = option(
        None,
        "extend the model's context: {type: linear|dynamic, factor: 2} or {type: ntk, alpha: 2}; "
        "saved in config.json",
        check=find_rope_problem,
    )
    router_aux_loss_coef: float | None = option(
        None,
        "weight of the loss that balances experts, a mean over sequences; config.json's own when "
        "absent, where it sets "
        "output_router_logits, else 0",
        at_least=0.0,
    )
    pooling: str = option(
        "last",
        "hidden state that a score is computed from: last token, or mean over tokens",
        choices=("last", "mean"),
    )
    layout: str | None = option(None, "parallel layout such as d2t2p1; the same as parallel.*")
    zero_stage: int | None = option(
        None,
        "what is sharded over data-parallel ranks, if the layout has no f: 0 nothing, 1 optimizer "
        "state, 2 also gradients, 3 also "
        "parameters; absent: 3 for trained roles, 0 for others",
        at_least=0,
        at_most=3,
    )
    pipeline_schedule: str = option(
        "1f1b",
        "order in which pipeline stages process micro-batches; zero_bubble, "
        "interleaved_zero_bubble and zbv need torch 2.13 for training",
        choices=get_args(Kind),
    )
    pipeline_stages_per_rank: int | None = option(
        None,
        "pipeline stages on each rank: 2 or more with the interleaved schedules, 2 "
        "with zbv, 1 with the others; "
        "absent: the fewest",
        at_least=1,
    )
    sequence_parallel: bool = option(
        True,
        "each tensor-parallel rank (t) has a part of the tokens between attention and MLP: less "
        "memory, as many bytes sent "
        "(with recomputation a tenth more); with false each has all of them",
    )
    device_mesh: str | None = option(
        None,
        "devices of the layout, numbered over all machines, such as 4-7 or 0,2; absent: the first "
        "ones",
    )
    prompt_prefix: str = option(
        "", "text before the prompt in the form in which this model reads text"
    )
    prompt_suffix: str = option(
        "", "text after the prompt in the form in which this model reads text"
    )
    parallel: ParallelSpec = option(ParallelSpec(), "degrees of parallelism; the same as layout")
    lora: LoRASpec = option(LoRASpec(), "low-rank adapters")
    prefix: PrefixSpec = option(
        PrefixSpec(), "prefix tuning: keys and values of each layer before every sequence"
    )
    optimizer: OptimizerSpec = option(OptimizerSpec(), "optimizer of a trained role")
    tokenizer: TokenizerSpec = option(
        TokenizerSpec(), "tokenizer; the one in path when its path is absent"
    )
    head: str = option("lm", "", choices=("lm", "value", "score"), hidden=True)
    trained: bool = option(False, "", hidden=True)
    # name of the option that set the layout, if not `layout`
    allocated_by: str = option("", "", hidden=True)
    planned: bool = option(False, "", hidden=True)  # only for a plan: weights are not read
    # a frozen copy of a trained role on another layout
    mirrors: bool = option(False, "", hidden=True)
    # Set by the runtime from the run's options, so that a backend depends on (spec, layout) only.
    schedule: Any = option(None, "", hidden=True)
    # maximum tokens of a sequence of the run, if the data tell
    longest: int | None = option(None, "", hidden=True)
    device: str | None = option(None, "", hidden=True)
    notes: tuple[str, ...] = option((), "", hidden=True)  # the plan's notes on path and backend
    seed: int = option(1, "", hidden=True)  # seed of new weights and dropout
    flash_attention: str = option("auto", "", choices=FLASH, hidden=True)
    # reaction to a loss that is NaN or infinite
    on_nonfinite: str = option("stop", "", choices=("stop", "skip"), hidden=True)

    def __post_init__(self) -> None:
        if self.gradient_checkpointing and self.recompute_policy is not None:
            raise ConfigError(
                f"recompute_policy={self.recompute_policy} and gradient_checkpointing=true exclude "
                f"each other: the second is nothing_saveable; set one of them"
            )
        if self.gradient_checkpointing and self.recompute_every is not None:
            raise ConfigError(
                f"recompute_every={self.recompute_every} and gradient_checkpointing=true exclude "
                f"each other: the second "
                "recomputes every layer; set one of them"
            )
        if self.pipeline_stages_per_rank is not None:
            self.with_virtual_stages(Layout())
        if self.residual_dropout_lima and not self.residual_dropout:
            raise ConfigError(
                "residual_dropout_lima=true ramps residual_dropout, which is 0; set that, such as "
                "0.3"
            )
        if self.freeze_layers is not None and self.train_last_layers is not None:
            raise ConfigError(
                "freeze_layers and train_last_layers exclude each other; set one of them"
            )
        check_adapters(self)

    def resolve_layout(self) -> Layout:
        """Return the layout that is set by the option `layout` or the options `parallel.*`.

        A role with `backend=jax` has one process, which divides its devices itself. Raises
        `ConfigError` if both are set and differ, or if `zero_stage` contradicts `layout`.
        """
        if self.backend == "jax":
            return Layout()
        sizes = self.parallel
        sharded = self.trained if self.zero_stage is None else self.zero_stage > 0
        named = Layout(
            data=sizes.data_parallel_size,
            fsdp=sizes.data_parallel_size if sharded else 1,
            tensor=sizes.model_parallel_size,
            pipeline=sizes.pipeline_parallel_size,
        )
        if self.layout is None:
            return self.with_virtual_stages(named)
        parsed = Layout.parse(self.layout, trained=sharded)
        if self.zero_stage is not None and parsed.data > 1 and (parsed.fsdp > 1) != sharded:
            raise ConfigError(
                f"zero_stage={self.zero_stage} and layout={self.layout!r} differ: stage 0 is f=1, "
                f"stages 1 to 3 a larger f; "
                "set one of them"
            )
        if named.num_devices != 1 and named != parsed:
            raise ConfigError(
                f"layout={self.layout!r} and parallel.* ({named}) differ; set one of them"
            )
        return self.with_virtual_stages(parsed)

    def with_virtual_stages(self, layout: Layout) -> Layout:
        """Return the layout with the number of stages per rank that `pipeline_schedule` needs.

        A layout without pipeline parallelism is returned unchanged. Raises `ConfigError` if the
        schedule doesn't support the value of `pipeline_stages_per_rank`.
        """
        placement = build_placement(
            cast(Kind, self.pipeline_schedule), layout.pipeline, self.pipeline_stages_per_rank
        )
        if layout.pipeline == 1:
            return layout
        return replace(layout, stages_per_rank=placement.stages_per_rank, turns=placement.turns)

    def resolve_mesh(self) -> Mesh:
        """Return the role's layout together with the devices that it uses.

        Raises `ConfigError` for a device mesh that cannot be parsed or doesn't fit the layout.
        """
        return parse_mesh(self.device_mesh, self.resolve_layout())

    @property
    def recomputed_layers(self) -> int:
        """Interval n if the backward pass recomputes every n-th layer; 0 if it recomputes none."""
        return self.recompute_every or int(self.gradient_checkpointing)

    @property
    def freezes(self) -> bool:
        """True if the first layers of a trained role are frozen."""
        return self.freeze_layers is not None or self.train_last_layers is not None

    @property
    def trains_embeddings(self) -> bool:
        """True if a role with adapters also trains the embeddings, because of added tokens."""
        return self.has_adapters and self.lora.r > 0 and bool(self.tokenizer.add_tokens)

    @property
    def has_adapters(self) -> bool:
        """True if the role has low-rank adapters or a prefix on frozen weights.

        The role trains the adapters or the prefix, or gets them from a trained role.
        """
        return (self.trained or self.mirrors) and (self.lora.r > 0 or self.prefix.num_tokens > 0)

    def mirror(self) -> ModelSpec:
        """Return the spec for copies of the role on other device meshes.

        A copy gets its weights from the role and has no optimizer.
        """
        return replace(self, trained=False, mirrors=self.trained, schedule=None)

    def with_head(self, head: Head, *, trained: bool) -> ModelSpec:
        return replace(self, head=head, trained=trained)


@dataclass
class GenerationSpec:
    """Options for sampling completions (`gen.*`)."""

    max_new_tokens: int | None = option(
        None,
        f"maximum tokens of a completion; absent: {MAX_NEW_TOKENS}, or half of the model's "
        f"context if that is less",
        at_least=1,
    )
    min_new_tokens: int = option(
        0,
        "minimum tokens of a completion; log-probs stay normalized over the whole vocabulary, "
        "suppressed end tokens included",
        at_least=0,
    )
    temperature: float = option(1.0, "logits are divided by it before sampling", at_least=0.0)
    top_p: float = option(
        1.0,
        "sample from the likeliest tokens with this much probability in total; 1 is no limit",
        at_least=0.0,
        at_most=1.0,
    )
    top_k: int = option(0, "sample from this many likeliest tokens; 0 is no limit", at_least=0)
    min_p: float = option(
        0.0,
        "drop tokens below this share of the likeliest one's probability; 0 is no limit",
        at_least=0.0,
        at_most=1.0,
    )
    greedy: bool = option(False, "take the likeliest token instead of sampling")
    stop: list[str] = option(
        [],
        "texts that end a completion, besides the end-of-sequence token",
        check=find_stop_problem,
    )
    stop_ids: list[int] = option(
        [],
        "token ids that end a completion, besides the end-of-sequence token",
        check=find_stop_ids_problem,
    )
    max_support: int = option(
        1024,
        "in training, the most ids that top-k/top-p/min-p keep at a position (the likeliest); all "
        "of them are recorded",
        at_least=1,
    )
    kv_cache_gb: float | None = option(
        None,
        "maximum GiB of keys and values; a GPU keeps this memory from one call to the next; "
        "absent: a quarter of the device's memory, on a GPU at most 90% of the free memory",
        check=find_cache_problem,
    )
    decode_ahead: bool = option(
        True, "on a GPU, start each decode step before the tokens of the last one are read"
    )
    seed: int = option(0, "", hidden=True)
    record_support: bool = option(False, "", hidden=True)
    top_logprobs: int = option(0, "", hidden=True)  # number of likeliest ids reported per token
    # tokenizer for stop texts, set by the generate interface
    tokenizer: Any = option(None, "", hidden=True)

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"gen.min_new_tokens={self.min_new_tokens} exceeds "
                f"gen.max_new_tokens={self.max_new_tokens}; lower the first"
            )
        if 0.0 <= self.temperature < MIN_TEMPERATURE and not self.greedy:
            raise ConfigError(
                f"gen.temperature={self.temperature:g}: logits divided by it are not finite; write "
                f"{MIN_TEMPERATURE:g} or more, or set gen.greedy=true for the likeliest token"
            )

    @property
    def new_token_limit(self) -> int:
        """Maximum number of new tokens of a completion.

        This is `max_new_tokens` or, if that is not set, the default for a model whose context
        length is unknown.
        """
        return MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def truncates(self) -> bool:
        """True if sampling is limited to a part of the vocabulary.

        Log-probs are then normalized over the ids that can be sampled.
        """
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)
