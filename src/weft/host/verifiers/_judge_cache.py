"""Cache of judges' answers in an SQLite file that several processes share."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.reading import refuse_url
from weft.writing import resolve_destination

FILE = "answers.sqlite"
ENDINGS = (".sqlite", ".sqlite3", ".db")  # a path with another ending is a folder, unless a file
BUSY_S = 5.0  # maximum wait for another process's write
FORM = 1  # version of the keys' format, part of each key


def find_cache_file(cache: str | bool | None) -> Path | None:
    """Return the file that the option `cache` specifies, or None for no cache.

    With None or True, the file is in `$XDG_CACHE_HOME/weft/judge`, or in `~/.cache/weft/judge` if
    the variable is not set. A string is the path of the file or of its folder. False and "" disable
    the cache. Raises `ConfigError` for anything else.
    """
    if cache is False or cache == "":
        return None
    if cache is None or cache is True:
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "weft" / "judge" / FILE
    if not isinstance(cache, str):
        raise ConfigError(
            f"judge: cache={cache!r} must be the path of a folder or a file, or false for none"
        )
    refuse_url(cache, f"judge: cache={cache}", ConfigError)
    path = Path(cache).expanduser()
    return path if path.is_file() or path.suffix in ENDINGS else path / FILE


def hash_request(url: str, body: Mapping[str, Any], vote: int) -> str:
    """Return the cache key of a request, a hash of everything that determines the answer.

    The key is computed from the server's URL, the body of the request, and `vote`, the index of the
    request among the repeated requests for the same completion.
    """
    payload = json.dumps([FORM, url, body, vote], sort_keys=True)
    return hashlib.sha256(payload.encode()).hexdigest()


@functools.cache
def open_cache(file: Path) -> JudgeCache:
    """Return the cache in `file`; later calls in this process return the same object."""
    return JudgeCache(file)


class JudgeCache:
    """Persistent mapping from keys to strings, stored in an SQLite file.

    If the file cannot be used, a warning is issued once; after that, lookups return None and
    nothing is stored.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._database: sqlite3.Connection | None = None
        try:
            self._database = self._open()
        except (sqlite3.Error, OSError) as error:
            self._disable(error)

    def _open(self) -> sqlite3.Connection:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(resolve_destination(self.file), os.O_CREAT | os.O_RDWR, 0o600))
        database = sqlite3.connect(
            self.file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        # Fails if another process is changing the mode at the same time
        with contextlib.suppress(sqlite3.OperationalError):
            database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL) "
            "WITHOUT ROWID"
        )
        return database

    def get(self, key: str) -> str | None:
        """Return the text that is stored under a key, or None if the key is unknown."""
        if self._database is None:
            return None
        try:
            row = self._database.execute(
                "SELECT text FROM answers WHERE key = ?", (key,)
            ).fetchone()
        except sqlite3.Error as error:
            self._disable(error)
            return None
        return None if row is None else str(row[0])

    def put(self, key: str, text: str) -> None:
        """Store a text under a key."""
        if self._database is None:
            return
        try:
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text))
        except sqlite3.Error as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        warnings.warn(
            f"judge: cache={str(self.file)!r} cannot be used ({type(error).__name__}: {error}); "
            f"this process continues without "
            "it, and pays for every answer; move the file away, or set another one",
            RuntimeWarning,
            stacklevel=3,
        )
