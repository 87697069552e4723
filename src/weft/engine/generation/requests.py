"""Checks of requests before they are queued, and detection of the stop texts that they ask for."""

from __future__ import annotations

from collections.abc import Iterable

from weft.data.tokenizer import StreamDecoder, Tokenizer
from weft.engine.base import Partial, Request
from weft.engine.generation.passes import LanguageNetwork
from weft.engine.generation.scheduler import Sequence
from weft.errors import DataError


def compute_limit(network: LanguageNetwork, request: Request, most: int) -> int:
    """Return the maximum number of new tokens of a completion.

    This is the smaller of the request's own limit and `most`, the limit in its sampling settings.
    In a network with learned positions, it is at most the number of positions that the prompt
    leaves free. Raises `DataError` for a limit below 1, and for a prompt that is empty, too long or
    has ids that the model does not have.
    """
    config = network.config
    vocab_size = network.vocab_size
    if (worst := max(request.prompt, default=0)) >= vocab_size or (
        worst := min(request.prompt, default=0)
    ) < 0:
        raise DataError(
            f"id {request.id!r}: the prompt holds token {worst}, and the model knows 0 to "
            f"{vocab_size - 1}; "
            "use the model's own tokenizer"
        )
    if request.max_new_tokens is None:
        wanted = most
    else:
        wanted = min(most, request.max_new_tokens)
    if wanted < 1:
        raise DataError(
            f"id {request.id!r}: max_new_tokens={wanted}; a completion has at least 1 token"
        )
    if len(request.prompt) == 0:
        raise DataError(
            f"id {request.id!r}: the prompt is empty, and a model needs a token to go on from; "
            "set tokenizer.add_bos_token=true or leave the row out"
        )
    if config.learned_positions is None:
        return wanted
    positions = config.learned_positions - config.position_offset - network.prefix_tokens
    room = positions - len(request.prompt)
    if room < 1:
        raise DataError(
            f"id {request.id!r}: a prompt of {len(request.prompt)} tokens leaves no room in the "
            f"{positions} positions of this model; lower dataset.max_prompt_len"
        )
    return min(wanted, room)


def build_prompt(network: LanguageNetwork, request: Request) -> tuple[int, ...]:
    """Return the prompt's tokens, preceded by placeholders for the network's trained prefix."""
    return (*(0,) * network.prefix_tokens, *map(int, request.prompt))


def check_partial(done: Partial, live: Sequence) -> None:
    """Raise `DataError` if the completion `live` cannot continue from the tokens in `done`.

    The reason can be that these tokens belong to another completion, have no log-probs or versions,
    or already reach the limit of the completion.
    """
    if (done.id, done.k) != live.key:
        raise DataError(
            f"completion {live.k} of {live.id!r}: generated is a part of completion {done.k} of "
            f"{done.id!r}; "
            "give each request its own"
        )
    if not len(done.tokens) == len(done.logprobs) == len(done.versions):
        raise DataError(
            f"completion {live.k} of {live.id!r}: generated has {len(done.tokens)} tokens, "
            f"{len(done.logprobs)} log-probs and "
            f"{len(done.versions)} versions; give one of each for every token"
        )
    if len(done.tokens) >= live.limit:
        raise DataError(
            f"completion {live.k} of {live.id!r}: generated has {len(done.tokens)} tokens and at "
            f"most {live.limit} are to be "
            "sampled, so nothing is left; leave it out or raise max_new_tokens"
        )


class StopTextDetector:
    """Detector of stop texts in one completion.

    A stop text or a character can span several tokens. Text is therefore decoded only when later
    tokens cannot change it. Special tokens are part of the text.
    """

    def __init__(self, stops: Iterable[str], tokenizer: Tokenizer) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = StreamDecoder(tokenizer, skip_special=False)
        # characters that may begin a stop text still to come
        self._keep = max(map(len, self._stops)) - 1
        self._tail = ""

    def feed(self, token: int) -> bool:
        """Append a token, and return whether it completes a stop text.

        Stop texts that earlier tokens completed are not reported again.
        """
        text = self._tail + self._decoder.feed([token])
        self._tail = text[max(0, len(text) - self._keep) :]
        return any(stop in text for stop in self._stops)
