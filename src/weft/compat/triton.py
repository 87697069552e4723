"""Write a model repository for NVIDIA Triton.

It consists of `NAME/1/model.pt`, a TorchScript module for any sequence length, and
`NAME/config.pbtxt`. The inputs are `input_ids` and `attention_mask`, int32 [B, T], with padding at
the end. A reward model returns `rewards` [B, 1]. A policy returns `logits` [B, T, V], and
`logprobs` [B, T] of each token given the preceding ones (0 for the first token and for padding).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft import writing
from weft.checkpoints import config_file, hf_io
from weft.engine.hf.imported import hide_library_output
from weft.errors import CheckpointError, ConfigError
from weft.observe.jsonl import build_served_name

Mode = Literal["rm", "sft"]
MAX_BATCH = 25
# (rows, tokens) of the inputs on which the traced module is compared with the network
TRIALS = ((1, 1), (2, 7), (3, 33))
TOLERANCE = 1e-4  # for float32 sums in another order

CONFIG = """name: "{name}"
platform: "pytorch_libtorch"
default_model_filename: "model.pt"
max_batch_size: {batch}
dynamic_batching {{ max_queue_delay_microseconds: 1000 }}
input [
  {{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT32 dims: [ -1 ] }}
]
output [
{outputs}
]
parameters {{ key: "DISABLE_OPTIMIZED_EXECUTION" value: {{ string_value: "true" }} }}
"""


def write(
    model: str, output: Path, mode: Mode, name: str | None = None, padding: int | None = None
) -> Path:
    """Write a Triton model repository to `output`, and return the model's folder in it.

    `mode` is "rm" for a reward model and "sft" for a language model. If `padding` is given, a
    reward model reads the score at the last token whose id is not `padding`.

    Raises `UserError` if the model does not fit `mode`, if some of its layers use windowed
    attention, if it cannot be traced to TorchScript, or if the traced model gives different
    outputs.
    """
    source = hf_io.resolve(model)
    raw = hf_io.read_raw(source)
    scores = config_file.is_reward_model(raw)
    if scores != (mode == "rm"):
        kind, fitting = ("a reward model", "rm") if scores else ("a language model", "sft")
        raise ConfigError(f"--triton_mode={mode}: {model} is {kind}; write --triton_mode {fitting}")
    # TorchScript modules see all tokens, so windows would be ignored silently.
    windows = []
    for window in hf_io.read_config(source)[1].windows:
        if window is not None:
            windows.append(window)
    if windows:
        raise ConfigError(
            f"{model}: attention sees {min(windows)} tokens in some layers, which the TorchScript "
            "module would ignore; use weft serve"
        )
    # Trace the model.
    with hide_library_output():
        network = _load(source, mode)
        if mode == "rm":
            module: nn.Module = TracedRewardModel(
                network, raw.get(hf_io.POOLING) == "mean", padding
            )
        else:
            module = TracedLogProbs(network)
        module.eval()
        traced = _trace(module, int(raw["vocab_size"]), model)
    # Write the store: the module, and a configuration that names its outputs.
    name = name or build_served_name(str(source))
    folder = output / name
    (folder / "1").mkdir(parents=True)
    traced.save(str(folder / "1" / "model.pt"))
    if mode == "rm":
        output_dims = {"rewards": "[ 1 ]"}
    else:
        output_dims = {"logprobs": "[ -1 ]", "logits": f"[ -1, {raw['vocab_size']} ]"}
    lines = []
    for key, dims in output_dims.items():
        lines.append(f'  {{ name: "{key}" data_type: TYPE_FP32 dims: {dims} }}')
    writing.write(
        folder / "config.pbtxt",
        CONFIG.format(name=name, batch=MAX_BATCH, outputs=",\n".join(lines)),
    )
    return folder


class TracedRewardModel(nn.Module):
    """Reward model for export to Triton, which computes one score per row.

    It maps token ids and an attention mask, both [B, T], to scores [B, 1]. The score is computed
    from the hidden state of the last token or, if `mean` is True, from the mean of the hidden
    states. Tokens with mask 0 are ignored. If `padding` is given, the last token is the last one
    whose id is not `padding`.
    """

    def __init__(self, network: Any, mean: bool, padding: int | None) -> None:
        super().__init__()
        self.network = network.base_model
        self.score = network.score
        self.mean = mean
        self.padding = padding

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = _compute_states(self.network, input_ids, attention_mask)
        mask = attention_mask.to(states.dtype).unsqueeze(-1)
        if self.mean:
            pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
        else:
            last = attention_mask.to(torch.int64).sum(dim=1) - 1
            if self.padding is not None:
                positions = torch.ones_like(input_ids, dtype=torch.int64).cumsum(dim=1) - 1
                is_text = (input_ids != self.padding) & (attention_mask > 0)
                last_text = torch.where(is_text, positions, -torch.ones_like(positions)).amax(dim=1)
                last = torch.where(last_text >= 0, last_text, last)
            last = last.reshape(-1, 1, 1)
            pooled = states.gather(1, last.expand(-1, 1, states.shape[2])).squeeze(1)
        return self.score(pooled).float()


class TracedLogProbs(nn.Module):
    """Language model with the inputs and outputs of the exported Triton model.

    It maps token ids and an attention mask, both [B, T], to log-probs [B, T] of the tokens and
    logits [B, T, V]. The log-prob is 0 for the first token of a row and for padding.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.network(
            **_build_arguments(input_ids, attention_mask), logits_to_keep=0
        ).logits.float()
        ids = input_ids.to(torch.int64)
        chosen = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        zeros = torch.zeros_like(logits[:, :1, 0])
        return torch.cat([zeros, chosen * attention_mask[:, 1:].float()], dim=1), logits


