"""`exact`: the completion equals the gold answer, letter for letter, ignoring leading and trailing
white space."""

from tasks.grading.verdict import Verdict

FORMS = ()


def verify(completion: str, answer: str) -> Verdict:
    """Return `correct` or `wrong`; `unparsed` for an empty completion."""
    given = completion.strip()
    if not given:
        return Verdict("unparsed", "")
    return Verdict("correct" if given == answer.strip() else "wrong", given)
