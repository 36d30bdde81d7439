"""`exact`: the completion is the gold answer, letter for letter, without white space at both
ends."""

from tasks.grading.verdict import Verdict


def verify(completion: str, answer: str) -> Verdict:
    """`correct` or `wrong`; an empty completion is `unparsed`."""
    given = completion.strip()
    if not given:
        return Verdict("unparsed", "")
    return Verdict("correct" if given == answer.strip() else "wrong", given)
