"""Worker thread that serves all requests for one network.

Only this thread uses the network. It samples the completions of all requests in one running batch,
and scores sequences between decode steps. There is at most one such forward pass after each decode
step, so that neither kind of request waits for long.

    worker = ServingWorker(engine, spec)
    worker.start()
    worker.generate(CompletionJob("a", prompt, 1, max_new_tokens=64, sampling=spec, on_event=print))
    scores = worker.score(ScoredRows([ids], [len(ids) - 1]), "scores").result()
    worker.stop()
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import Output, to_host_array
from weft.data.sample import SequenceSample
from weft.engine.base import DEFAULT_MAX_TOKENS, Engine, Generator, Request, TokenEvent
from weft.engine.spec import GenerationSpec
from weft.errors import RunError, UserError
from weft.models.network.packed import TopIds

Ids = Sequence[int]
Vector = npt.NDArray[np.float32]
MAX_SETTINGS = 256  # sampling settings per generator; for more, a new generator is opened


@dataclass(frozen=True)
class CompletionJob:
    """Request for `count` completions of one prompt.

    `on_event` is called in the worker's thread with the event of each sampled token. If the job
    fails, it is called a last time with the exception. Two jobs with equal `draws_as` sample with
    the same random numbers.
    """

    id: str
    prompt: Ids
    count: int
    max_new_tokens: int
    sampling: GenerationSpec
    on_event: Callable[[TokenEvent | Exception], None]
    draws_as: str | None = None

    def build_requests(self, sampling: GenerationSpec) -> list[Request]:
        """Return one engine request per completion, with the given sampling settings."""
        requests: list[Request] = []
        for k in range(self.count):
            requests.append(
                Request(
                    self.id,
                    k,
                    self.prompt,
                    max_new_tokens=self.max_new_tokens,
                    sampling=sampling,
                    draws_as=self.draws_as,
                )
            )
        return requests


@dataclass(frozen=True)
class ScoredRows:
    """Token sequences to score.

    `starts[i]` is the index of the first scored token in row i. The tokens before it are the
    prompt.
    """

    tokens: Sequence[Ids | npt.NDArray[np.int64]]
    starts: Sequence[int]


@dataclass(frozen=True)
class RowScores:
    """Outputs for one scored sequence.

    Attributes:
        values: Requested output, float32: the log-probs [L] of the L scored tokens, or the
            sequence's score [1].
        top_ids: The K most likely ids at the position of each scored token, int32 [L, K]; K is 0 if
            none were requested.
        top_logprobs: Log-probs of `top_ids`, float32 [L, K], the largest first.
    """

    values: Vector
    top_ids: npt.NDArray[np.int32]
    top_logprobs: Vector

    @classmethod
    def build_without_top(cls, values: Vector) -> RowScores:
        """Return scores without most likely ids."""
        shape = (len(values), 0)
        return cls(values, np.zeros(shape, np.int32), np.zeros(shape, np.float32))


@dataclass(frozen=True)
class ScoringJob:
    """Request to score token sequences.

    `want` is the output to compute, such as "scores" or "logprobs". `top` is the number of most
    likely ids to return for each scored token. `future` receives the outputs of each sequence.
    """

    rows: ScoredRows
    want: Output
    temperature: float
    top: int
    future: Future[list[RowScores]]

    @property
    def kind(self) -> tuple[Output, float, int]:
        """Settings of the forward pass; only jobs with equal settings can share a pass."""
        return self.want, self.temperature, self.top

    @property
    def num_rows(self) -> int:
        """Number of sequences to score."""
        return len(self.rows.tokens)

    @property
    def num_tokens(self) -> int:
        """Total number of tokens of the sequences."""
        return sum(map(len, self.rows.tokens))


@dataclass
class ServingWorker:
    """Thread that samples from one network and scores sequences with it.

    `spec` has the sampling defaults; if it is None, the network only scores.
    """

    engine: Engine
    spec: GenerationSpec | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    _commands: queue.SimpleQueue[CompletionJob | ScoringJob | str | None] = field(
        default_factory=queue.SimpleQueue
    )
    # Running jobs, and the numbers of their unfinished completions, by job id.
    _jobs: dict[str, CompletionJob] = field(default_factory=dict)
    _num_unfinished: dict[str, int] = field(default_factory=dict)
    # Jobs that the open generator has not admitted yet.
    _waiting_jobs: list[CompletionJob] = field(default_factory=list)
    _scoring_jobs: list[ScoringJob] = field(default_factory=list)
    # Sampling settings that the open generator has used, by their repr.
    _settings: dict[str, GenerationSpec] = field(default_factory=dict)
    _is_stopping: bool = False
    _load: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    # -- methods for any thread

    @property
    def load(self) -> int:
        """Number of completions and rows that are waiting or running."""
        return self._load

    @property
    def is_alive(self) -> bool:
        """True if the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="weft-serve", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Unfinished jobs fail with an error."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join()

    def generate(self, job: CompletionJob) -> None:
        """Queue a job to be sampled."""
        self._change_load(job.count)
        self._commands.put(job)

    def cancel(self, id: str) -> None:
        """Stop the completions of the job `id`, and do not call its callback `on_event` again."""
        self._commands.put(id)

    @contextmanager
    def hold_load(self, count: int) -> Iterator[None]:
        """Add `count` to the load in a `with` block, for completions that are queued after it."""
        self._change_load(count)
        try:
            yield
        finally:
            self._change_load(-count)

    def score(
        self, rows: ScoredRows, want: Output, temperature: float = 1.0, top: int = 0
    ) -> Future[list[RowScores]]:
        """Queue rows to be scored, and return a future with the outputs of each row.

        If `want` is "logprobs", the scored tokens of row i are those from index `rows.starts[i]` to
        the end, and the outputs include the `top` most likely ids at the position of each token. If
        `want` is "scores", the output is the row's score.
        """
        future: Future[list[RowScores]] = Future()
        self._change_load(len(rows.tokens))
        self._commands.put(ScoringJob(rows, want, temperature, top, future))
        return future

    # -- methods that run in the worker's thread

    def _run(self) -> None:
        """Score rows and sample completions as commands arrive, until the worker is stopped."""
        while not self._is_stopping:
            try:
                self._read_commands(wait=not self._waiting_jobs and not self._scoring_jobs)
                self._score_waiting()
                if self.spec is None or not self._waiting_jobs:
                    continue
                self._settings.clear()
                with self.engine.generating(self.spec) as generator:
                    self._generate(generator)
            except Exception as error:  # fail the current work, but keep serving
                self._fail(error)
        self._read_commands(wait=False)
        self._fail(RunError("the server is stopping"))

    def _generate(self, generator: Generator) -> None:
        """Sample completions until the worker stops, or until waiting jobs need a new generator.

        A new generator is needed if the jobs have more than `MAX_SETTINGS` different sampling
        settings.
        """
        while not self._is_stopping:
            is_idle = generator.idle and not self._waiting_jobs and not self._scoring_jobs
            self._read_commands(wait=is_idle, generator=generator)
            self._score_waiting()
            self._admit_jobs(generator)
            if generator.idle and self._waiting_jobs:
                return
            if not generator.idle:
                for event in generator.step():
                    self._pass_event(event)

    def _read_commands(self, wait: bool, generator: Generator | None = None) -> None:
        """Process all queued commands, such as new and cancelled jobs.

        If `wait` is True, block until there is at least one command. If a generator is open, it
        must be passed, so that it aborts cancelled jobs.
        """
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if command is None:
                self._is_stopping = True
                return
            if isinstance(command, ScoringJob):
                self._scoring_jobs.append(command)
            elif isinstance(command, CompletionJob):
                self._waiting_jobs.append(command)
            elif command in self._jobs and generator is not None:
                generator.abort([command])
                self._remove_job(command)
            else:
                cancelled = [job for job in self._waiting_jobs if job.id == command]
                self._waiting_jobs = [job for job in self._waiting_jobs if job.id != command]
                self._change_load(-sum(job.count for job in cancelled))

    def _admit_jobs(self, generator: Generator) -> None:
        """Add waiting jobs to the running batch of `generator`, in order.

        If the generator already has `MAX_SETTINGS` different sampling settings, this stops at the
        first job that needs new ones.
        """
        while self._waiting_jobs and not self._is_stopping:
            job = self._waiting_jobs[0]
            settings_key = repr(job.sampling)
            if settings_key not in self._settings and len(self._settings) >= MAX_SETTINGS:
                return
            self._waiting_jobs.pop(0)
            self._jobs[job.id] = job
            self._num_unfinished[job.id] = job.count
            sampling = self._settings.setdefault(settings_key, job.sampling)
            try:
                generator.submit(job.build_requests(sampling))
            except UserError as error:
                generator.abort([job.id])
                self._remove_job(job.id)
                job.on_event(error)

    def _pass_event(self, event: TokenEvent) -> None:
        """Pass a token event to its job, and update the number of unfinished completions."""
        job = self._jobs.get(event.id)
        if job is None:
            return
        if event.finish is not None:
            self._num_unfinished[event.id] -= 1
            self._change_load(-1)
            if not self._num_unfinished[event.id]:
                self._remove_job(event.id)
        job.on_event(event)

    def _remove_job(self, id: str) -> None:
        """Remove a finished or cancelled job, and reduce the load by its unfinished completions."""
        self._change_load(-self._num_unfinished.pop(id))
        del self._jobs[id]

    def _score_waiting(self) -> None:
        """Score as many of the waiting jobs as fit in one forward pass.

        If the pass fails, each of its jobs is scored separately, so that only invalid jobs fail.
        """
        group = self._take_scoring_jobs()
        if not group:
            return
        try:
            results = self._forward(group)
        except Exception as error:
            if len(group) == 1:
                results = [error]
            else:
                results = [self._forward_one(job) for job in group]
        self._change_load(-sum(job.num_rows for job in group))
        for job, result in zip(group, results, strict=True):
            if not job.future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Exception):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)

    def _take_scoring_jobs(self) -> list[ScoringJob]:
        """Remove and return the scoring jobs of the next forward pass, and drop cancelled jobs.

        They have the same output, temperature and `top` as the first waiting job, and at most
        `max_tokens` tokens in total. If the first job is larger, it is returned alone, and the
        engine splits it.
        """
        group: list[ScoringJob] = []
        remaining: list[ScoringJob] = []
        available_tokens = self.max_tokens
        for job in self._scoring_jobs:
            if job.future.cancelled():
                self._change_load(-job.num_rows)
            elif not group or (job.kind == group[0].kind and job.num_tokens <= available_tokens):
                group.append(job)
                available_tokens -= job.num_tokens
            else:
                remaining.append(job)
        self._scoring_jobs = remaining
        return group

    def _forward_one(self, job: ScoringJob) -> list[RowScores] | Exception:
        try:
            return self._forward([job])[0]
        except Exception as error:
            return error

    def _forward(self, group: Sequence[ScoringJob]) -> list[list[RowScores] | Exception]:
        """Score a group of jobs in one forward pass, and return the outputs of each job.

        All jobs have the same output, temperature and `top`.
        """
        rows = []
        for job in group:
            for ids, start in zip(job.rows.tokens, job.rows.starts, strict=True):
                rows.append((ids, start))
        want, temperature, top = group[0].kind
        batch = build_sample([ids for ids, _ in rows], [start for _, start in rows])
        top_outputs: frozenset[Output] = frozenset(("top_ids", "top_logprobs") if top else ())
        output = self.engine.forward(
            batch,
            frozenset({want}) | top_outputs,
            temperature=temperature,
            top=TopIds(top) if top else None,
            max_tokens=self.max_tokens,
        )
        scores = _split_rows(output.select(ids=batch.ids), want, top)
        scores_by_job: list[list[RowScores] | Exception] = []
        for job in group:
            scores_by_job.append(scores[: job.num_rows])
            del scores[: job.num_rows]
        return scores_by_job

    def _fail(self, error: Exception) -> None:
        """Fail all running and waiting jobs with `error`, including scoring jobs."""
        jobs = [*self._jobs.values(), *self._waiting_jobs]
        scoring_jobs = self._scoring_jobs
        self._scoring_jobs = []
        self._change_load(
            -sum(self._num_unfinished.values()) - sum(job.count for job in self._waiting_jobs)
        )
        self._jobs.clear()
        self._num_unfinished.clear()
        self._waiting_jobs.clear()
        self._change_load(-sum(scoring_job.num_rows for scoring_job in scoring_jobs))
        for job in jobs:
            job.on_event(error)
        for scoring_job in scoring_jobs:
            if scoring_job.future.set_running_or_notify_cancel():
                scoring_job.future.set_exception(error)

    def _change_load(self, change: int) -> None:
        with self._lock:
            self._load += change


