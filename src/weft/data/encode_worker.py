"""Worker process that encodes rows: `python -m weft.data.encode_worker`.

Started by `weft.data.tokenizing`. A message is an 8-byte length and a pickle: first the job, then
chunks of rows. The answer to a chunk is its outcome (packed if `job.packed`), or an error that
is not about a row. Both ends are weft processes on one machine.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, BinaryIO

from weft.data.background_tokenizing import pack_outcome
from weft.data.tokenizing import EncodingJob, encode_rows
from weft.errors import UserError


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer chunks until the other end closes."""
    setup = _read_message(requests)
    if not setup:
        return
    job: EncodingJob = pickle.loads(setup)
    while raw := _read_message(requests):
        try:
            outcome: Any = encode_rows(job, pickle.loads(raw))
            if job.packed:
                outcome = pack_outcome(outcome)
        except UserError as error:  # for example a tokenizer without a chat template
            outcome = error
        answer = pickle.dumps(outcome)
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


def _read_message(stream: BinaryIO) -> bytes:
    """Return the next message, or b"" if the other end has closed, even within a message."""
    size = int.from_bytes(stream.read(8), "little")
    raw = stream.read(size)
    return raw if len(raw) == size else b""


if __name__ == "__main__":
    # Redirect stdout to stderr: printed text must not mix with the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:  # the parent has ended
        os._exit(0)
