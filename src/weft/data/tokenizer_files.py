"""Loading of tokenizers from files, and application of the options that change them.

A tokenizer is loaded from a Hugging Face directory, a bare `tokenizer.json`, or a sentencepiece
`tokenizer.model`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from weft.data import hub, spm
from weft.data.rows import RowTooLong
from weft.data.spec import TEMPLATES, TokenizerSpec, read_template_text
from weft.data.tokenizer_checks import check_growth, find_template_problem
from weft.errors import ConfigError, DataError, UserError, find_nearest
from weft.reading import (
    check_file,
    check_folder,
    describe_cause,
    explain_read_errors,
    read_model_object,
    read_text,
    refuse_url,
)

Hf = TypeVar("Hf", bound=PreTrainedTokenizerBase)
SENTENCEPIECE = "tokenizer.model"
COMMAND = "--"  # `option` of a command such as `weft chat`, which has flags instead of role options
TEMPLATE = "template"  # value of `add_tokens`: the special tokens of the named chat template
# Prefixes of tokenizer classes whose sentencepiece models begin texts with BOS by default.
CLASSES_WITH_BOS = (
    "Llama",
    "CodeLlama",
    "Gemma",
)
STOP_ID_FILES = ("config.json", "generation_config.json")
# Kinds of normalizers and pre-tokenizers for which `compute_tokens_per_byte` has a bound.
BOUNDED_STEPS = frozenset(
    (
        "NFC",
        "Prepend",
        "Replace",
        "ByteLevel",
        "Metaspace",
        "Split",
        "Digits",
        "Whitespace",
        "WhitespaceSplit",
        "Punctuation",
    )
)
BLANK = "\u2581"  # sentencepiece's character for a space
# `encode_text` tokenizes texts of at most this many characters regardless of the limit on tokens.
MAX_UNCHECKED_CHARACTERS = 200_000


def read_stop_ids(path: str) -> tuple[int, ...]:
    """Return the ids that end a completion according to a model's configuration.

    The ids are listed as `eos_token_id` (one id or several) in config.json and
    generation_config.json.
    """
    stop_ids: list[int] = []
    for name in STOP_ID_FILES:
        value = read_model_values(path, name).get("eos_token_id")
        for id in value if isinstance(value, list) else [value]:
            if isinstance(id, int):
                stop_ids.append(id)
    return tuple(dict.fromkeys(stop_ids))


def read_model_values(path: str, name: str) -> Mapping[str, Any]:
    """Return the contents of the JSON file `name` in a model directory or hub model.

    Returns an empty mapping if there is no such file, or if the hub cannot be reached.
    """
    place = Path(path).expanduser()
    try:
        file = (place if place.exists() else hub.find_model_folder(path)) / name
    except hub.FAILURES:  # reported elsewhere if the model itself is needed
        return {}
    return read_model_object(file, str(file)) if file.exists() else {}


def format_option(option: str, name: str) -> str:
    """Return a tokenizer option as the user writes it, such as `actor.tokenizer.eos_token`.

    `option` is the prefix, here `actor.tokenizer`, and `name` the last part. If the prefix is
    `COMMAND`, the result is a flag such as `--chat-template`.
    """
    if option == COMMAND:
        return f"--{name.replace('_', '-')}"
    return f"{option}.{name}"


def read_tokenizer(
    path: str, trust_remote_code: bool, option: str = "tokenizer", *, own: bool = False
) -> PreTrainedTokenizerBase:
    """Read the tokenizer at `path`, which is a file, a directory or a hub name.

    `own` is True if no tokenizer option is set and `path` is therefore the path of the model; it
    only affects messages. Raises `UserError`, naming the option that set the path, if no tokenizer
    can be read.
    """
    # A file: tokenizer.json or a sentencepiece model.
    place = Path(path).expanduser()
    path_label = _describe_path(path, option, own=own)
    if place.is_file():
        if place.suffix == ".json":
            check_growth(place, path_label)
            with explain_read_errors(f"{path_label}: is not a tokenizer.json", UserError):
                return _check_tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(place)))
        if place.suffix == ".model" and spm.is_sentencepiece(place):
            return _from_sentencepiece(place, {})
        raise UserError(
            f"{path_label}: a file must be a tokenizer.json or a sentencepiece tokenizer.model"
        )
    # A directory with a sentencepiece model only.
    if place.is_dir():
        check_folder(place, path_label)
    if place.is_dir() and not (place / "tokenizer.json").exists():
        model = place / SENTENCEPIECE
        if model.exists() and spm.is_sentencepiece(model):
            config = place / "tokenizer_config.json"
            return _from_sentencepiece(
                model, read_model_object(config, str(config)) if config.exists() else {}
            )
    # Other directories and hub names, read by `transformers`.
    refuse_url(path, path_label)
    if not place.exists() and (
        place.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
    ):
        raise UserError(f"{path_label}: no such file or directory")
    if place.is_dir():
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (place / name).exists():
                check_file(place / name, f"{path_label}: {place / name}", UserError)
    fix = "give an HF directory, a tokenizer.json, a sentencepiece tokenizer.model, or a hub name"
    with explain_read_errors(f"{path_label}: no tokenizer can be read there", UserError, fix):
        if not place.is_dir() and not trust_remote_code:
            place = hub.find_model_folder(path)
        source = str(place) if place.is_dir() else path
        if (place / "tokenizer.json").is_file():
            check_growth(place / "tokenizer.json", f"{path_label}: {place / 'tokenizer.json'}")
        try:
            own_config = _read_plain_config(source)
            hf = _check_tokenizer(
                AutoTokenizer.from_pretrained(
                    source, config=own_config, trust_remote_code=trust_remote_code
                )
            )
        except StrictDataclassError as wrong:
            # `AutoTokenizer` reads config.json, too, to find the tokenizer's class.
            raise UserError(f"{path_label}/config.json: {describe_cause(wrong)}") from wrong
        hf.name_or_path = path
        return hf


def _read_plain_config(source: str) -> PreTrainedConfig | None:
    """Return a model's config.json as a plain configuration for `AutoTokenizer`, or None.

    With this configuration, `AutoTokenizer` does not import the model's own configuration class,
    which would take a second. Returns None if a file is missing, if tokenizer_config.json does not
    name the tokenizer class, or if the model or tokenizer has custom code.
    """
    files = [Path(source) / name for name in ("config.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files):
        return None
    model, tokenizer = (read_model_object(file, str(file)) for file in files)
    if (
        "auto_map" in model
        or "auto_map" in tokenizer
        or not isinstance(tokenizer.get("tokenizer_class"), str)
    ):
        return None
    # transformers warns of this key, even if it is null. It does not affect the tokenizer.
    model.pop("rope_scaling", None)
    return PreTrainedConfig.from_dict(model, name_or_path=source)


def _describe_path(path: str, option: str, *, own: bool) -> str:
    """Return `OPTION=PATH` for error messages, where OPTION is the option that set `path`.

    `own` is True if the path was set by the model's option, such as `actor.path`, and not by a
    tokenizer option. If `option` is `COMMAND`, `path` is returned unchanged.
    """
    if option == COMMAND:
        return path
    model = option.removesuffix(".tokenizer")
    if own and model != option:
        return f"{model}.path={path}"
    return f"{format_option(option, 'path')}={path}"


def _check_tokenizer(hf: Hf) -> Hf:
    """Check that a tokenizer is usable, and return the tokenizer.

    Raises `ValueError` if the vocabulary or chat template is invalid, or if text gets no tokens.
    """
    hf("a", verbose=False)
    vocab = hf.get_vocab()
    if (
        vocab
        and not hf("The 1st of a, b and c.", add_special_tokens=False, verbose=False)["input_ids"]
    ):
        raise ValueError(
            "it gives no tokens for a text: its vocabulary has only special tokens; is "
            "tokenizer.json missing?"
        )
    if not vocab or min(vocab.values()) < 0:
        raise ValueError(
            "its vocabulary is empty" if not vocab else "its vocabulary has ids below 0"
        )
    template = hf.chat_template
    if not isinstance(template, str | dict | None):
        raise ValueError(f"its chat template is a {type(template).__name__}, not text")
    return hf


def _from_sentencepiece(path: Path, config: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build a tokenizer from a sentencepiece file.

    `config` is the content of tokenizer_config.json, which lists the special tokens; it may be
    empty.
    """
    with explain_read_errors(
        f"tokenizer.path={path}: no tokenizer can be built from it and its tokenizer_config.json"
    ):
        return _check_tokenizer(_build_tokenizer(spm.read_model(path), config))


