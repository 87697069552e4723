"""Worker process that encodes rows: `python -m weft.data.encode_worker`.

`weft.data.tokenizing` starts it and communicates with it through pipes. A message consists of its
length (8 bytes) and a pickle. The first message is the job, and each following one is a chunk of
rows. The worker answers each chunk with the outcome of encoding it (packed if `job.packed`), or
with an error that does not concern a single row. Unpickling is safe because both processes belong
to weft and run on the same machine.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, BinaryIO

from weft.data.background_table import pack_outcome
from weft.data.tokenizing import EncodingJob, encode_rows
from weft.errors import UserError


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Encode chunks of rows and send back the outcomes until the parent process closes the pipe."""
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
    """Return the next message, or b"" if the pipe is closed before the message is complete."""
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
