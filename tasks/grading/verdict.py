"""The verdict of a verifier on one completion, in a separate module so that a worker process starts
without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """`outcome` is one of artifacts.OUTCOMES; `answer` is the extracted answer, or the reason for
    the outcome.

    `partial` is the verifier's score in [0, 1], if it computes one. `parts` are the scores of the
    verifiers of a composite, in order; `partial` is then their weighted sum."""

    outcome: str
    answer: str
    partial: float | None = None
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def score(self) -> float:
        """The score in [0, 1]: the verifier's score if set, else 1 for `correct` and 0 for every
        other outcome."""
        return float(self.outcome == "correct") if self.partial is None else self.partial

    @property
    def reward(self) -> float:
        """The reward in training: the weighted sum for a composite, else 1 for `correct` and 0 for
        every other outcome."""
        return self.score if self.parts else float(self.outcome == "correct")
