"""Conversion of samples to text for the run's files.

A few samples per step are written to samples.jsonl, and all completions to generations.jsonl. The
text of each token is decoded as well, for coloring a text by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.rows import choose_ids
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef
from weft.runtime.calls import WorkerGroup

SHOWN_SAMPLES = 4  # completions shown for an ordinary step
GROUPS = 3
COMPLETIONS = 8  # completions per id shown for a detailed step, which has GROUPS ids
# per completion: maximum number of tokens listed one by one, and of characters kept
TOKENS = 256
TEXT = 8000
# key with one value per completion -> its name in a row
NAMES = {"rewards": "reward", "scores": "score"}
# dataset columns with the reference answer
REFERENCES = ("answer", "ground_truth", "solution", "target")
BY_TOKEN = ("logprobs", "ref_logprobs", "loss_mask", "versions")
PAIRS = ("rank", "comparison")
BROKEN = "\ufffd"  # replacement character: decoded from an incomplete byte sequence


def is_detailed_step(step: int) -> bool:
    """Return whether the samples of a step are shown in detail.

    Detailed samples have values per token, and several completions per id instead of one. All steps
    below 10 are detailed, then every 2nd step below 100, every 20th step below 1000, and so on.
    """
    return step % max(1, 10 ** int(math.log10(max(step, 1))) // 5) == 0


class SampleReader:
    """Reader that converts samples of a step to rows for the run's files.

    It fetches the samples' tensors, so it must be called before these are removed. If the graph
    generates text, the samples are completions. Otherwise they are the data that the step trained
    on.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        group: WorkerGroup,
        tokenizer: Tokenizer,
        last: int | None = None,
    ) -> None:
        """Create a reader; the step `last`, if given, is always shown in detail."""
        self._last_step = last
        self._group = group
        self._tokenizer = tokenizer
        self._decode_tokens = TokenDecoder(tokenizer)
        calls = []
        for node in graph.nodes:
            if isinstance(node, MFCDef) and node.method == "generate":
                calls.append(node)
        self._has_generation = any("completion" in node.output_keys for node in calls)
        self._names = {
            output_key: key for node in calls for key, output_key in node.output_key_remap.items()
        }
        self._keys = list(dict.fromkeys(key for node in graph.nodes for key in node.outputs))

    def read_rows(
        self, ids: Sequence[str], step: int, seen: SequenceSample | None = None
    ) -> list[dict[str, Any]]:
        """Return rows that show samples of a step, given the ids that the step used.

        In a detailed step (see `is_detailed_step`), a few ids are shown, with several completions
        of each id and with values per token. In other steps, only the first completion of each of
        up to `SHOWN_SAMPLES` ids is shown, or nothing if the graph does not generate. `seen` has
        the log-probs or scores of a few ids from the training call.
        """
        if self._has_generation and not self._is_detailed(step):
            batch = self._fetch(ids[:SHOWN_SAMPLES], self._keys)
            return [row for _, row in self._read(batch) if row["k"] == 0]
        if self._has_generation:
            chosen: SequenceSample | None = self._fetch(ids[:GROUPS], [*self._keys, "loss_mask"])
        else:
            chosen = self._fetch_trained(ids, step, seen)
        return [] if chosen is None else list(self._iterate_detailed(chosen))

    def read_generations(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return one row for each completion of these ids.

        The fields of a row include id, prompt, completion, completion_ids, logprobs and
        finish_reason.
        """
        batch = self._fetch(ids, ["logprobs", "finished"])
        logprobs: Sequence[Any] = [None] * batch.num_sequences()
        if "logprobs" in batch.data:
            logprobs = batch.sequences("logprobs")
        rows = []
        for (_, row), completion, values in zip(
            self._read(batch), batch.sequences("completion"), logprobs, strict=True
        ):
            finished = row.pop("finished", None)
            row |= {
                "completion_ids": completion.tolist(),
                "logprobs": None if values is None else values.tolist(),
            }
            if finished is None:
                reason = None
            else:
                reason = "stop" if finished else "length"
            rows.append(row | {"finish_reason": reason})
        return rows

    def _is_detailed(self, step: int) -> bool:
        return step == self._last_step or is_detailed_step(step)

    def _fetch(self, ids: Sequence[str], optional: Sequence[str]) -> SequenceSample:
        """Fetch the prompts and completions of these ids.

        A key in `optional` is also fetched if all ids have it. Keys that the graph renames are
        returned under their original names: for example, `completion` if the graph calls it
        `mixed_completion`.
        """
        completion_keys = [name for name, key in self._names.items() if key == "completion"]
        completion_keys = completion_keys or ["completion"]
        # skip dataset keys that remapped keys replace
        replaced = set(self._names.values())
        batch = self._group.fetch(
            ids, ["prompt", *completion_keys], [key for key in optional if key not in replaced]
        )
        return batch.remap_keys(
            {name: key for name, key in self._names.items() if name in batch.keys}
        )

    def _fetch_trained(
        self, ids: Sequence[str], step: int, seen: SequenceSample | None
    ) -> SequenceSample | None:
        """Return the samples to show for a step of a graph that does not generate.

        `seen` contains log-probs or scores of a few ids, which the training call has computed. If
        any of these ids belong to the step, samples of these ids are returned, with the values in
        `seen`. Otherwise, samples of the step's first ids are returned.

        Returns None if the step is not shown in detail, or if the samples have no completions.
        """
        if not self._is_detailed(step):
            return None
        known = set(ids)
        if seen is not None:
            seen_ids = choose_ids(id for id in seen.ids if id in known)[:GROUPS]
        else:
            seen_ids = []
        batch = self._group.fetch(
            seen_ids or ids[:GROUPS], [], ["completion", "prompt", "loss_mask", *PAIRS, *self._keys]
        )
        if "completion" not in batch.keys:
            return None
        if seen is None or not seen_ids:
            return batch
        return batch.update(seen.select(ids=seen_ids).to("cpu"))

    def _iterate_detailed(self, batch: SequenceSample) -> Iterator[dict[str, Any]]:
        """Yield the rows of a step that is shown in detail, with values per token.

        There is a row for each of the first `COMPLETIONS` completions of each id.
        """
        counts = batch.lengths["completion"].tolist()
        columns = {}
        for key in (*BY_TOKEN, "advantages"):
            if key in batch.data and batch.lengths[key].tolist() == counts:
                columns[key] = batch.sequences(key)
        references = []
        for name in REFERENCES:
            if name in batch.metadata:
                references.append(batch.metadata[name])
        owners = batch.group_of("completion").tolist()
        completions = batch.sequences("completion")
        for index, row in self._read(batch):
            if row["k"] >= COMPLETIONS:
                continue
            values = {key: value[index].tolist() for key, value in columns.items()}
            row |= _find_reference([column[owners[index]] for column in references])
            row |= self._format_by_token(completions[index].tolist(), values)
            if "finished" in row:
                row["finish_reason"] = "stop" if row["finished"] else "length"
            elif "rank" not in row and "logprobs" in values:
                row |= _compute_loss(values)
            yield row

    def _format_by_token(
        self, tokens: Sequence[int], values: Mapping[str, Sequence[float]]
    ) -> dict[str, Any]:
        """Return the fields of a row that show values per token, and summaries of these values.

        The values per token are `tokens` (the text of each token), `logprobs`, `trained` (0 or 1;
        left out if all tokens are trained) and `advantages` (left out if all are equal). The
        summaries are `advantage`, the mean advantage, and `log_ratio`, the sum of log-probs minus
        reference log-probs over the trained tokens.
        """
        columns: dict[str, Any] = {"tokens": self._decode_tokens(tokens[:TOKENS])}
        if "logprobs" in values:
            columns["logprobs"] = [round(value, 4) for value in values["logprobs"][:TOKENS]]
        mask = values.get("loss_mask", [1.0] * len(tokens))
        if not all(mask):
            columns["trained"] = [int(value != 0) for value in mask[:TOKENS]]
        advantages = values.get("advantages", ())
        if len(advantages) > 1 or (advantages and len(tokens) > 1):
            columns["advantage"] = sum(advantages) / len(advantages)
            if min(advantages) < max(advantages):
                columns["advantages"] = [round(value, 4) for value in advantages[:TOKENS]]
        if "logprobs" in values and "ref_logprobs" in values:
            triples = zip(values["logprobs"], values["ref_logprobs"], mask, strict=True)
            columns["log_ratio"] = sum(
                logprob - ref_logprob for logprob, ref_logprob, counts in triples if counts
            )
        return columns

    def _read(self, batch: SequenceSample) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (index of the completion in the batch, its row) for each completion.

        A row has the id, the texts of prompt and completion, and all values per completion.
        """
        # Decode the prompts without the beginning-of-sequence token.
        if "prompt" in batch.data:
            prompt_ids = [tokens.tolist() for tokens in batch.sequences("prompt")]
        else:
            prompt_ids = []
        prompt_ids = prompt_ids or [[] for _ in batch.ids]
        bos = self._tokenizer.bos_id  # not part of the prompt in the row
        prompts = []
        for tokens in prompt_ids:
            prompts.append(self._tokenizer.decode(tokens[1:] if tokens[:1] == [bos] else tokens))
        # Find the keys with one value per completion.
        lengths = batch.lengths["completion"]
        single = []
        for key in batch.data:
            if len(batch.lengths[key]) == len(lengths) and (batch.lengths[key] == 1).all():
                single.append(key)
        columns = {}
        for key in single:
            if key not in ("prompt", "completion", *BY_TOKEN):
                columns[NAMES.get(key, key)] = batch.data[key].tolist()
        # Yield one row per completion.
        owners = batch.group_of("completion").tolist()
        for index, (owner, tokens) in enumerate(
            zip(owners, batch.sequences("completion"), strict=True)
        ):
            row = {
                "id": batch.ids[owner],
                "k": index - int(batch.offsets["completion"][owner]),
                "prompt": _shorten(prompts[owner]),
                "completion": _shorten(
                    self._tokenizer.decode_after(
                        prompt_ids[owner], tokens.tolist(), skip_special=True
                    )
                ),
            }
            yield index, row | {name: values[index] for name, values in columns.items()}


def _shorten(text: str) -> str:
    """Return the text, with its middle replaced by `[...]` if it is longer than `TEXT` characters."""
    if len(text) <= TEXT:
        return text
    return f"{text[: TEXT // 2]} [...] {text[-TEXT // 2 :]}"


def _find_reference(values: Sequence[Any]) -> dict[str, Any]:
    """Return the reference answer as {"answer": text}.

    It is the first of `values` that is a string or number. Returns {} if there is none.
    """
    reference = next((value for value in values if isinstance(value, str | int | float)), None)
    return {} if reference is None else {"answer": _shorten(str(reference))}


def _compute_loss(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return {"loss": mean cross-entropy of the trained tokens of a completion}.

    Returns {} if no token is trained.
    """
    mask = values.get("loss_mask", [1.0] * len(values["logprobs"]))
    trained = []
    for value, counts in zip(values["logprobs"], mask, strict=True):
        if counts:
            trained.append(-value)
    return {"loss": sum(trained) / len(trained)} if trained else {}


class TokenDecoder:
    """Decoder of single tokens, which caches their texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None  # token decoded before others, and its text

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, including special tokens.

        If a character consists of several tokens, the text of the last one is the character, and
        that of the others is empty.
        """
        texts: list[str] = []
        waiting: list[int] = []
        for id in ids:
            piece = self._decode_token(id)
            if not waiting and BROKEN not in piece:
                texts.append(piece)
                continue
            waiting.append(id)
            text = self._decode_after_anchor(waiting)
            if BROKEN in text and len(waiting) < 8:
                texts.append("")
                continue
            texts.append(text)
            waiting = []
        return [*texts[:-1], self._decode_after_anchor(waiting)] if waiting else texts

    def _decode_token(self, id: int) -> str:
        if id not in self._texts:
            self._texts[id] = self._decode_after_anchor([id])
        return self._texts[id]

    def _decode_after_anchor(self, ids: Sequence[int]) -> str:
        """Decode tokens as a continuation of other text, so that a space before a word is kept."""
        if self._anchor is None:
            self._anchor = self._choose_anchor(ids[0])
        anchor, text = self._anchor
        anchored_text = self._tokenizer.decode([anchor, *ids])
        if anchored_text.startswith(text):
            return anchored_text[len(text) :]
        return self._tokenizer.decode(ids)

    def _choose_anchor(self, fallback: int) -> tuple[int, str]:
        """Return (token id, text) of the anchor, a token put in front of the tokens to decode.

        Without an anchor, a space at the beginning of the first word would be lost. The anchor is
        the token of the letter "a" or, if the tokenizer cannot encode this letter, `fallback`.
        """
        anchor = (self._tokenizer.encode("a", bos=False) or [fallback])[-1]
        return anchor, self._tokenizer.decode([anchor])
