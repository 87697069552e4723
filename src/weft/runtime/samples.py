"""Completions as text: a few a step for samples.jsonl, all of them where the run's product is what it generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef
from weft.runtime.group import WorkerGroup

SHOWN = 4  # completions of a step that go into samples.jsonl
NAMES = {"rewards": "reward", "scores": "score"}  # a key with one value a completion -> its name in a row


class Samples:
    """Reads the completions of a graph that generates, while their tensors are still there."""

    def __init__(self, graph: DataflowGraph, group: WorkerGroup, tokenizer: Tokenizer) -> None:
        self._group, self._tokenizer = group, tokenizer
        calls = [node for node in graph.nodes if isinstance(node, MFCDef) and node.method == "generate"]
        self._generates = bool(calls) and "completion" in {key for node in calls for key in node.outputs}
        self._keys = list(dict.fromkeys(key for node in graph.nodes for key in node.outputs))

    def rows(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """The first completion of up to `SHOWN` ids: id, prompt, completion, and every key with one value each."""
        if not self._generates:
            return []
        batch = self._group.fetch(ids[:SHOWN], ["prompt", "completion"], self._keys)
        return [row for row in self._read(batch) if row["k"] == 0]

    def generations(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Every completion of these ids: id, prompt, completion, completion_ids, logprobs, finish_reason."""
        batch = self._group.fetch(ids, ["prompt", "completion"], ["logprobs", "finished"])
        logprobs: Sequence[Any] = [None] * batch.num_sequences()
        if "logprobs" in batch.data:
            logprobs = batch.sequences("logprobs")
        rows = []
        for row, completion, values in zip(self._read(batch), batch.sequences("completion"), logprobs, strict=True):
            finished = row.pop("finished", None)
            row |= {"completion_ids": completion.tolist(), "logprobs": None if values is None else values.tolist()}
            rows.append(row | {"finish_reason": None if finished is None else "stop" if finished else "length"})
        return rows

    def _read(self, batch: SequenceSample) -> Iterator[dict[str, Any]]:
        prompt_ids = [tokens.tolist() for tokens in batch.sequences("prompt")]
        bos = self._tokenizer.bos_id  # what the tokenizer begins with is no part of a row's prompt
        prompts = [self._tokenizer.decode(tokens[1:] if tokens[:1] == [bos] else tokens) for tokens in prompt_ids]
        lengths = batch.lengths["completion"]
        single = [k for k in batch.data if len(batch.lengths[k]) == len(lengths) and (batch.lengths[k] == 1).all()]
        columns = {
            NAMES.get(key, key): batch.data[key].tolist() for key in single if key not in ("prompt", "completion")
        }
        owners = batch.group_of("completion").tolist()
        for index, (owner, tokens) in enumerate(zip(owners, batch.sequences("completion"), strict=True)):
            row = {
                "id": batch.ids[owner],
                "k": index - int(batch.offsets["completion"][owner]),
                "prompt": prompts[owner],
                "completion": self._tokenizer.decode_after(prompt_ids[owner], tokens.tolist(), skip_special=True),
            }
            yield row | {name: values[index] for name, values in columns.items()}