def _split_rows(output: SequenceSample, want: Output, top: int) -> list[RowScores]:
    """Return the outputs of each row.

    The last column of `top_logprobs`, which is for all other ids together, is left out.
    """
    values = [to_host_array(row) for row in output.sequences(want)]
    if not top:
        return [RowScores.build_without_top(row) for row in values]
    ids = [to_host_array(row) for row in output.sequences("top_ids")]
    logprobs = [to_host_array(row)[:, :-1] for row in output.sequences("top_logprobs")]
    return [RowScores(*row) for row in zip(values, ids, logprobs, strict=True)]


def build_sample(
    tokens: Sequence[Ids | npt.NDArray[np.int64]], starts: Sequence[int]
) -> SequenceSample:
    """Return a batch in which each token sequence is divided into a prompt and a completion.

    Each sequence is a separate sample. `starts[i]` is the number of prompt tokens in sequence i.
    """
    ids = [str(index) for index in range(len(tokens))]
    lengths = {
        "prompt": [[start] for start in starts],
        "completion": [[len(row) - start] for row, start in zip(tokens, starts, strict=True)],
    }
    # Convert row by row, so that other threads can run in between.
    rows = [np.asarray(row, np.int64) for row in tokens]
    parts = {
        "prompt": np.concatenate([row[:start] for row, start in zip(rows, starts, strict=True)]),
        "completion": np.concatenate(
            [row[start:] for row, start in zip(rows, starts, strict=True)]
        ),
    }
    return SequenceSample.from_groups(ids, lengths, parts)