def _build_arguments(input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """Return keyword arguments for a `transformers` model, with an explicit mask [B, 1, T, T].

    With the explicit mask, tracing does not turn a sequence length into a constant.
    """
    ids = input_ids.to(torch.int64)
    counts = torch.ones_like(ids).cumsum(dim=1)  # position + 1
    visible = (counts.unsqueeze(1) <= counts.unsqueeze(2)) & (attention_mask.unsqueeze(1) > 0)
    mask = (
        torch.zeros_like(visible, dtype=torch.float32)
        .masked_fill(~visible, torch.finfo(torch.float32).min)
        .unsqueeze(1)
    )
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": counts - 1,
        "use_cache": False,
    }


def _compute_states(network: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    states: Tensor = network(**_build_arguments(input_ids, attention_mask)).last_hidden_state
    return states


def _load(source: Path, mode: Mode) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if mode == "rm":
        auto: Any = AutoModelForSequenceClassification
    else:
        auto = AutoModelForCausalLM
    try:
        return auto.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{source}: transformers cannot load it: {str(error).splitlines()[0]}"
        ) from error


def _build_inputs(rows: int, tokens: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return random token ids and an attention mask, both int32 [rows, tokens].

    All rows but the first have padding at the end.
    """
    draws = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, vocab, (rows, tokens), generator=draws, dtype=torch.int32)
    lengths = torch.tensor([max(1, tokens - 2 * row) for row in range(rows)])
    mask = (torch.arange(tokens) < lengths.unsqueeze(1)).to(torch.int32)
    return ids * mask, mask


@torch.no_grad()
def _trace(module: nn.Module, vocab: int, model: str) -> Any:
    """Return `module` traced to TorchScript, after checking the traced module's outputs.

    Tracing can turn a size into a constant, so the outputs are compared with those of `module` on
    inputs of other sizes. Raises `CheckpointError` if the module cannot be traced, or if the
    outputs differ. `model` is the model's path, for messages.
    """
    try:
        traced = torch.jit.trace(module, _build_inputs(2, 11, vocab), check_trace=False)
        difference = max(
            _measure_difference(module, traced, _build_inputs(rows, tokens, vocab))
            for rows, tokens in TRIALS
        )
    except (RuntimeError, TypeError, ValueError, torch.jit.TracingCheckError) as error:
        raise CheckpointError(
            f"{model}: its network cannot be written in TorchScript: {str(error).splitlines()[0]}"
        ) from error
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"{model}: the TorchScript module differs from the network by {difference:.2g} at "
            f"other lengths; use weft serve"
        )
    return traced


def _measure_difference(module: nn.Module, traced: Any, inputs: tuple[Tensor, Tensor]) -> float:
    """Return the largest absolute difference between two modules' outputs for `inputs`."""
    outputs = module(*inputs)
    traced_outputs = traced(*inputs)
    if isinstance(outputs, Tensor):
        pairs = [(outputs, traced_outputs)]
    else:
        pairs = list(zip(outputs, traced_outputs, strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs)
