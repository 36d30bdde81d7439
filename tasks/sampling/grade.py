"""Grading: completions and gold answers in, verdicts out, by verifiers in a process that can be killed.

An answer that takes longer than the limit is marked `timeout` and the worker replaced; no other answer is touched.
The verdict on a completion cut off at the token limit is `truncated`, whatever it says.
"""

import json
import logging
import os
import pkgutil
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.common.files import ArtifactError
from tasks.sampling import verifiers
from tasks.sampling.verdict import Verdict

logger = logging.getLogger(__name__)

IN_FLIGHT = 32  # answers sent ahead of the verdicts: hides the pipe's latency, far below its buffer for usual lengths
PIPE_BYTES = 60_000
MAX_CHARACTERS = 100_000  # of a completion: what is beyond is no answer to these questions


@dataclass(frozen=True)
class Verify:
    """The section `verify`: the limit of one answer, and the share of failures above which a stage stops."""

    seconds: float
    max_failure_rate: float


@dataclass(frozen=True)
class Answer:
    """One completion to be graded."""

    verifier: str
    completion: str
    gold: str
    truncated: bool


class FailureRateError(ArtifactError):
    """Too many answers ended as `timeout` or `error`: the verdicts cannot be trusted."""


class Grader:
    """One worker process, started when first needed. Use as a context manager, or call `close`."""

    def __init__(self, settings: Verify) -> None:
        self.settings = settings
        self.worker: subprocess.Popen[bytes] | None = None
        self.received = b""
        self.num_graded, self.num_failed = 0, 0

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(
        self, answers: Sequence[Answer], on_graded: Callable[[int], object] | None = None, *, min_judged: int = 0
    ) -> list[Verdict]:
        """A verdict an answer, in order. Raises FailureRateError with examples when too many, of all answers that this
        grader has seen, could not be graded; not before it has seen `min_judged`: a step of training is a small
        sample, and one prompt that cannot be graded must not end a run."""
        check_verifiers({answer.verifier for answer in answers})
        verdicts = {i: Verdict("truncated", "") for i, answer in enumerate(answers) if answer.truncated}
        waiting = [i for i in range(len(answers)) if i not in verdicts]
        for start in range(0, len(waiting), IN_FLIGHT):
            chunk = waiting[start : start + IN_FLIGHT]
            while chunk:
                done = self.grade_chunk([answers[i] for i in chunk])
                verdicts.update(zip(chunk, done, strict=False))
                chunk = chunk[len(done) :]
                if on_graded:
                    on_graded(len(done))
        ordered = [verdicts[i] for i in range(len(answers))]
        self.check_failures(answers, ordered, min_judged)
        return ordered

    def grade_chunk(self, answers: Sequence[Answer]) -> list[Verdict]:
        """Verdicts for the first of `answers`: all of them, or up to and including one that the worker died on."""
        worker = self.start()
        lines = [json.dumps([a.verifier, a.completion[:MAX_CHARACTERS], a.gold]).encode() + b"\n" for a in answers]
        if sum(map(len, lines)) > PIPE_BYTES:  # one at a time, or both sides would wait for the other to read
            lines = lines[:1]
        verdicts: list[Verdict] = []
        try:
            send(worker, b"".join(lines))
            while len(verdicts) < len(lines) and self.worker is not None:
                verdicts.append(self.receive(worker))
        except BrokenPipeError:
            verdicts.append(self.died())
        return verdicts

    def receive(self, worker: "subprocess.Popen[bytes]") -> Verdict:
        """The next verdict, or `timeout` or `error` with the worker gone."""
        assert worker.stdout is not None
        while b"\n" not in self.received:
            with selectors.DefaultSelector() as selector:
                selector.register(worker.stdout, selectors.EVENT_READ)
                if not selector.select(self.settings.seconds):
                    self.close()
                    return Verdict("timeout", "")
            piece = os.read(worker.stdout.fileno(), 1 << 16)
            if not piece:
                return self.died()
            self.received += piece
        line, self.received = self.received.split(b"\n", 1)
        return Verdict(*json.loads(line))

    def died(self) -> Verdict:
        """The verdict on the answer that ended the worker."""
        self.close()
        return Verdict("error", "the verifier's process ended")

    def start(self) -> "subprocess.Popen[bytes]":
        """The worker, started if need be and known to be ready, so that its start counts against no answer."""
        if self.worker is None:
            command = [sys.executable, "-m", "tasks.sampling.worker"]
            self.worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            self.received = b""
            send(self.worker, json.dumps(["exact", "", ""]).encode() + b"\n")
            assert self.worker.stdout is not None
            if not self.worker.stdout.readline():
                raise RuntimeError("the verifier process did not start")
        return self.worker

    def close(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.kill()
            self.worker.communicate()
            self.worker = None

    def check_failures(self, answers: Sequence[Answer], verdicts: Sequence[Verdict], min_judged: int) -> None:
        """Stop when the share of `timeout` and `error` is above the limit; warn of any below it."""
        failed = [i for i, verdict in enumerate(verdicts) if verdict.outcome in ("timeout", "error")]
        self.num_graded, self.num_failed = self.num_graded + len(answers), self.num_failed + len(failed)
        if not failed:
            return
        counts = Counter(verdicts[i].outcome for i in failed)
        examples = "; ".join(
            f"{verdicts[i].outcome} {verdicts[i].answer} (verifier {answers[i].verifier}, "
            f"gold {answers[i].gold[:80]!r}, completion {answers[i].completion[:80]!r})"
            for i in failed[:3]
        )
        message = f"{dict(counts)} of {len(answers)} answers could not be graded: {examples}"
        too_many = self.num_failed > max(self.settings.max_failure_rate * self.num_graded, 1)
        if too_many and self.num_graded >= min_judged:
            raise FailureRateError(
                f"{message}. With {self.num_failed} of {self.num_graded} in all that is over "
                f"verify.max_failure_rate {self.settings.max_failure_rate}: mend the verifier "
                "or the gold answers; what is in the store will not be sampled again"
            )
        logger.warning("%s", message)


def send(worker: "subprocess.Popen[bytes]", data: bytes) -> None:
    """Write all of `data`; an unbuffered pipe may take it in pieces."""
    assert worker.stdin is not None
    while data:
        data = data[worker.stdin.write(data) :]


def check_verifiers(names: set[str]) -> None:
    """Raise ArtifactError for a name that is no file in `verifiers/`."""
    known = {module.name for module in pkgutil.iter_modules(verifiers.__path__)}
    if unknown := sorted(names - known):
        raise ArtifactError(f"verifier '{unknown[0]}' is unknown; verifiers: {', '.join(sorted(known))}")
