"""Conversion of a sentencepiece `tokenizer.model` to a `tokenizers.Tokenizer`.

The converted tokenizer gives the same ids, including byte fallback. The file is a protobuf message
(sentencepiece_model.proto in google/sentencepiece), of which this module parses the few fields that
it needs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers

from weft.errors import DataError

# values of the enum SentencePiece.Type
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
SPACE = "▁"


@dataclass(frozen=True)
class SentencePieceModel:
    """Contents of a sentencepiece file.

    Texts are normalized before they are split into pieces.

    Attributes:
        pieces: (piece, score, type) of each token, indexed by id
        unigram: True for a unigram model, False for a BPE model
        charsmap: compiled rules that normalize characters
        add_dummy_prefix: put a space before the text
        remove_extra_whitespaces: remove leading and trailing spaces, and merge repeated ones
        unk_id: id of the unknown token
        bos_id: id of BOS, or -1 if the model has none
        eos_id: id of EOS, or -1
        pad_id: id of the padding token, or -1
    """

    pieces: tuple[tuple[str, float, int], ...]
    unigram: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    unk_id: int
    bos_id: int
    eos_id: int
    pad_id: int

    def get_piece(self, index: int) -> str | None:
        """Return the piece with the id `index`, or None for an id without a piece, such as -1."""
        return self.pieces[index][0] if 0 <= index < len(self.pieces) else None


def is_sentencepiece(path: Path) -> bool:
    """Return whether a file called `tokenizer.model` is a sentencepiece model.

    A Tiktoken file can have the same name. It contains text, while a sentencepiece model begins
    with the protobuf tag of its first piece, so the first byte tells them apart.
    """
    with path.open("rb") as file:
        return file.read(1) == b"\x0a"


def read_model(path: Path) -> SentencePieceModel:
    """Parse a sentencepiece file. Raises `DataError` if it has another format or is truncated."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, bytes | int] = {}
    normalizer: dict[int, bytes | int] = {}
    try:
        for number, value in _iterate_fields(path.read_bytes()):
            # Fields of ModelProto: 1 pieces, 2 trainer_spec, 3 normalizer_spec.
            if number == 1 and isinstance(value, bytes):
                piece = dict(_iterate_fields(value))
                score = piece.get(2, b"\0\0\0\0")
                kind = piece.get(3, 1)
                text = piece[1]
                assert (
                    isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)
                )
                pieces.append((text.decode(), struct.unpack("<f", score)[0], kind))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_iterate_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_iterate_fields(value))
    except (
        IndexError,
        KeyError,
        AssertionError,
        UnicodeDecodeError,
        struct.error,
        ValueError,
    ) as error:
        raise DataError(f"{path}: not a sentencepiece model, or cut short ({error})") from error
    if not pieces:
        raise DataError(f"{path}: a sentencepiece model without pieces")
    charsmap = normalizer.get(2, b"")
    return SentencePieceModel(
        pieces=tuple(pieces),
        unigram=trainer.get(3, 1) == 1,
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        unk_id=_decode_id(trainer, 40, 0),
        bos_id=_decode_id(trainer, 41, 1),
        eos_id=_decode_id(trainer, 42, 2),
        pad_id=_decode_id(trainer, 43, -1),
    )


def convert(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """Convert a sentencepiece model to an equivalent `tokenizers.Tokenizer`.

    Control pieces become special tokens.
    """
    byte_fallback = any(kind == BYTE for _, _, kind in model.pieces)
    # Build the model: Unigram, or BPE with merges in the order of the scores.
    if model.unigram:
        scored = [(piece, score) for piece, score, _ in model.pieces]
        core = tokenizers.Tokenizer(models.Unigram(scored, model.unk_id, byte_fallback))
    else:
        vocab = {piece: index for index, (piece, _, _) in enumerate(model.pieces)}
        unk = model.get_piece(model.unk_id)
        core = tokenizers.Tokenizer(
            models.BPE(
                vocab,
                _list_merges(model, vocab),
                unk_token=unk,
                fuse_unk=True,
                byte_fallback=byte_fallback,
            )
        )
    # Normalize the text as sentencepiece does, and invert this when decoding.
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    decoding_steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if model.add_dummy_prefix:
        decoding_steps.append(decoders.Strip(" ", 1, 0))
    core.decoder = decoders.Sequence(decoding_steps)
    # Register pieces that are never split.
    for added_kind in (CONTROL, USER_DEFINED):
        added_tokens = []
        for piece, _, kind in model.pieces:
            if kind == added_kind:
                added_tokens.append(
                    tokenizers.AddedToken(piece, normalized=False, special=kind == CONTROL)
                )
        core.add_tokens(added_tokens)
    return core


def _list_merges(model: SentencePieceModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is also a piece.

    The pairs are sorted by the score of the joined piece, in descending order. Unknown, control and
    byte pieces are ignored.
    """
    mergeable = set()
    for piece, _, kind in model.pieces:
        if kind not in (UNKNOWN, CONTROL, BYTE):
            mergeable.add(piece)
    pairs = []
    for piece, score, _ in model.pieces:
        if piece not in mergeable:
            continue
        for cut in range(1, len(piece)):
            left = piece[:cut]
            right = piece[cut:]
            if left in mergeable and right in mergeable:
                pairs.append((-score, vocab[left], vocab[right], left, right))
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]


def _decode_id(trainer: dict[int, bytes | int], field: int, default: int) -> int:
    """Return the token id in a field of the trainer settings, or `default` if the field is absent.

    Negative ids are stored as 64-bit two's complement numbers.
    """
    value = trainer.get(field, default)
    assert isinstance(value, int)
    return value - 2**64 if value >= 2**63 else value


def _iterate_fields(raw: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield (field number, value) for each field of a protobuf message.

    The value is an integer if the field is a varint, and bytes otherwise.
    """
    position = 0
    while position < len(raw):
        tag, position = _decode_varint(raw, position)
        number = tag >> 3
        wire = tag & 7
        if wire == 0:
            value, position = _decode_varint(raw, position)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} at byte {position}")
        size = 8 if wire == 1 else 4
        if wire == 2:
            size, position = _decode_varint(raw, position)
        if position + size > len(raw):
            raise ValueError("a field runs past the end")
        yield number, raw[position : position + size]
        position += size


def _decode_varint(raw: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