def _build_tokenizer(
    model: spm.SentencePieceModel, config: Mapping[str, Any]
) -> PreTrainedTokenizerFast:
    names = {
        "unk_token": model.unk_id,
        "bos_token": model.bos_id,
        "eos_token": model.eos_id,
        "pad_token": model.pad_id,
    }
    tokens: dict[str, str | None] = {name: model.get_piece(id) for name, id in names.items()}
    for name in (*names, "sep_token"):
        token = config.get(name)
        tokens[name] = (token["content"] if isinstance(token, Mapping) else token) or tokens.get(
            name
        )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=spm.convert(model),
        **{name: token for name, token in tokens.items() if token is not None},
    )
    added = sorted((int(id), token) for id, token in config.get("added_tokens_decoder", {}).items())
    known = hf.get_vocab()
    hf.add_tokens(
        [token["content"] for _, token in added if token["content"] not in known],
        special_tokens=True,
    )
    hf.chat_template = config.get("chat_template")
    class_default = str(config.get("tokenizer_class", "")).startswith(CLASSES_WITH_BOS)
    set_add_bos(hf, bool(config.get("add_bos_token", class_default)) and hf.bos_token is not None)
    return hf


def set_add_bos(hf: Any, add_bos: bool) -> None:
    """Set whether the `transformers` tokenizer begins texts with BOS.

    The setting is included when the tokenizer is saved. It has no effect on tokenizers written in
    Python.
    """
    if isinstance(hf, PreTrainedTokenizerFast):
        hf.add_bos_token = add_bos  # type: ignore[misc]  # transformers declares the setter in a way mypy cannot see


