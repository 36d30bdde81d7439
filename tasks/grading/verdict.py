"""A verifier's verdict on one completion. It has a module of its own so that a worker starts
without torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    """`outcome` is one of artifacts.OUTCOMES; `answer` is the extracted answer, or the reason for
    `error` and `timeout`.

    `partial` is the verifier's own score in [0, 1], where it gives one. `parts` are the scores of a
    composite's verifiers, in its order; then `partial` is their weighted sum. `seconds` is the CPU
    time that it took."""

    outcome: str
    answer: str
    partial: float | None = None
    parts: tuple[tuple[str, float], ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def score(self) -> float:
        """The score in [0, 1]: the verifier's own, else 1 for `correct` and 0 for everything
        else."""
        return float(self.outcome == "correct") if self.partial is None else self.partial

    @property
    def reward(self) -> float:
        """The reward in training: for a composite the weighted sum, else 1 for `correct` and 0 for
        everything else."""
        return self.score if self.parts else float(self.outcome == "correct")


@dataclass
class JudgeUsage:
    """What judging cost: requests of this run, verdicts that were known, and the tokens and FLOPs
    of all of them, so that what was judged before is not free."""

    requests: int = 0
    tokens: int = 0
    reused: int = 0
    flops: float = 0.0

    def __add__(self, other: "JudgeUsage") -> "JudgeUsage":
        return JudgeUsage(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.reused + other.reused,
            self.flops + other.flops,
        )
