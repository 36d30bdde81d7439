"""What a verifier says of one completion. A module of its own so that a verifier worker starts without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """`outcome` is one of artifacts.OUTCOMES; `answer` is what was extracted, or for `error` the reason."""

    outcome: str
    answer: str