def override_token(
    hf: PreTrainedTokenizerBase, name: str, token: str | None, path: str, option: str = "tokenizer"
) -> None:
    if token is None:
        return
    vocab = hf.get_vocab()
    if token not in vocab:
        close = find_nearest(token, [other for other in vocab if other.startswith(token[:1])])
        hint = f"near it: {', '.join(close)}" if close else "name a token that it has"
        raise ConfigError(
            f"{format_option(option, name)}={token!r} is not in the vocabulary of {path} "
            f"({len(vocab)} tokens); {hint}"
        )
    hf.add_special_tokens({name: token})


def read_template(value: str, option: str = "tokenizer") -> str:
    """Return the source of a chat template.

    `value` is the name of a built-in template, the path of a file, or the source itself. Raises
    `ConfigError` if it is none of these, or if the template is invalid.
    """
    if value in TEMPLATES:
        return read_template_text(value)
    path = Path(value).expanduser()
    if "{" not in value:
        if not path.exists():
            close = find_nearest(value, TEMPLATES)
            hint = f"by name there are {', '.join(TEMPLATES)}"
            if close:
                hint = f"did you mean {close[0]}? {hint}"
            raise ConfigError(
                f"{format_option(option, 'chat_template')}={value!r}: neither the name of a "
                f"template, nor a file, nor a jinja template; {hint}"
            )
        value = read_text(path, f"{format_option(option, 'chat_template')}={value}", ConfigError)
    problem = find_template_problem(value)
    if problem:
        raise ConfigError(f"{format_option(option, 'chat_template')} {problem}; fix the template")
    return value


