"""What a verifier says of one completion. A module of its own so that a verifier worker starts
without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """`outcome` is one of artifacts.OUTCOMES; `answer` is what was extracted, or for `error` and
    `timeout` the reason.

    `partial` is a verifier's own mark in [0, 1], where it gives one. `parts` are the marks of a
    composite's components, in its order; then `partial` is their weighted sum."""

    outcome: str
    answer: str
    partial: float | None = None
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def score(self) -> float:
        """The mark in [0, 1]: the verifier's own, else 1 for `correct` and 0 for everything
        else."""
        return float(self.outcome == "correct") if self.partial is None else self.partial

    @property
    def reward(self) -> float:
        """What training rewards: 1 for `correct` and 0 for everything else, but a composite's
        weighted sum."""
        return self.score if self.parts else float(self.outcome == "correct")
