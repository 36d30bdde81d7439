"""Grading: completions and gold answers in, verdicts out, by verifiers in processes that can be
killed.

An answer that takes longer than the limit is marked `timeout` and the process replaced; no other
answer is touched. The verdict on a completion cut off at the token limit is `truncated`, whatever
it says."""

import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.common.files import ArtifactError
from tasks.common.params import at_least
from tasks.grading import verifiers
from tasks.grading.pool import Died, Pool, TimedOut, python
from tasks.grading.verdict import Verdict

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 1 << 20  # of a completion: its end is what is read of a longer one


@dataclass(frozen=True)
class Verify:
    """The section `verify`. `processes` grade side by side; `seconds` (on the clock) is the limit
    of an answer, `memory_gb` (2^30 bytes of address space) that of a process; above
    `max_failure_rate` of outcomes `timeout` and `error` a stage stops. `verifiers` holds those with
    settings: name -> {method: file, setting: value}."""

    processes: int
    seconds: float
    memory_gb: float
    max_failure_rate: float
    verifiers: dict[str, dict[str, Any]]


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
    """A pool of verifier processes, started when first needed. Use as a context manager, or call
    `close`."""

    def __init__(self, settings: Verify) -> None:
        at_least(1, verify__processes=settings.processes)
        self.settings = settings
        self.pool: Pool | None = None
        self.names: set[str] = set()
        self.num_graded, self.num_failed = 0, 0

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(
        self,
        answers: Sequence[Answer],
        on_graded: Callable[[int], object] | None = None,
        *,
        min_judged: int = 0,
    ) -> list[Verdict]:
        """A verdict an answer, in order. Raises FailureRateError with examples when too many, of
        all answers that this grader has seen, could not be graded; not before it has seen
        `min_judged`: a step of training is a small sample, and one prompt that cannot be graded
        must not end a run."""
        waiting = [i for i, answer in enumerate(answers) if not answer.truncated]
        requests = [
            (a.verifier, a.completion[-MAX_CHARACTERS:], a.gold)
            for a in (answers[i] for i in waiting)
        ]
        verdicts = [Verdict("truncated", "")] * len(answers)
        for i, verdict in zip(waiting, self.judge(requests, on_graded), strict=True):
            verdicts[i] = verdict
        self.check_failures(answers, verdicts, min_judged)
        return verdicts

    def check_golds(
        self, golds: Sequence[tuple[str, str]], on_checked: Callable[[int], object] | None = None
    ) -> list[Verdict]:
        """What every (verifier, gold answer) is worth: `correct`; or `error` where the verifier
        cannot read the gold, `timeout`, or what the verifier says of a completion that states the
        gold."""
        return self.judge([(name, None, gold) for name, gold in golds], on_checked)

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """The version of each verifier: it changes with code, settings and libraries, whatever
        changes a verdict."""
        wanted = set(names)
        found: dict[str, str] = self.started(wanted).greet()["versions"]
        return {name: found[name] for name in sorted(wanted)}

    def judge(
        self,
        requests: Sequence[tuple[str, str | None, str]],
        on_done: Callable[[int], object] | None,
    ) -> list[Verdict]:
        """The verdict on every [verifier, completion or None, gold]."""
        if not requests:
            return []
        pool = self.started({name for name, _, _ in requests})
        return [verdict_of(reply) for reply in pool.map(requests, on_done)]

    def started(self, names: set[str]) -> Pool:
        """A pool whose processes know these verifiers; one that lacks some is replaced."""
        if self.pool is None or not names <= self.names:
            check_verifiers(names, self.settings)
            self.close()
            self.names |= names
            hello = {
                "names": sorted(self.names),
                "configured": self.settings.verifiers,
                "memory": int(self.settings.memory_gb * 2**30),
            }
            self.pool = Pool(
                python("tasks.grading.worker"),
                hello,
                self.settings.processes,
                self.settings.seconds,
            )
        return self.pool

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def check_failures(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], min_judged: int
    ) -> None:
        """Stop when the share of `timeout` and `error` is above the limit; warn of any below it."""
        failed = [
            i for i, verdict in enumerate(verdicts) if verdict.outcome in ("timeout", "error")
        ]
        self.num_graded, self.num_failed = (
            self.num_graded + len(answers),
            self.num_failed + len(failed),
        )
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


def verdict_of(reply: Any) -> Verdict:
    """What a worker said, or what became of it."""
    if isinstance(reply, TimedOut):
        return Verdict("timeout", str(reply))
    if isinstance(reply, Died):
        return Verdict("error", f"the verifier's process ended: {reply}")
    outcome, answer, partial, parts = reply
    return Verdict(outcome, answer, partial, tuple((name, score) for name, score in parts))


def parts_of(verdict: Verdict) -> list[dict[str, Any]]:
    """A composite's marks as the column `parts` holds them."""
    return [{"verifier": name, "score": score} for name, score in verdict.parts]


def check_verifiers(names: set[str], settings: Verify) -> None:
    """Raise ArtifactError for a name that is neither a file in `verifiers/` nor set up in
    params.yaml."""
    known = {module.name for module in pkgutil.iter_modules(verifiers.__path__)} | set(
        settings.verifiers
    )
    if unknown := sorted(names - known):
        raise ArtifactError(
            f"verifier '{unknown[0]}' is unknown; verifiers: {', '.join(sorted(known))}"
        )
