"""Grading: completions and gold answers in, verdicts out, by verifiers in processes that can be
killed.

An answer that takes longer than a limit is marked `timeout` and its process replaced; no other
answer is affected. One whose process is killed is judged again, alone. The verdict on a completion
cut off at the token limit is always `truncated`."""

import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.files import ArtifactError
from tasks.common.pool import Died, Pool, TimedOut, python
from tasks.grading import verifiers
from tasks.grading.settings import Verify
from tasks.grading.verdict import JudgeUsage, Verdict

if TYPE_CHECKING:
    from tasks.grading.judging import Judge

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 1 << 20  # of a completion: only the end of a longer one is graded


@dataclass(frozen=True)
class Answer:
    """One completion to be graded; `prompt` is empty where it is not known."""

    verifier: str
    completion: str
    gold: str
    truncated: bool
    prompt: str = ""


class FailureRateError(ArtifactError):
    """Too many answers ended in `timeout` or `error`: the verdicts cannot be trusted."""


class Grader:
    """A pool of verifier processes, started when first needed. Use as a context manager, or call
    `close`.

    `judged` is the file in which the verdicts of language models are kept; without it a verifier
    `judge` gives errors."""

    def __init__(self, settings: Verify, judged: Path | None = None) -> None:
        self.settings = settings
        self.judged = judged
        self.judges: dict[str, Judge] = {}
        self.pool: Pool | None = None
        self.names: set[str] = set()
        self.num_graded = 0
        self.num_failed = 0

    @property
    def may_judge(self) -> bool:
        """Whether a language model may be asked."""
        configured = self.settings.verifiers
        return self.judged is not None and any(is_judge(name, configured) for name in configured)

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
        total: int = 0,
    ) -> list[Verdict]:
        """Return a verdict for each answer, in order. Raises FailureRateError with examples when
        too many of all the answers that this grader has seen could not be graded, but not before it
        has seen `min_judged`: a training step is a small sample, and one prompt that cannot be
        graded must not end a run. Where `total` answers are to come in all, it is raised when they
        are too many of those."""
        # truncated completions are not judged
        waiting = [i for i, answer in enumerate(answers) if not answer.truncated]
        requests = [
            (a.verifier, a.completion[-MAX_CHARACTERS:], a.gold, a.prompt)
            for a in (answers[i] for i in waiting)
        ]
        verdicts = [Verdict("truncated", "")] * len(answers)
        for i, verdict in zip(waiting, self.judge(requests, on_graded), strict=True):
            verdicts[i] = verdict
        self.check_failures(answers, verdicts, min_judged, total)
        return verdicts

    def check_golds(
        self, golds: Sequence[tuple[str, str]], on_checked: Callable[[int], object] | None = None
    ) -> list[Verdict]:
        """Return a verdict on every (verifier, gold answer): `correct` if it can be used; `error`
        where the verifier cannot read it; `timeout`; or the verdict on a completion that gives
        exactly this gold."""
        return self.judge([(name, None, gold, "") for name, gold in golds], on_checked)

    def find_copies(self, rows: Sequence[tuple[str, str, str]]) -> list[str]:
        """Return, for each (verifier, gold, prompt), the formula of the prompt that equals the gold
        and that the verifier takes for no answer; empty without one."""
        verdicts = self.judge([(name, None, gold, prompt) for name, gold, prompt in rows], None)
        return [verdict.answer if verdict.outcome == "wrong" else "" for verdict in verdicts]

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """Return the version of each verifier. It changes with everything that can change a
        verdict: code, settings and libraries."""
        wanted = set(names)
        found: dict[str, str] = self.started(wanted).handshake()["versions"]
        return {name: found[name] for name in sorted(wanted)}

    def judge(
        self,
        requests: Sequence[tuple[str, str | None, str, str]],
        on_done: Callable[[int], object] | None,
    ) -> list[Verdict]:
        """Return the verdict on every (verifier, completion or None, gold, prompt)."""
        if not requests:
            return []
        by_judge: dict[str, list[int]] = {}
        others: list[int] = []
        for place, (name, completion, *_) in enumerate(requests):
            asks = self.judged and completion and is_judge(name, self.settings.verifiers)
            (by_judge.setdefault(name, []) if asks else others).append(place)
        verdicts: dict[int, Verdict] = {}
        for name, places in by_judge.items():
            asked = [(str(requests[place][1]), requests[place][2]) for place in places]
            found = self.judge_of(name).grade(asked, on_done or (lambda _: None))
            verdicts.update(zip(places, found, strict=True))
        if others:
            pool = self.started({requests[place][0] for place in others})
            replies = pool.map([requests[place] for place in others], on_done)
            found = [verdict_of(reply, self.settings.seconds) for reply in replies]
            verdicts.update(zip(others, found, strict=True))
        return [verdicts[place] for place in range(len(requests))]

    def judge_of(self, name: str) -> "Judge":
        """Return the judge of this name."""
        if name not in self.judges:
            from tasks.grading.judging import (  # only who judges loads the client
                Judge,
                VerdictStore,
            )

            assert self.judged is not None
            store = VerdictStore(self.judged)
            self.judges[name] = Judge(name, self.settings.verifiers.get(name, {}), store)
        return self.judges[name]

    def judge_cost(self) -> JudgeUsage:
        """Return what all judges have cost since this was asked last."""
        total = JudgeUsage()
        for judge in self.judges.values():
            total += judge.usage
            judge.usage = JudgeUsage()
        return total

    def started(self, names: set[str]) -> Pool:
        """Return a pool whose processes have loaded these verifiers. A pool without some of them is
        replaced."""
        if self.pool is None or not names <= self.names:
            check_verifiers(names, self.settings)
            self.close()
            self.names |= names
            configuration = {
                "names": sorted(self.names),
                "configured": self.settings.verifiers,
                "memory": int(self.settings.memory_gb * 2**30),
            }
            self.pool = Pool(
                python("tasks.grading.verifier_worker"),
                configuration,
                self.settings.processes,
                self.settings.seconds,
                self.settings.clock_factor,
            )
        return self.pool

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def check_failures(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], min_judged: int, total: int
    ) -> None:
        """Raise FailureRateError when the share of `timeout` and `error` is above the limit. Below
        it, log a warning."""
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
        num_answers = max(self.num_graded, total)
        too_many = self.num_failed > max(self.settings.max_failure_rate * num_answers, 1)
        if too_many and self.num_graded >= min_judged:
            raise FailureRateError(
                f"{message}. That makes {self.num_failed} of {self.num_graded} in all, over "
                f"verify.max_failure_rate {self.settings.max_failure_rate}: fix the verifier or "
                "the gold answers, and run again; rollouts in the store are not sampled again"
            )
        logger.warning("%s", message)


