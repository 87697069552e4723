"""Slow CPU work outside of the event loop: parsing, templates, tokenizing, encoding answers.

Threads suffice for work that releases the GIL regularly (tokenizers in Rust, templates, numpy in
chunks). Parsing a large JSON body holds the GIL until it is done, so this is done in a child
process (`bodies.main`).
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
LARGE_SIZE = 1 << 16
GZIP_OR_ZLIB = 47  # zlib's wbits: detect a gzip or zlib header


class BackgroundWork:
    """Worker threads for slow CPU work, and the child process that parses large JSON bodies.

    Each thread has its own copy of each tokenizer.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-requests")
        self._parser_thread = ThreadPoolExecutor(1, thread_name_prefix="weft-json")
        self._parser: subprocess.Popen[bytes] | None = None
        self._thread_local = threading.local()
        self._long_texts = threading.Lock()
        # id of a tokenizer -> the copies of it that no thread uses yet
        self._copies: dict[int, queue.SimpleQueue[Tokenizer]] = {}

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in a worker thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args))

    async def read(self, text: bytes) -> dict[str, Any]:
        """Parse a request body, which must be a JSON object.

        Large bodies are parsed in the child process, which converts long lists of numbers to
        arrays. Raises `DataError` for invalid JSON and for a value that is not an object.
        """
        if len(text) <= LARGE_SIZE:
            return read_object(text)
        return await asyncio.get_running_loop().run_in_executor(
            self._parser_thread, self._parse_in_child, text
        )

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
        if name not in self._thread_local.__dict__:
            self._thread_local.__dict__[name] = self._copies[id(tokenizer)].get_nowait()
        thread_copy: Tokenizer = self._thread_local.__dict__[name]
        return thread_copy

    def encode(self, tokenizer: Tokenizer, text: str, bos: bool | None = None) -> list[int]:
        """Return the token ids of a text, using this thread's copy of the tokenizer.

        Long texts are tokenized one at a time, because each of them holds the GIL while its list of
        ids is created. Several long texts in succession would block other threads for tenths of a
        second. `bos` decides whether the ids begin with the BOS token; None leaves this to the
        tokenizer.
        """
        with self._long_texts if len(text) > LARGE_SIZE else nullcontext():
            return self.get_tokenizer(tokenizer).encode(text, bos=bos)

    def close(self) -> None:
        """End the threads and the child process, without waiting for unfinished work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._parser_thread.shutdown(wait=False, cancel_futures=True)
        if self._parser is not None:
            self._parser.kill()
            self._parser.communicate()

    def _parse_in_child(self, text: bytes) -> dict[str, Any]:
        """Parse a large request body in the child process, which is started first if necessary.

        Raises `DataError` for an invalid body, and `RunError` if the process dies meanwhile.
        """
        if self._parser is None or self._parser.poll() is not None:
            command = [sys.executable, "-m", "weft.serve.bodies"]
            self._parser = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stdin = self._parser.stdin
        stdout = self._parser.stdout
        assert stdin is not None and stdout is not None, "both streams are pipes"
        try:
            stdin.write(len(text).to_bytes(8, "little"))
            stdin.write(text)
            stdin.flush()
            size = int.from_bytes(stdout.read(8), "little")
            content = stdout.read(size)
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
    decompressor = zlib.decompressobj(GZIP_OR_ZLIB)
    try:
        content = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestRefused(400, f"the body is not valid {encoding}: {error}") from None
    if len(content) > limit:
        raise RequestRefused(
            413,
            f"the body has more than {limit} bytes once decompressed, the server's --max-body-mb",
        )
    if not decompressor.eof or decompressor.unused_data:
        raise RequestRefused(
            400, f"the body is not valid {encoding}: it is truncated or followed by other data"
        )
    return content