def apply_spec(
    hf: PreTrainedTokenizerBase, spec: TokenizerSpec, path: str, option: str = "tokenizer"
) -> int | None:
    """Apply the tokenizer options in `spec` to the tokenizer that was read from `path`.

    Returns the lowest id of the added tokens, or None if no token was added.
    """
    added_from = add_tokens(hf, list_added_tokens(spec.add_tokens, spec.chat_template, option))
    for name in ("bos_token", "eos_token", "pad_token", "sep_token"):
        override_token(hf, name, getattr(spec, name), path, option)
    if spec.per_digit_tokens:
        split_digits(hf, path, option)
    if spec.chat_template is not None:
        hf.chat_template = read_template(spec.chat_template, option)
        if spec.chat_template in TEMPLATES:
            check_named_template(hf, spec.chat_template, path, option)
    return added_from


def encode_text(
    hf: PreTrainedTokenizerBase, text: str, max_tokens: int | None = None, **more: bool
) -> Mapping[str, Any]:
    """Return the tokenizer's encoding of a text, without special tokens.

    Raises `DataError` if the text cannot be encoded. Raises `RowTooLong`, without encoding the
    text, if its number of characters proves that it has more than `max_tokens` tokens. This saves
    time, since some tokenizers need time that is quadratic in the length of the text.
    """
    if max_tokens is not None and len(text) > MAX_UNCHECKED_CHARACTERS:
        num_tokens = len(text) // max(map(len, hf.get_vocab()), default=1)  # lower bound
        if num_tokens > max_tokens:
            raise RowTooLong("row", num_tokens, "dataset.max_seqlen", max_tokens, uncounted=True)
    with explain_read_errors(
        "a text cannot be tokenized (does it contain half of a character, such as \\ud800?)",
        DataError,
    ):
        # Do not build masks: lists as long as the ids, whose construction blocks other threads.
        masks = {"return_attention_mask": False, "return_token_type_ids": False}
        encoding: Mapping[str, Any] = hf(
            text, add_special_tokens=False, verbose=False, **masks, **more
        )
    return encoding


def compute_tokens_per_byte(hf: PreTrainedTokenizerBase) -> tuple[int, int] | None:
    """Return upper bounds on the number of tokens per byte of text, or None if unknown.

    The result is (bound for ASCII texts, bound for other texts). Bounds are known for BPE
    tokenizers that work on bytes or fall back to bytes. Each of their tokens represents at least
    one byte of the normalized text (a space counts as one byte), so the bound is the factor by
    which normalization can lengthen a text. This factor is 2 if a space is inserted before each
    stretch of text between special tokens, and otherwise 1. NFC multiplies it by 3 for texts that
    are not ASCII.
    """
    if not isinstance(hf, PreTrainedTokenizerFast):
        return None
    core = json.loads(hf.backend_tokenizer.to_str())
    model = core["model"]
    steps = []
    for name in ("normalizer", "pre_tokenizer"):
        steps.extend(_list_steps(core[name]))
    if model.get("type") != "BPE" or any(step["type"] not in BOUNDED_STEPS for step in steps):
        return None
    in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not in_bytes and not (model.get("byte_fallback") and BLANK in model["vocab"]):
        return None
    for step in steps:
        inserted = step.get("content", step.get("prepend", step.get("replacement", BLANK)))
        if inserted != BLANK or (
            step.get("pattern", {"String": " "}) != {"String": " "} and step["type"] == "Replace"
        ):
            return None
    prefixed = any(
        step["type"] in ("Prepend", "Metaspace")
        or (step["type"] == "ByteLevel" and step.get("add_prefix_space"))
        for step in steps
    )
    composed = any(step["type"] == "NFC" for step in steps)
    return (2 if prefixed else 1), (2 if prefixed else 1) * (3 if composed else 1)


