"""Host functions for KTO's z0, the KL divergence from the reference on mismatched completions.

z0 is a statistic of the whole batch, so it is computed before the loss, which reads it as the key
`kl_baseline`. The graph has these nodes, with their inputs and outputs:

    kto_mismatch   prompt, completion               -> kl_completion, kl_mask
    kl_actor_inf   actor, completion:=kl_completion -> kl_logprobs
    kl_ref_inf     ref, completion:=kl_completion   -> kl_ref_logprobs
    kto_baseline   kl_logprobs, kl_ref_logprobs, kl_mask -> kl_baseline
    actor_train    loss dpo, loss_type=kto; reads label, ref_logprobs, kl_baseline

Here, `completion:=kl_completion` means that the node reads `kl_completion` in place of
`completion`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from weft.algorithms.advantages import compute_segment_sums
from weft.algorithms.base import to_host_array
from weft.data.sample import SequenceSample
from weft.errors import DataError
from weft.host.base import HostContext
from weft.registry import register_function


@register_function("kto_mismatch")
def kto_mismatch(batch: SequenceSample, context: HostContext) -> SequenceSample:
    """Pair each prompt with the completions of the next prompt.

    The last prompt is paired with the completions of the first. The completions are returned as
    `kl_completion`, and their `loss_mask` as `kl_mask` (ones if there is no `loss_mask`). The KTO
    paper (section 4.1) estimates z0 from such mismatched pairs. TRL forms the pairs in the same
    way, but within each micro-batch; weft forms them over the whole batch. A batch of one prompt,
    such as the last batch of an epoch, has no mismatched completions, so the mask and z0 are 0.
    """
    keys = {"completion": "kl_completion"} | (
        {"loss_mask": "kl_mask"} if "loss_mask" in batch.data else {}
    )
    rolled = batch.select(ids=[*batch.ids[1:], batch.ids[0]], keys=keys).remap_keys(keys)
    mask = torch.ones(rolled.num_tokens("kl_completion"))
    if "kl_mask" in rolled.data:
        mask = rolled.data["kl_mask"]
    if batch.num_ids == 1:
        mask = torch.zeros_like(mask)
    sample = rolled.like("kl_completion", kl_completion=rolled.data["kl_completion"], kl_mask=mask)
    return replace(sample, ids=batch.ids)


@register_function("kto_baseline")
def kto_baseline(batch: SequenceSample, context: HostContext) -> SequenceSample:
    """Return KTO's z0 in nats as the key `kl_baseline`, which has the same value for every id.

    The log-ratio of a mismatched completion is the sum of `kl_logprobs` - `kl_ref_logprobs` over
    its tokens in `kl_mask`. z0 is the mean log-ratio, or 0 if the mean is negative. Raises
    `DataError` if `kl_logprobs` and `kl_ref_logprobs` have different lengths.
    """
    lengths = batch.lengths["kl_logprobs"].astype(np.int64)
    if not np.array_equal(lengths, batch.lengths["kl_ref_logprobs"]):
        raise DataError(
            "keys 'kl_logprobs' and 'kl_ref_logprobs' differ in lengths; both must score "
            "kl_completion"
        )
    ratio = to_host_array(batch.data["kl_logprobs"]).astype(np.float64) - to_host_array(
        batch.data["kl_ref_logprobs"]
    )
    sums = compute_segment_sums(ratio * to_host_array(batch.data["kl_mask"]), lengths)
    baseline = max(0.0, float(sums.mean()))
    context.record("kl_baseline", baseline)
    values = torch.full((batch.num_ids,), baseline, dtype=torch.float32)
    return SequenceSample.from_default(batch.ids, [1] * batch.num_ids, {"kl_baseline": values})
