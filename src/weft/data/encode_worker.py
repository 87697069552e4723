"""A process that encodes rows: `python -m weft.data.encode_worker`, started by `weft.data.tokenizing`.

Messages are an 8-byte length and a pickle, first the job, then chunks of rows; each chunk is answered with its outcome, or with
the error that no row is to blame for. Both ends are weft's own processes on one machine.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO

from weft.data.tokenizing import Job, Outcome, encode_rows
from weft.errors import UserError


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer chunks until the other end closes."""
    job: Job = pickle.loads(_message(requests))
    while raw := _message(requests):
        try:
            outcome: Outcome | UserError = encode_rows(job, pickle.loads(raw))
        except UserError as error:  # a tokenizer that lacks what a row needs
            outcome = error
        answer = pickle.dumps(outcome)
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


def _message(stream: BinaryIO) -> bytes:
    return stream.read(int.from_bytes(stream.read(8), "little"))


if __name__ == "__main__":
    # Anything printed while rows are encoded must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)
