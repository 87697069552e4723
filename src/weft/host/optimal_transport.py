"""Host function for AOT (alignment via optimal transport), which compares scores of equal rank.

The rank of a score is its position in the sorted scores of the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import to_host_array
from weft.algorithms.dpo import TRANSPORTED, find_sorted_partners
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError
from weft.host._rows import CompletionRows
from weft.host.base import HostContext
from weft.registry import register_function

Index = npt.NDArray[np.int64]


@register_function("optimal_transport")
def optimal_transport(
    batch: SequenceSample, context: HostContext, loss_type: str
) -> SequenceSample:
    """Return the key `partner` [1]: the number with which each completion's score is compared.

    Two lists of scores are compared. Each list is sorted, and the partner of a score is the score
    with the same rank in the other list.

    With "aot", there is one score per pair, the margin: the log-prob of the better completion minus
    that of the worse one. The margins of the policy are compared with those of the reference. The
    better completion of each pair gets the margin's partner, and the worse completion gets 0.

    With "aot_unpaired", the score of a completion is its log-ratio: its log-prob under the policy
    minus that under the reference. The log-ratios of the better completions are compared with those
    of the worse completions, and vice versa. See `weft.algorithms.dpo`.

    The function reads `old_logprobs` [L] (of the policy before its update), `ref_logprobs` [L],
    `rank`, the lengths of `completion` and, if present, `comparison`, `loss_mask` and `prompt`.
    Raises `DataError` for completions that are not in exactly one pair.
    """
    if loss_type not in TRANSPORTED:
        raise ConfigError(f"loss_type={loss_type!r} must be {' or '.join(TRANSPORTED)}")
    rows = CompletionRows(batch)
    better, worse = _find_pairs(batch, rows)
    policy = rows.sum_tokens("old_logprobs")
    reference = rows.sum_tokens("ref_logprobs")
    partner = np.zeros(len(policy))
    if loss_type == "aot":
        partner[better] = find_sorted_partners(
            policy[better] - policy[worse], reference[better] - reference[worse]
        )
    else:
        ratios = policy - reference
        partner[better] = find_sorted_partners(ratios[better], ratios[worse])
        partner[worse] = find_sorted_partners(ratios[worse], ratios[better])
    return rows.build_sequence_sample(partner=partner)


def _find_pairs(batch: SequenceSample, rows: CompletionRows) -> tuple[Index, Index]:
    """Return the indices of the better and the worse completions of all P pairs, each int64 [P].

    Raises `DataError` if a completion is not in exactly one pair.
    """
    rank = to_host_array(batch.data["rank"])
    if "comparison" in batch.data:
        comparison = to_host_array(batch.data["comparison"])
    else:
        comparison = np.zeros_like(rank)
    order = np.lexsort((rank, comparison, rows.group)).astype(np.int64)
    first = order[0::2]
    second = order[1::2]
    are_paired = len(order) % 2 == 0 and bool(
        (
            (rows.group[first] == rows.group[second]) & (comparison[first] == comparison[second])
        ).all()
        and (rank[first] < rank[second]).all()
    )
    names, counts = np.unique(
        np.stack([rows.group, comparison], axis=-1), axis=0, return_counts=True
    )
    if not are_paired or (counts != 2).any():
        unpaired = names[counts != 2][:1]
        id = batch.ids[int(unpaired[0, 0])] if len(unpaired) else batch.ids[0]
        raise DataError(
            f"{id}: aot and aot_unpaired compare a better with a worse completion, so each "
            f"completion must be in exactly one pair; "
            "use rows of pairs, not rankings"
        )
    return first, second