def verdict_of(reply: Any, limit: float) -> Verdict:
    """Return the verdict in a worker's reply, or for a worker that was killed, after `limit`
    seconds, or died."""
    if isinstance(reply, TimedOut):
        return Verdict("timeout", str(reply), seconds=limit)
    if isinstance(reply, Died):
        return Verdict("error", f"the verifier failed: {reply}")
    outcome, answer, partial, parts, seconds = reply
    return Verdict(outcome, answer, partial, tuple((name, score) for name, score in parts), seconds)


def parts_of(verdict: Verdict) -> list[dict[str, Any]]:
    """Return the scores of a composite's parts in the form of the column `parts`."""
    return [{"verifier": name, "score": score} for name, score in verdict.parts]


def check_verifiers(names: set[str], settings: Verify) -> None:
    """Raise ArtifactError for a name that is neither a file in `verifiers/` nor configured in
    params.yaml."""
    files = {module.name for module in pkgutil.iter_modules(verifiers.__path__)}
    known = files | set(settings.verifiers)
    if unknown := sorted(names - known):
        raise ArtifactError(
            f"verifier '{unknown[0]}' is unknown; choose from: {', '.join(sorted(known))}"
        )


def is_judge(name: str, configured: dict[str, dict[str, Any]]) -> bool:
    """Whether a verifier asks a language model."""
    return bool(configured.get(name, {}).get("method", name) == "judge")
