"""What is masked in a command and a configuration, and what is not."""

from __future__ import annotations

import pytest

from weft.errors import DataError, RunError, UserError
from weft.redaction import (
    is_secret,
    iterate_masked_options,
    mask_values,
    mask_words,
    redact,
    redact_urls,
)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "launch.env.HF_TOKEN",
        "api_key",
        "apikey",
        "my-secret",
        "db.password",
        "key",
        "apiKey",
        "X-Api-Key",
        "Authorization",
        "Proxy-Authorization",
        "accessToken",
        "client_secret_value",
        "db_pwd",
        "Cookie",
        "AWS_SECRET_ACCESS_KEY",
        "reward.args.private_key",
        "basic_auth",
        "passphrase",
    ],
)
def test_names_that_tell(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.tokenizer.eos_token",
        "tokenizer.add_bos_token",
        "dataset.args.prompt_key",
        "ppo.gen.max_new_tokens",
        "keys",
        "reward_by_token",
        "monkey",
        "tokenizer",
        "api_key_env",
        "service.token_env",
        "token-file",
        "password_file",
        "author",
        "stop_token",
        "tokens",
    ],
)
def test_names_that_do_not(name):
    assert not is_secret(name)


def test_words_of_a_command():
    words = [
        "weft",
        "quickstart",
        "sft",
        "launch.env.HF_TOKEN=hf_123",
        "--api-key",
        "sk-1",
        "seed=3",
        "--token=abc",
        "launch.env={HF_TOKEN: hf_9, OMP_NUM_THREADS: 2}",
        "model.tokenizer.eos_token=</s>",
        "rew.url=http://me:pw@host:1/x",
    ]
    assert mask_words(words) == [
        "weft",
        "quickstart",
        "sft",
        "launch.env.HF_TOKEN=***",
        "--api-key",
        "***",
        "seed=3",
        "--token=***",
        "launch.env={HF_TOKEN: ***, OMP_NUM_THREADS: 2}",
        "model.tokenizer.eos_token=</s>",
        "rew.url=http://***@host:1/x",
    ]


def test_a_configuration():
    config = {
        "launch": {"env": {"HF_TOKEN": "x", "A": "y"}},
        "tokenizer": {"eos_token": "</s>"},
        "list": [{"secret": 5}],
    }
    assert mask_values(config) == {
        "launch": {"env": {"HF_TOKEN": "***", "A": "y"}},
        "tokenizer": {"eos_token": "</s>"},
        "list": [{"secret": "***"}],
    }
    assert mask_values({"token": None}) == {"token": None}, "nothing to hide"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:pw@host:1/x", "http://***@host:1/x"),
        ("http://me@host/x", "http://***@host/x"),
        ("http://me:p@ss@host/x", "http://***@host/x"),
        ("http://me:p/w@host/x", "http://***@host/x"),
        ("http://me:p?w#x@host/x", "http://***@host/x"),
        ("http://h/v1?key=abc&x=1", "http://h/v1?key=***&x=***"),
        ("https://h/v1?abc", "https://h/v1?***"),
        ("https://h/#access_token=abc", "https://h/#access_token=***"),
        ("grpcs://u:p@[::1]:8001/m", "grpcs://***@[::1]:8001/m"),
        ("me:pw@host:8001/m", "***@host:8001/m"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("hf://datasets/org/name@main/file.jsonl", "hf://datasets/org/name@main/file.jsonl"),
        ("runs/E/T@step40", "runs/E/T@step40"),
        ("f.py:reward", "f.py:reward"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert redact_urls(url) == shown
    assert redact_urls(shown) == shown
    assert (
        redact(f"judge: url={url!r}: status 500, see {url}; then")
        == f"judge: url={shown!r}: status 500, see {shown}; then"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "reward=[{'name': 'f', 'args': {'api_key': 'sk-1', 'n': 3}}]: bad",
            "reward=[{'name': 'f', 'args': {'api_key': ***, 'n': 3}}]: bad",
        ),
        ("api_key=sk-123, seed=3", "api_key=***, seed=3"),
        ("sent Authorization: Bearer abc.def and failed", "sent Authorization: *** and failed"),
        ("token=None, key=''", "token=None, key=''"),
        (
            "'a': is not of the form key=value; write a=VALUE",
            "'a': is not of the form key=value; write a=VALUE",
        ),
        (
            "unknown key: learning_rat; did you mean learning_rate?",
            "unknown key: learning_rat; did you mean learning_rate?",
        ),
        ("row 3: the key 'scores' is missing", "row 3: the key 'scores' is missing"),
        ("options are written key=value: seed=3", "options are written key=value: seed=3"),
        ("eos_token='</s>' has no id", "eos_token='</s>' has no id"),
    ],
)
def test_messages(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_every_error_is_redacted_where_it_is_made() -> None:
    url = "http://me:pw@host/x?key=abc"
    for error in (
        UserError(f"url={url}"),
        RunError(f"{url}: no answer"),
        DataError([f"{url}:1: bad"]),
    ):
        assert (
            "pw" not in str(error)
            and "abc" not in str(error)
            and "http://***@host/x?key=***" in str(error)
        )
        assert "pw" not in repr(error.args)


def test_secrets_of_mappings_and_lists_below_a_telling_name() -> None:
    config = {
        "secrets": {"a": "x", "b": ["y", {"c": "z"}]},
        "reward": [{"args": {"url": "http://u:p@h/?k=1", "apiKey": "sk"}}],
    }
    assert mask_values(config) == {
        "secrets": {"a": "***", "b": ["***", {"c": "***"}]},
        "reward": [{"args": {"url": "http://***@h/?k=***", "apiKey": "***"}}],
    }
    names = [
        "secrets.a",
        "secrets.b[0]",
        "secrets.b[1].c",
        "reward[0].args.url",
        "reward[0].args.apiKey",
    ]
    assert list(iterate_masked_options(mask_values(config))) == names
    assert not list(iterate_masked_options({"prompt": "*** rate this ***", "token": None}))


def test_a_reference_to_a_variable_is_no_secret() -> None:
    words = [
        "api_key=${oc.env:KEY}",
        "reward=[{name: f, args: {api_key: '${oc.env:KEY}', token: abc}}]",
    ]
    assert mask_words(words) == [words[0], words[1].replace("abc", "***")]
