"""KTO's z0: how far the policy has moved from the reference, measured on completions that do not fit their prompt.

z0 is a statistic of the whole batch, so it arrives at the loss as a key (rule 5.1). The graph:

    kto_mismatch   prompt, completion            -> kl_completion (and kl_mask where there is a loss_mask)
    kl_actor_inf   actor, completion:=kl_completion -> kl_logprobs
    kl_ref_inf     ref,   completion:=kl_completion -> kl_ref_logprobs
    kto_baseline   both                          -> kl_baseline
    actor_train    loss dpo, loss_type=kto; reads label, ref_logprobs, kl_baseline
"""

from __future__ import annotations

import numpy as np
import torch

from weft.algorithms.advantages import segment_sums
from weft.algorithms.base import host_array
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError
from weft.host.base import HostContext
from weft.registry import register_function


@register_function("kto_mismatch")
def kto_mismatch(batch: SequenceSample, context: HostContext) -> SequenceSample:
    """Give every prompt the completions of the next id, and the last prompt those of the first.

    Makes `kl_completion`, and `kl_mask` where the batch holds `loss_mask`. As the KTO paper estimates z0 (section 4.1) and
    TRL pairs them, but over the whole batch. Raises `ConfigError` for a batch of one id, which has no next.
    """
    if batch.num_ids < 2:
        raise ConfigError(
            "kto_mismatch pairs each prompt with the completion of another row, and this batch has only one; set "
            "dataset.train_bs_n_seqs to 2 or more, and to a size that does not leave a last batch of 1"
        )
    keys = {"completion": "kl_completion"} | ({"loss_mask": "kl_mask"} if "loss_mask" in batch.data else {})
    rolled = batch.select(ids=[*batch.ids[1:], batch.ids[0]], keys=keys)
    return SequenceSample(
        batch.ids,
        {new: rolled.lengths[old] for old, new in keys.items()},
        {new: rolled.offsets[old] for old, new in keys.items()},
        {new: rolled.data[old] for old, new in keys.items()},
    )


@register_function("kto_baseline")
def kto_baseline(batch: SequenceSample, context: HostContext) -> SequenceSample:
    """z0 = max(0, mean over mismatched completions of the sum of kl_logprobs - kl_ref_logprobs), nats.

    Makes `kl_baseline` [1], the same value for every id. Trained tokens only, where the batch holds `kl_mask`.
    """
    lengths = batch.lengths["kl_logprobs"].astype(np.int64)
    if not np.array_equal(lengths, batch.lengths["kl_ref_logprobs"]):
        raise DataError("keys 'kl_logprobs' and 'kl_ref_logprobs' differ in lengths; both must score kl_completion")
    ratio = host_array(batch.data["kl_logprobs"]).astype(np.float64) - host_array(batch.data["kl_ref_logprobs"])
    if "kl_mask" in batch.data:
        ratio = ratio * host_array(batch.data["kl_mask"])
    baseline = max(0.0, float(segment_sums(ratio, lengths).mean()))
    context.record("kl_baseline", baseline)
    values = torch.full((batch.num_ids,), baseline, dtype=torch.float32)
    return SequenceSample.from_default(batch.ids, [1] * batch.num_ids, {"kl_baseline": values})
