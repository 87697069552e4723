"""Key-value cache for generation, with one contiguous slot per sequence that grows by doubling.

    cache = KVCache(network.config, device=..., dtype=...)
    slot = cache.allocate()
    packed = cache.extend([slot], [prompt_ids])    # prefill of a prompt, or of a chunk of it
    hidden = network.compute_hidden(packed)        # writes keys and values
    packed = cache.extend(slots, next_tokens)      # decode step: int64 [R], one token per slot
    cache.release(slot)

A prefix that many sequences share is stored only once, in a separate cache with one slot.
`cache.link(slots, prefix)` makes the prefix precede the contents of these slots.
`cache.take(prompt)` instead copies the contents of such a cache to a new slot.

`extend` makes room for the new tokens and counts them as used; the network's pass then writes their
keys and values. All of this happens under `torch.no_grad()`. Consecutive slots are read without a
copy, so active slots are kept consecutive: `release` moves the last active slot to the index of the
released slot. `cache.num_moves` counts how often the contents moved to new memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft import kernels
from weft.errors import ConfigError
from weft.models.attention.contexts import Dense
from weft.models.network.config import Rope, TransformerConfig
from weft.models.network.packed import Packed
from weft.models.network.rope import LENGTH_DEPENDENT_SCALINGS

Counts = npt.NDArray[Any]  # integers


@dataclass(frozen=True)
class PrefixGroup:
    """Rows of a decode step whose sequences all begin with the same prefix.

    Attributes:
        prefix: Cache that contains the prefix.
        rows: Indices of the rows, int64 [S].
        queries: `rows`, padded with copies of the last index to a multiple of
            `kernels.MIN_QUERIES`, int64. With fewer queries, torch would sum in another order,
            and results would be rounded differently.
    """

    prefix: KVCache
    rows: Tensor
    queries: Tensor

    @classmethod
    def from_rows(cls, prefix: KVCache, rows: list[int], device: torch.device) -> PrefixGroup:
        """Create a group; `rows` are the indices of the rows whose sequences begin with `prefix`."""
        queries = rows + rows[-1:] * (-len(rows) % kernels.MIN_QUERIES)
        return cls(prefix, torch.tensor(rows, device=device), torch.tensor(queries, device=device))


@dataclass(frozen=True)
class Cached:
    """Attention context of the new tokens of R sequences in a cache; made by `KVCache.extend`.

    Row r is one sequence. Its new tokens are the tokens `cu_seqlens[r]:cu_seqlens[r + 1]` of the
    pack, and their positions begin at `before[r] + used[r]`. Each new token attends to the
    `before[r]` tokens of the row's prefix, to the `used[r]` tokens in slot `slots[r]`, and to the
    new tokens of the row up to itself. The network writes the keys and values of the new tokens to
    the slot, where `KVCache.extend` has made room for them.
    """

    cache: KVCache
    slots: Counts  # [R], distinct: indices of the slots in the cache's memory
    used: Counts  # [R]: tokens in the slot before this pass
    before: Counts  # [R]: tokens of the prefix, which is stored separately
    new: Counts  # [R]: new tokens of this pass
    # Each row's prefix in a prefill; () in a decode step, which lists prefixes in `groups` instead.
    prefixes: tuple[KVCache | None, ...]
    groups: tuple[PrefixGroup, ...]
    max_len: int  # most new tokens in a row; 1 in a decode step
    max_used: int  # most tokens in a slot, including the new ones

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of the rows' new tokens in the pack, int32 [R + 1]."""
        return self._put(np.concatenate([[0], self.new.cumsum()]).astype(np.int32))

    @cached_property
    def dense(self) -> Dense:
        """Attention context in which each sequence consists only of its new tokens.

        Attention is computed with this context only in a first prefill, when no other tokens are
        cached.
        """
        return Dense(self.cu_seqlens, self.max_len)

    @property
    def last_tokens(self) -> Tensor:
        """Index of each row's last new token, int64 [R]."""
        return self.dense.last_tokens

    @cached_property
    def token_lengths(self) -> Tensor:
        """Length of each new token's sequence after this pass, including the prefix, int64 [T]."""
        return self._put((self.before + self.used + self.new).repeat(self.new))

    @cached_property
    def is_first_prefill(self) -> bool:
        """True if no row had cached tokens or a prefix before this pass."""
        return not (self.used.any() or any(self.prefixes) or self.groups)

    @cached_property
    def segments(self) -> Tensor:
        """Location of each row's keys in the memory of the cache, int64 [R, 4] on the host.

        The columns are the row's first new token, the number of new tokens, the position of the
        first key, and the number of keys including the new ones. The position refers to the key of
        the first head, and is counted in vectors of size head_dim from the beginning of a layer's
        tensor `keys`.
        """
        segments = np.empty((len(self.new), 4), np.int64)
        segments[:, 0] = self.new.cumsum() - self.new
        segments[:, 1] = self.new
        segments[:, 2] = self.slots * (self.cache.keys[0].stride(0) // self.cache.keys[0].stride(2))
        segments[:, 3] = self.used + self.new
        return torch.from_numpy(segments)

    @cached_property
    def locations(self) -> Tensor:
        """Memory location of each new token's key in the cache, int64 [T] on the host.

        Each location is a row index into a layer's `keys`, viewed as a matrix [rows, head_dim]. The
        row contains the key of the token's first head.
        """
        first_token, new, first_key, num_keys = self.segments.numpy().T
        if self.max_len == 1:
            return torch.from_numpy(first_key + num_keys - 1)
        offsets = first_key + num_keys - new - first_token
        return torch.from_numpy(np.arange(new.sum()) + np.repeat(offsets, new))

    @cached_property
    def tokens_by_prefix(self) -> list[tuple[KVCache, Tensor]]:
        """New tokens that follow each prefix, as pairs (prefix, token indices int64 [n])."""
        if self.max_len == 1:
            return [(group.prefix, group.rows) for group in self.groups]
        tokens: dict[int, tuple[KVCache, list[int]]] = {}
        for prefix, (first, end) in zip(self.prefixes, pairwise(self.dense.starts), strict=True):
            if prefix is not None:
                tokens.setdefault(id(prefix), (prefix, []))[1].extend(range(first, end))
        return [(prefix, torch.tensor(indices)) for prefix, indices in tokens.values()]

    def has_prefix_tokens(self, count: int) -> bool:
        """Return whether any new token is a placeholder for one of a prefix's `count` tokens."""
        return bool((self.before + self.used < count).any())

    def build_decode_mask(self, window: int | None, length: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of a decode step, [R, 1, 1, length].

        `length` is the number of keys that are read from each slot. The mask is 0 for the keys of a
        row's slot to which the row's token attends, and minus infinity for all other keys. All
        layers with the same window share the mask.
        """
        if window not in self._decode_masks:
            positions = torch.arange(length, device=self.cache.device)
            used = self._put(self.used)[:, None]
            is_visible = positions <= used
            if window is not None:
                is_visible &= positions > used - window
            mask = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
            mask.masked_fill_(~is_visible, -torch.inf)
            self._decode_masks[window] = mask[:, None, None]
        return self._decode_masks[window]

    @cached_property
    def _decode_masks(self) -> dict[int | None, Tensor]:
        return {}

    @cached_property
    def span(self) -> slice | None:
        """Slice that selects the slots if they are consecutive and in order, else None.

        The keys of consecutive slots are read without a copy.
        """
        first = int(self.slots[0])
        count = len(self.slots)
        if (self.slots == np.arange(first, first + count)).all():
            return slice(first, first + count)
        return None

    def _put(self, array: Counts) -> Tensor:
        return torch.from_numpy(array).to(self.cache.device)


class KVCache:
    """Cache of keys and values, with one contiguous slot per sequence.

    `keys` and `values` are lists of tensors [num_slots, kv_heads, capacity, head_dim], one per
    cached layer. `layer_indices` maps the index of a layer in the network to its index in these
    lists. Slot s contains `used[s]` tokens and is stored at the index `places[s]` of the tensors'
    first dimension.
    """

    def __init__(
        self,
        config: TransformerConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        slots: int = 8,
        room: int = 64,
        rectangle: bool = True,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Allocate `slots` slots with room for `room` tokens each.

        `layers` are the indices of the cached layers in the network, by default all.

        With `rectangle`, active slots are stored in order, and memory is initialized to zero.
        Without `rectangle`, slots can be stored in any order, and memory is left uninitialized, so
        it can contain NaN. This requires attention that looks up where each row's keys are stored,
        and never reads uninitialized memory.
        """
        self.device = torch.device(device)
        self.dtype = dtype
        cached_layers = layers or range(config.num_layers)
        self.layer_indices = {layer: index for index, layer in enumerate(cached_layers)}
        self.num_moves = 0
        shape = (slots, config.num_kv_heads, room, config.head_dim)
        self._rectangle = rectangle
        self._create_tensor = torch.zeros if rectangle else torch.empty
        self.keys = [
            self._create_tensor(shape, device=device, dtype=dtype) for _ in range(config.num_layers)
        ]
        self.values = [
            self._create_tensor(shape, device=device, dtype=dtype) for _ in range(config.num_layers)
        ]
        self.used = np.zeros(slots, dtype=np.int64)
        # Number of tokens of the prefix that precedes each slot.
        self.before = np.zeros(slots, dtype=np.int64)
        self.places = np.arange(slots)
        self.num_active = 0
        self._prefixes: list[KVCache | None] = [None] * slots
        # The slots of the last decode step as bytes, and the groups of these slots by prefix.
        self._groups: tuple[bytes, tuple[PrefixGroup, ...]] = (b"", ())
        self._rope = config.rope

    @property
    def num_slots(self) -> int:
        """Number of slots, active or not."""
        return len(self.used)

    @property
    def capacity(self) -> int:
        """Number of tokens for which each slot currently has room."""
        return self.keys[0].shape[2]

    @property
    def num_bytes(self) -> int:
        """Size of the keys and values in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def resize(self, slots: int, room: int) -> None:
        """Change the number of slots to `slots`, with room for at least `room` tokens in each.

        `slots` must not be smaller than the number of active slots. The room never shrinks.
        """
        assert slots >= self.num_active, f"{self.num_active} slots are active, {slots} are too few"
        room = max(room, self.capacity)
        if (slots, room) != (self.num_slots, self.capacity):
            self._reshape(slots, room)

    def allocate(self, count: int = 1) -> list[int]:
        """Return the indices of `count` new empty slots, which follow the active ones.

        Active slots always have the indices 0 to num_active - 1.
        """
        first = self.num_active
        self.num_active = self.num_active + count
        if self.num_active > self.num_slots:
            self._reshape(max(self.num_active, 2 * self.num_slots), self.capacity)
        self.used[first : self.num_active] = 0
        self.link(range(first, self.num_active), None)
        return list(range(first, self.num_active))

    def link(self, slots: Iterable[int], prefix: KVCache | None) -> None:
        """Set the prefix of several empty slots; None means no prefix.

        `prefix` is a cache with one slot. Its tokens precede the tokens of each of the `slots`.
        """
        assert prefix is None or prefix.places[0] == 0, "the prefix must be stored at index 0"
        for slot in slots:
            if self._prefixes[slot] is not prefix:
                self._prefixes[slot] = prefix
                self.before[slot] = 0 if prefix is None else prefix.used[0]
                self._groups = (b"", ())

    def take(self, other: KVCache) -> int:
        """Copy slot 0 of `other` to a new slot, and return the new slot's index.

        The new slot has the same prefix as the copied slot.
        """
        (slot,) = self.allocate()
        length = int(other.used[0])
        self._ensure_capacity(length)
        target = self.places[slot]
        source = other.places[0]
        for target_layer, source_layer in zip(
            (*self.keys, *self.values), (*other.keys, *other.values), strict=True
        ):
            target_layer[target, :, :length] = source_layer[source, :, :length]
        self.used[slot] = length
        self.link([slot], other._prefixes[0])
        return slot

    def release(self, slot: int) -> int:
        """Release a slot, and move the last active slot to its index.

        Returns the former index of the last active slot. If it equals `slot`, nothing was moved.
        """
        assert 0 <= slot < self.num_active, f"slot {slot} is not active"
        self.num_active -= 1
        last = self.num_active
        if slot != last:
            if self._rectangle:
                length = int(self.used[last])
                for stored in (*self.keys, *self.values):
                    stored[slot, :, :length] = stored[last, :, :length]
            else:
                self.places[[slot, last]] = self.places[[last, slot]]
            self.used[slot] = self.used[last]
            self.link([slot], self._prefixes[last])
        self.used[last] = 0
        self.link([last], None)
        return last

    def close(self) -> None:
        """Free all memory; the cache cannot be used afterwards."""
        self.keys = []
        self.values = []

    def truncate(self, slot: int, length: int) -> None:
        """Remove all but the first `length` tokens of a slot."""
        assert 0 <= length <= self.used[slot]
        self.used[slot] = length

    def fork(self, slot: int, count: int) -> list[int]:
        """Copy `slot` to `count` new slots for samples of one prompt; return the new indices."""
        new = self.allocate(count)
        length = int(self.used[slot])
        place = self.places[slot]
        for stored in (*self.keys, *self.values):
            for _, copies in _split_runs(self.places[new]):
                stored[copies, :, :length] = stored[place, :, :length]
        self.used[new] = length
        self.link(new, self._prefixes[slot])
        return new

    def extend(self, slots: Sequence[int] | Counts, tokens: Sequence[Tensor] | Tensor) -> Packed:
        """Append `tokens` to some of the slots, and return the network's input for these tokens.

        `tokens` is int64 [R], one per slot, or a sequence of R tensors, each int64 [n >= 1]. In the
        result, `rows` has the index of each slot's last new token, whose hidden state predicts the
        next token. The next tokens are unknown, so `labels` has the last new tokens instead.
        """
        # Compute lengths before and after this pass, and make room.
        slot_indices = np.asarray(slots, dtype=np.int64)
        is_decode_step = isinstance(tokens, Tensor)
        used = self.used[slot_indices]
        before = self.before[slot_indices]
        if is_decode_step:
            new = np.ones_like(used)
        else:
            new = np.array([len(new_tokens) for new_tokens in tokens])
        after = used + new
        positions = before + used
        check_rotation(self._rope, positions, new)
        max_used = int(after.max())
        longest = 1 if is_decode_step else int(new.max())
        self._ensure_capacity(max_used)
        self.used[slot_indices] = after
        prefixes: tuple[KVCache | None, ...] = ()
        groups: tuple[PrefixGroup, ...] = ()
        if longest == 1:
            groups = self._group_by_prefix(slot_indices)
        else:
            prefixes = tuple(self._prefixes[slot] for slot in slot_indices.tolist())
        context = Cached(
            cache=self,
            slots=self.places[slot_indices],
            used=used,
            before=before,
            new=new,
            prefixes=prefixes,
            groups=groups,
            max_len=longest,
            max_used=max_used,
        )
        # Build the pack: one token per slot, or the concatenation of all new tokens.
        if isinstance(tokens, Tensor):
            flat_tokens = tokens.to(self.device)
            rows = torch.arange(len(slot_indices), device=self.device)
            return Packed(flat_tokens, self._put(positions), context, rows, flat_tokens)
        flat_tokens = torch.cat([new_tokens.to(self.device) for new_tokens in tokens])
        ends = np.cumsum(new)
        positions = np.arange(ends[-1]) + np.repeat(positions - (ends - new), new)
        rows = self._put(ends - 1)
        return Packed(flat_tokens, self._put(positions), context, rows, flat_tokens[rows])

    def _group_by_prefix(self, slots: np.ndarray) -> tuple[PrefixGroup, ...]:
        """Return one group per prefix, with the rows of a decode step that begin with this prefix.

        Rows without a prefix are in no group. The groups are cached until the slots or their
        prefixes change.
        """
        if not self.before.any():
            return ()
        if self._groups[0] != slots.tobytes():
            members: dict[int, list[int]] = {}
            prefixes = [self._prefixes[slot] for slot in slots.tolist()]
            for row, prefix in enumerate(prefixes):
                members.setdefault(id(prefix), []).append(row)
            prefix_rows = ((prefixes[rows[0]], rows) for rows in members.values())
            groups = tuple(
                PrefixGroup.from_rows(prefix, rows, self.device)
                for prefix, rows in prefix_rows
                if prefix is not None
            )
            self._groups = (slots.tobytes(), groups)
        return self._groups[1]

    def write(self, layer: int, context: Cached, k: Tensor, v: Tensor) -> None:
        """Store k and v, each [T, kv_heads, head_dim], for the network's layer `layer`."""
        keys = self.keys[self.layer_indices[layer]]
        values = self.values[self.layer_indices[layer]]
        if kernels.serves(k, v, keys, values):
            kernels.store_keys(k, v, keys, values, context.locations)
            return
        if context.max_len == 1:
            index = self._put(context.slots), slice(None), self._put(context.used)
            keys[index] = k
            values[index] = v
            return
        starts = context.dense.starts
        for row, (slot, used) in enumerate(
            zip(context.slots.tolist(), context.used.tolist(), strict=True)
        ):
            new = slice(starts[row], starts[row + 1])
            stop = used + starts[row + 1] - starts[row]
            keys[slot, :, used:stop] = k[new].transpose(0, 1)
            values[slot, :, used:stop] = v[new].transpose(0, 1)

    def read(self, layer: int, context: Cached) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the rows of `context`, each [R, kv_heads, n, head_dim].

        `layer` is an index into `self.keys`, not the layer's index in the network. n is the number
        of tokens in the longest row, rounded up by `kernels.in_vectors`. Values after the end of a
        shorter row are finite but meaningless. Only attention by torch uses this method: weft's
        kernels read the slots directly.
        """
        slots = self._put(context.slots) if context.span is None else context.span
        stop = kernels.in_vectors(context.max_used, self.device)
        return self.keys[layer][slots, :, :stop], self.values[layer][slots, :, :stop]

    def _put(self, array: np.ndarray) -> Tensor:
        return kernels.put(array, self.device)

    def _ensure_capacity(self, length: int) -> None:
        """Make room for at least `length` tokens per slot, and at least double a smaller room."""
        if length > self.capacity:
            room = kernels.in_vectors(max(length, 2 * self.capacity), self.device)
            self._reshape(self.num_slots, room)

    def _reshape(self, slots: int, room: int) -> None:
        """Move the contents to new memory for `slots` slots with room for `room` tokens each."""
        self.num_moves += 1
        num_copied = min(slots, self.num_slots)
        length = int(self.used[:num_copied].max(initial=0))
        runs = _split_runs(self.places[:num_copied])
        for stored in (self.keys, self.values):
            for layer, old in enumerate(stored):
                new = self._create_tensor(
                    (slots, old.shape[1], room, old.shape[3]), device=self.device, dtype=self.dtype
                )
                for slot, place in runs:
                    new[slot, :, :length] = old[place, :, :length]
                stored[layer] = new
        self.places = np.arange(slots)
        num_added = slots - num_copied
        self.used = np.concatenate([self.used[:num_copied], np.zeros(num_added, np.int64)])
        self.before = np.concatenate([self.before[:num_copied], np.zeros(num_added, np.int64)])
        self._prefixes = self._prefixes[:num_copied] + [None] * num_added


def _split_runs(places: np.ndarray) -> list[tuple[slice, slice]]:
    """Return pairs of slices: a range of slots, and the range of memory in which they are stored.

    `places[i]` is the index in memory of slot i. If the slots are stored one after the other, a
    single pair covers all of them. Otherwise, there is one pair per slot. Unlike index tensors,
    slices select views, so that slots can be copied without temporary tensors.
    """
    first = int(places[0]) if len(places) else 0
    count = len(places)
    if (places == np.arange(first, first + count)).all():
        return [(slice(0, count), slice(first, first + count))]
    result: list[tuple[slice, slice]] = []
    for slot, place in enumerate(places.tolist()):
        result.append((slice(slot, slot + 1), slice(place, place + 1)))
    return result


def check_rotation(rope: Rope | None, used: Counts, new: Counts) -> None:
    """Raise `ConfigError` if new tokens would change the rotary frequencies of cached keys.

    `used` and `new` are the numbers of cached and of new tokens of each sequence.
    """
    if rope is None or rope.scaling not in LENGTH_DEPENDENT_SCALINGS:
        return
    original = rope.values["original"]
    after = used + new
    if rope.scaling == "dynamic":
        changes = after > original
    else:
        changes = (after > original) & (used <= original)
    if bool((changes & (used > 0)).any()):
        raise ConfigError(
            f"a sequence grows past {original} tokens while it is generated: this model's "
            f"rope_scaling "
            f"({rope.scaling}) then changes the frequencies of all positions; lower "
            f"max_new_tokens or max_prompt_len"
        )