def _list_steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer as a flat list.

    `step` has the format of tokenizer.json.
    """
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    result: list[Mapping[str, Any]] = []
    for part in step.get("normalizers", step.get("pretokenizers", [])):
        result.extend(_list_steps(part))
    return result


def build_bad_template_error(name: str, fault: str, option: str) -> UserError:
    """Return the error for a chat template that cannot be used.

    `name` is the name of the tokenizer. `fault` is a verb phrase that completes "the chat template
    of NAME ...".
    """
    return UserError(
        f"the chat template of {name} {fault}; name a template for text conversations with "
        f"{format_option(option, 'chat_template')}=chatml (or another name, or a jinja file)"
    )


def list_added_tokens(
    requested: Sequence[str], template: str | None, option: str = "tokenizer"
) -> list[str]:
    """Return the tokens to add to the vocabulary, without duplicates.

    `requested` is the value of the option `add_tokens`. The word "template" in it means the
    special tokens of the chat template named `template`. Raises `ConfigError` if the word is used
    but the chat template is not given by name.
    """
    tokens: list[str] = []
    for token in requested:
        if token != TEMPLATE:
            tokens.append(token)
        elif template is not None and template in TEMPLATES:
            tokens += TEMPLATES[template].tokens
        else:
            raise ConfigError(
                f"{option}.add_tokens: {TEMPLATE!r} means the tokens of a chat_template "
                f"given by name, and "
                f"{option}.chat_template={template!r} is none of {', '.join(TEMPLATES)}; write "
                f"the tokens themselves"
            )
    return list(dict.fromkeys(tokens))


def add_tokens(hf: PreTrainedTokenizerBase, tokens: Sequence[str]) -> int | None:
    """Add the special tokens in `tokens` that the vocabulary lacks.

    Returns the first new id, or None if the vocabulary already had all tokens.
    """
    if not tokens:
        return None
    vocabulary = hf.get_vocab()
    first = max(vocabulary.values(), default=-1) + 1
    hf.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True
    )
    return None if all(token in vocabulary for token in tokens) else first


def check_named_template(
    hf: PreTrainedTokenizerBase, name: str, path: str, option: str = "tokenizer"
) -> None:
    """Raise `ConfigError` if the tokenizer lacks a special token that template `name` needs."""
    known = hf.get_vocab()
    template = TEMPLATES[name]
    missing = [token for token in template.tokens if token not in known]
    setting = f"{format_option(option, 'chat_template')}={name}"
    if missing:
        if option == COMMAND:
            fix = "the model never learned them"
        else:
            fix = f"add them with '{option}.add_tokens=[template]'"
        raise ConfigError(
            f"{setting} writes {', '.join(missing)}, which the vocabulary of {path} lacks; {fix}, "
            f"or take a template in words "
            "such as zephyr"
        )
    unset = [token for token in template.needs if getattr(hf, token) is None]
    if unset:
        raise ConfigError(
            f"{setting} writes the {unset[0]}, which {path} does not name; set "
            f"{format_option(option, unset[0])}"
        )


def split_digits(hf: PreTrainedTokenizerBase, path: str, option: str = "tokenizer") -> None:
    """Change the tokenizer to make every digit a separate token.

    Raises `ConfigError` for a tokenizer written in Python, which has no pre-tokenizer.
    """
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise ConfigError(
            f"{option}.per_digit_tokens=true: {path} is a tokenizer without a pre-tokenizer (it "
            f"is written in Python); "
            "give one with a tokenizer.json, or leave the option out"
        )
    core = hf.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    if core.pre_tokenizer is None:
        core.pre_tokenizer = digits
    else:
        core.pre_tokenizer = pre_tokenizers.Sequence([core.pre_tokenizer, digits])


def compute_fingerprint(hf: PreTrainedTokenizerBase, *settings: Any) -> str:
    """Return the sha256 of everything that affects the token ids of a text or conversation.

    `settings` are settings outside the `transformers` tokenizer that affect the ids, such as adding
    BOS.
    """
    if isinstance(hf, PreTrainedTokenizerFast):
        core = hf.backend_tokenizer.to_str()
    else:
        options = {}
        for name, value in hf.init_kwargs.items():
            if not name.endswith(("_file", "_path")):
                options[name] = str(value)
        core = json.dumps(
            [type(hf).__name__, options, sorted(hf.get_vocab().items())], sort_keys=True
        )
    special = {name: str(token) for name, token in hf.special_tokens_map.items()}
    other_settings = json.dumps([special, hf.chat_template, settings], sort_keys=True)
    return hashlib.sha256(f"{core}\n{other_settings}".encode()).hexdigest()


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress the warnings that `transformers` logs while it tries one file format after another.

    Errors are still logged and raised.
    """
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
