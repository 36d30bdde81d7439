"""Grade completions against gold answers, with verifiers that run in processes that can be killed.

An answer that exceeds a limit is marked `timeout`, and at the time limit its process is replaced;
no other answer is affected. An answer whose process was killed is judged again, alone. The verdict
on a completion cut off at the token limit is always `truncated`."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.files import ArtifactError
from tasks.common.processes.pool import Died, Pool, TimedOut
from tasks.grading.settings import Verify
from tasks.grading.verdict import Verdict

if TYPE_CHECKING:
    from tasks.grading.judge import Judge

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 1 << 20  # of a completion: only the end of a longer completion is graded


@dataclass(frozen=True)
class Answer:
    """One completion to grade. `prompt` is empty if it is unknown."""

    verifier: str
    completion: str
    gold: str
    truncated: bool
    prompt: str = ""


class FailureRateError(ArtifactError):
    """Raised if too many answers end in `timeout` or `error` for the verdicts to be trusted."""


class Grader:
    """A pool of verifier processes, started on first use. Use it as a context manager, or call
    `close`.

    `judged` is the file that stores the verdicts of language models. Without it, the verifier
    `judge` returns errors.

    Too many failures raise FailureRateError, but only after `min_judged` answers, because a
    training step is a small sample, and one prompt that cannot be graded must not stop a run. If
    `total` answers are expected, the limit is a share of `total`."""

    def __init__(
        self, settings: Verify, judged: Path | None = None, total: int = 0, min_judged: int = 0
    ) -> None:
        self.settings = settings
        self.judged = judged
        self.total, self.min_judged = total, min_judged
        self.judges: dict[str, Judge] = {}
        self.pool: Pool | None = None
        self.names: set[str] = set()
        self.num_graded = 0
        self.num_failed = 0

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(
        self, answers: Sequence[Answer], on_graded: Callable[[int], object] | None = None
    ) -> list[Verdict]:
        """Return a verdict for each answer, in order. Raise FailureRateError, with examples, when
        too many of the answers seen by this grader could not be graded."""
        waiting = [i for i, answer in enumerate(answers) if not answer.truncated]
        requests = [
            (a.verifier, a.completion[-MAX_CHARACTERS:], a.gold, a.prompt)
            for a in (answers[i] for i in waiting)
        ]
        verdicts = [Verdict("truncated", "")] * len(answers)
        for i, verdict in zip(waiting, self.judge(requests, on_graded), strict=True):
            verdicts[i] = verdict
        self.check_failures(answers, verdicts)
        return verdicts

    def check_golds(self, golds: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return a verdict on each (verifier, gold answer): `correct` if the gold is usable;
        `error` if the verifier cannot read it; `timeout` if a limit is exceeded; else the verdict
        on a completion with exactly this gold as its answer."""
        return self.judge([(name, None, gold, "") for name, gold in golds])

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """Return the version of each verifier. It changes with everything that can change a
        verdict: code, settings and libraries."""
        wanted = set(names)
        found: dict[str, str] = self.started(wanted).handshake()["versions"]
        return {name: found[name] for name in sorted(wanted)}

    def judge(
        self,
        requests: Sequence[tuple[str, str | None, str, str]],
        on_done: Callable[[int], object] | None = None,
    ) -> list[Verdict]:
        """Return verdicts on (verifier, completion, gold, prompt); see `verifier_worker.judge`."""
        if not requests:
            return []
        by_judge: dict[str, list[int]] = {}
        others: list[int] = []
        for place, (name, completion, *_) in enumerate(requests):
            method = self.settings.verifiers.get(name, {}).get("method", name)
            judged = self.judged and completion and method == "judge"
            (by_judge.setdefault(name, []) if judged else others).append(place)
        verdicts: dict[int, Verdict] = {}
        for name, places in by_judge.items():
            answers = [(str(requests[place][1]), requests[place][2]) for place in places]
            graded = self.judge_of(name).grade(answers, on_done or (lambda _: None))
            verdicts.update(zip(places, graded, strict=True))
        if others:
            pool = self.started({requests[place][0] for place in others})
            replies = pool.map([requests[place] for place in others], on_done)
            verdicts.update(zip(others, map(verdict_of, replies), strict=True))
        return [verdicts[place] for place in range(len(requests))]

    def judge_of(self, name: str) -> "Judge":
        """Return the judge (a language model) configured under this name."""
        if name not in self.judges:
            # import the client only if there is a judge
            from tasks.grading.judge import Judge, VerdictStore

            assert self.judged is not None
            store = VerdictStore(self.judged)
            self.judges[name] = Judge(name, self.settings.verifiers.get(name, {}), store)
        return self.judges[name]

    def judge_flops(self) -> float:
        """Return the FLOPs of all judges since the last call. Reused verdicts count, so that
        earlier judging is not reported as free."""
        total = 0.0
        for judge in self.judges.values():
            total += judge.flops
            judge.flops = 0.0
        return total

    def started(self, names: set[str]) -> Pool:
        """Return a pool of processes that have loaded these verifiers. Replace a pool that lacks
        one of them."""
        if self.pool is None or not names <= self.names:
            self.close()
            self.names |= names
            configuration = {
                "names": sorted(self.names),
                "configured": self.settings.verifiers,
                "memory": int(self.settings.memory_gb * 2**30),
            }
            self.pool = Pool(
                "tasks.grading.verifier_worker",
                configuration,
                self.settings.processes,
                self.settings.seconds,
                self.settings.clock_factor,
            )
        return self.pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def check_failures(self, answers: Sequence[Answer], verdicts: Sequence[Verdict]) -> None:
        """Count the `timeout` and `error` verdicts. If there are new ones, log a warning, or raise
        FailureRateError if the total is above 1 and above the limit (see the class)."""
        failed = [
            i for i, verdict in enumerate(verdicts) if verdict.outcome in ("timeout", "error")
        ]
        self.num_graded += len(answers)
        self.num_failed += len(failed)
        if not failed:
            return
        counts = Counter(verdicts[i].outcome for i in failed)
        examples = "; ".join(
            f"{verdicts[i].outcome} {verdicts[i].answer} (verifier {answers[i].verifier}, "
            f"gold {answers[i].gold[:80]!r}, completion {answers[i].completion[:80]!r})"
            for i in failed[:3]
        )
        message = f"{dict(counts)} of {len(answers)} answers could not be graded: {examples}"
        num_answers = max(self.num_graded, self.total)
        too_many = self.num_failed > max(self.settings.max_failure_rate * num_answers, 1)
        if too_many and self.num_graded >= self.min_judged:
            raise FailureRateError(
                f"{message}. That makes {self.num_failed} of {self.num_graded} in all, over "
                f"verify.max_failure_rate {self.settings.max_failure_rate}: fix the verifier or "
                "the gold answers, or raise verify.seconds, and run again; rollouts in the store "
                "are not sampled again"
            )
        logger.warning("%s", message)


def verdict_of(reply: Any) -> Verdict:
    """Return the verdict in a worker's reply. A worker that was killed at the time limit yields
    `timeout`; a worker that died yields `error`."""
    if isinstance(reply, TimedOut):
        return Verdict("timeout", str(reply))
    if isinstance(reply, Died):
        return Verdict("error", f"the verifier failed: {reply}")
    outcome, answer, partial, parts = reply
    return Verdict(outcome, answer, partial, tuple((name, score) for name, score in parts))
