"""Join, select and split numpy and torch arrays along the first dimension.

The results are arrays of the same library as the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt
import torch

Array = Any  # a numpy array, a torch tensor, or any other array of the array API standard


def concatenate(arrays: Sequence[Array]) -> Array:
    """Concatenate arrays after converting them to the library and device of the first one."""
    first = arrays[0]
    return array_api_compat.array_namespace(first).concat(
        [convert_like(first, each) for each in arrays]
    )


def take_rows(array: Array, rows: npt.NDArray[np.int64]) -> Array:
    """Return the rows of `array` at the indices `rows`, on the device of `array`."""
    xp = array_api_compat.array_namespace(array)
    return xp.take(array, xp.asarray(rows, device=array_api_compat.device(array)), axis=0)


def concatenate_ranges(
    starts: npt.NDArray[Any], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Concatenate the integer ranges [start, start + count) into one array.

    `starts` and `counts` have one value per range.
    """
    ends = np.cumsum(counts)
    shift = np.repeat(starts.astype(np.int64) - (ends - counts), counts)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) + shift


def take_segments(
    array: Array, starts: npt.NDArray[np.int64], index: npt.NDArray[np.int64]
) -> Array:
    """Concatenate the segments of `array` that `index` selects.

    Segment i consists of the rows `starts[i]` to `starts[i + 1]` (exclusive), and `index` lists the
    indices of the selected segments. If the segments are consecutive, the result is a view.
    """
    if len(index) == 0:
        return array[:0]
    if np.array_equal(index, np.arange(index[0], index[0] + len(index))):
        return array[int(starts[index[0]]) : int(starts[index[-1] + 1])]
    return take_rows(array, concatenate_ranges(starts[index], starts[index + 1] - starts[index]))


def split_rows(array: Array, lengths: npt.NDArray[np.int32]) -> list[Array]:
    """Split an array into consecutive views of its rows; view i has `lengths[i]` rows."""
    if array_api_compat.is_torch_array(array):
        return list(torch.split(array, lengths.tolist()))  # one call makes all views
    ends = np.cumsum(lengths)
    rows: list[Array] = []
    for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
        rows.append(array[end - length : end])
    return rows


def convert_like(like: Array, values: Any) -> Array:
    """Convert `values` (an array or numbers) to the library and device of `like`."""
    xp = array_api_compat.array_namespace(like)
    if array_api_compat.is_array_api_obj(values) and array_api_compat.array_namespace(values) is xp:
        return values
    if array_api_compat.is_array_api_obj(values):
        held = values
    else:
        held = np.asarray(values)
    return xp.asarray(held, device=array_api_compat.device(like))
