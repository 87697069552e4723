"""Interface `process_reward`: a reward for each reasoning step of a completion.

The reward of a step is the output of a process reward model's head at the step's last token.
"""

from __future__ import annotations

import numpy as np

from weft.algorithms.advantages import compute_segment_sums
from weft.algorithms.base import to_host_array
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer, find_step_ends, find_step_tokens
from weft.errors import ConfigError
from weft.host.base import HostContext, record_rewards
from weft.interfaces.base import MFCResult, Model, have_same_tokens
from weft.registry import register_interface


@register_interface("process_reward")
class ProcessRewardInterface:
    """Interface that scores each reasoning step of a completion with a process reward model.

    The model's head has one output per token. `step` is the text that ends a step, such as a blank
    line; the last step ends with the completion. See Lightman et al. 2023, "Let's Verify Step by
    Step", arXiv 2305.20050.
    """

    def __init__(self, step: str) -> None:
        if not step:
            raise ConfigError(
                "step must not be empty; set it to the text that a step ends with, such as a blank "
                "line"
            )
        self.step = step

    def check_tokens(self, role: str, own: Tokenizer, data: Tokenizer) -> None:
        """Raise `ConfigError` if the role's vocabulary differs from that of the data."""
        if not have_same_tokens(own, data):
            raise ConfigError(
                f"role {role!r} has another tokenizer than the data, so it cannot give rewards at "
                f"the data's tokens; "
                "use a reward model with the same tokenizer, or leave out rew_step"
            )

    def inference(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Return the rewards of each completion's steps and their sum.

        The key `token_rewards` has the shape [L] for a completion of L tokens, and is NaN except at
        the last token of each step. The key `scores` has the sum of each completion's step rewards,
        or 0 for a completion without steps. Raises `ConfigError` if the role's tokenizer and the
        data's have different vocabularies.
        """
        self.check_tokens(model.role, model.tokenizer, model.data_tokenizer)
        # Forward pass: one value before each token and one after the last.
        outputs = model.engine.forward(batch, frozenset({"values"}), max_tokens=model.max_tokens)
        lengths = batch.lengths["completion"].astype(np.int64)
        values = to_host_array(outputs.data["values"]).astype(np.float64)
        ends = np.cumsum(lengths + 1)
        # [L]: output of the head at each token of a completion
        after = np.delete(values, ends - lengths - 1)
        # Keep the values at the last tokens of steps.
        rewards = np.full(len(after), np.nan)
        steps = self._find_last_tokens(model, batch)
        rewards[steps] = after[steps]
        scores = compute_segment_sums(np.nan_to_num(rewards), lengths)
        counted = compute_segment_sums((~np.isnan(rewards)).astype(float), lengths)
        # Record the metrics over all ranks.
        owners = [batch.ids[group] for group in batch.group_of("completion")]
        parts = model.gather((counted, scores, owners))
        context = HostContext()
        context.record("steps", float(np.concatenate([part[0] for part in parts]).mean()))
        groups = np.unique([owner for part in parts for owner in part[2]], return_inverse=True)[1]
        record_rewards(np.concatenate([part[1] for part in parts]), groups, context)
        # Return the rewards by token, and their sums by completion.
        by_token = batch.like("completion", token_rewards=rewards.astype(np.float32))
        by_completion = batch.one_per("completion", scores=scores.astype(np.float32))
        return MFCResult(by_token.update(by_completion), context.metrics)

    def _find_last_tokens(self, model: Model, batch: SequenceSample) -> list[int]:
        """Return the index of each step's last token in the concatenated completions."""
        indices = []
        start = 0
        prompts = [ids.tolist() for ids in batch.sequences("prompt")]
        for group, sequence in zip(
            batch.group_of("completion"), batch.sequences("completion"), strict=True
        ):
            ids = sequence.tolist()
            prompt = prompts[int(group)]
            ends = find_step_ends(model.data_tokenizer.decode_after(prompt, ids, True), self.step)
            for at in dict.fromkeys(find_step_tokens(model.data_tokenizer, prompt, ids, ends)):
                indices.append(start + at)
            start += len(ids)
        return indices
