"""Slow CPU work outside of the event loop: parsing, templates, tokenizing, encoding answers.

Threads suffice for work that releases the GIL regularly (tokenizers in Rust, templates, numpy in
chunks). Parsing large JSON bodies holds the GIL throughout, so a child process does that
(`bodies.main`).
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import queue
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from weft.data.tokenizer import Tokenizer
from weft.errors import DataError, RunError
from weft.serve.bodies import read_object
from weft.serve.exchange import RequestRefused

T = TypeVar("T")

THREADS = 4
# Bodies above this many bytes are parsed by the child process; texts above this many characters are
# tokenized one at a time.
LARGE = 1 << 16
GZIP_OR_ZLIB = 47  # zlib's wbits: detect a gzip or zlib header


class BackgroundWork:
    """Worker threads for slow CPU work, and the child process that parses large JSON bodies.

    Each thread has its own copy of each tokenizer.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-requests")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="weft-json")
        self._reader: subprocess.Popen[bytes] | None = None
        self._own = threading.local()
        self._long_texts = threading.Lock()
        # id of a tokenizer -> its copies that no thread has taken yet
        self._copies: dict[int, queue.SimpleQueue[Tokenizer]] = {}

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in a worker thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args))

    async def read(self, text: bytes) -> dict[str, Any]:
        """Parse a request body, which must be a JSON object.

        Large bodies are parsed in the child process, which converts long lists of numbers to
        arrays. Raises `DataError` for invalid JSON and for a value that is not an object.
        """
        if len(text) <= LARGE:
            return read_object(text)
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, text)

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Make a copy of a tokenizer for each worker thread.

        Must be called before the first request, because copying holds the GIL for tenths of a
        second.
        """
        copies = self._copies[id(tokenizer)] = queue.SimpleQueue()
        for _ in range(THREADS):
            copies.put(replace(tokenizer, hf=copy.deepcopy(tokenizer.hf)))

    def get_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return this thread's copy of a prepared tokenizer."""
        name = f"tokenizer-{id(tokenizer)}"
        if name not in self._own.__dict__:
            self._own.__dict__[name] = self._copies[id(tokenizer)].get_nowait()
        own: Tokenizer = self._own.__dict__[name]
        return own

    def encode(self, tokenizer: Tokenizer, text: str, bos: bool | None = None) -> list[int]:
        """Return the token ids of a text, using this thread's copy of the tokenizer.

        Long texts are tokenized one at a time, because each of them holds the GIL while its list of
        ids is created. Several in succession would block other threads for tenths of a second.
        `bos` says whether to begin with the token for the beginning of a sequence; None leaves this
        to the tokenizer.
        """
        with self._long_texts if len(text) > LARGE else nullcontext():
            return self.get_tokenizer(tokenizer).encode(text, bos=bos)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._reading.shutdown(wait=False, cancel_futures=True)
        if self._reader is not None:
            self._reader.kill()
            self._reader.communicate()

    def _read(self, text: bytes) -> dict[str, Any]:
        """Parse a large request body in the child process, which is started first if necessary.

        Raises `DataError` for an invalid body, and `RunError` if the process dies meanwhile.
        """
        if self._reader is None or self._reader.poll() is not None:
            command = [sys.executable, "-m", "weft.serve.bodies"]
            self._reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        given = self._reader.stdin
        answers = self._reader.stdout
        assert given is not None and answers is not None, "both are pipes"
        try:
            given.write(len(text).to_bytes(8, "little"))
            given.write(text)
            given.flush()
            size = int.from_bytes(answers.read(8), "little")
            content = answers.read(size)
        except OSError as error:
            raise RunError(f"the process that parses JSON has ended: {error}") from error
        if not size or len(content) < size:
            raise RunError("the process that parses JSON has ended")
        status, value = pickle.loads(content)
        if status == "error":
            raise DataError(value)
        if not isinstance(value, dict):
            raise DataError("the body must be a JSON object")
        return value


def decompress_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body of a request.

    `encoding` is the request's content encoding. Raises `RequestRefused` for an unknown encoding,
    invalid data, or a result of more than `limit` bytes. Decompression stops at the limit.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise RequestRefused(
            415,
            f"content-encoding {encoding[:40]!r} is not supported; send gzip, deflate or no "
            f"encoding",
        )
    reader = zlib.decompressobj(GZIP_OR_ZLIB)
    try:
        content = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestRefused(400, f"the body is not valid {encoding}: {error}") from None
    if len(content) > limit:
        raise RequestRefused(
            413,
            f"the body has more than {limit} bytes once decompressed, the server's --max-body-mb",
        )
    if not reader.eof or reader.unused_data:
        raise RequestRefused(
            400, f"the body is not valid {encoding}: it is truncated or followed by other data"
        )
    return content
