"""Format rows for a terminal, token by token, with coloured trained tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from weft.data.sample import SequenceSample
from weft.data.tokenizer import StreamDecoder, Tokenizer


def format_row(sample: SequenceSample, tokenizer: Tokenizer, lines: bool) -> Text:
    """Format the prompt and completions of a one-row batch for the terminal.

    Tokens are separated by |. With `lines`, each token is on a separate line.
    """
    prompt = sample.data["prompt"].tolist() if "prompt" in sample.keys else []
    text = Text().append(f"id {sample.ids[0]}", style="bold")
    text.append(f"  source {sample.metadata['source'][0]}", style="dim")
    text.append(f"\nprompt, {_format_token_count(prompt)}\n", style="cyan")
    text.append(_format_tokens(tokenizer, [], prompt, [False] * len(prompt), lines))
    for name in (name for name in sample.metadata if name != "source"):
        text.append(f"{name}: {sample.metadata[name][0]!r}\n", style="dim")
    if "completion" not in sample.keys:
        return text
    if "loss_mask" in sample.keys:
        masks = sample.sequences("loss_mask")
    else:
        masks = None
    for index, completion in enumerate(sample.sequences("completion")):
        ids = completion.tolist()
        if masks is None:
            mask = [True] * len(ids)
        else:
            mask = [bool(is_trained) for is_trained in masks[index].tolist()]
        facts = []
        for key in ("rank", "comparison", "margin", "label"):
            if key in sample.keys:
                facts.append(f"{key} {sample.sequences(key)[index].item():g}")
        title = f"completion {index + 1}, {_format_token_count(ids)}, {sum(mask)} trained"
        text.append(f"{', '.join([title, *facts])}\n", style="cyan")
        text.append(_format_tokens(tokenizer, prompt, ids, mask, lines))
    return text


def _format_token_count(ids: Sequence[int]) -> str:
    return f"{len(ids)} token{'' if len(ids) == 1 else 's'}"


def _format_tokens(
    tokenizer: Tokenizer,
    context: Sequence[int],
    ids: Sequence[int],
    mask: Sequence[bool],
    lines: bool,
) -> Text:
    """Return the text of `ids`, token by token, with the trained tokens highlighted.

    Tokens are separated by |, and trained tokens are enclosed in ⟦ and ⟧. With `lines`, each token
    is on a separate line. `context` are the tokens before `ids`, and `mask` is True for trained
    tokens.
    """
    text = Text()
    was_trained = False
    for index, (id, is_trained, piece) in enumerate(
        zip(ids, mask, _decode_tokens(tokenizer, context, ids), strict=True)
    ):
        style = "bold green" if is_trained else "dim"
        if lines:
            text.append(
                f"{index:>6} {id:>8} {'trained' if is_trained else '       '} {piece!r}\n",
                style=style,
            )
            continue
        if is_trained != was_trained:
            text.append("\u27e6" if is_trained else "\u27e7", style="green")
        elif index:
            text.append("|", style="dim")
        text.append(piece.replace("\n", "\u23ce\n"), style=style)
        was_trained = is_trained
    if was_trained and not lines:
        text.append("\u27e7", style="green")
    return text if lines else text.append("\n")


def _decode_tokens(
    tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]
) -> Iterator[str]:
    """Yield the text that each token of `ids` adds to the text of the tokens before it.

    For a token that ends in the middle of a character, the id is yielded instead.
    """
    stream = StreamDecoder(tokenizer, skip_special=False)
    stream.feed(context)
    for id in ids:
        yield stream.feed([id]) or f"<{id}>"
