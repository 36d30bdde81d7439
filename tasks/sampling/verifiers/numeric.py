"""`numeric`: the last number of the completion equals the gold, as exact numbers (1,000 = 1000.0).

The rule of GSM8K's graders. Commas inside a number are removed; a number may have a sign and decimals. Left out here:
units, percent signs and fractions.
"""

import re
from decimal import Decimal

from tasks.sampling.verdict import Verdict

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")


def verify(completion: str, answer: str) -> Verdict:
    """`correct`, `wrong`, or `unparsed` when the completion has no number. A gold without a number is an error."""
    gold = last_number(answer)
    if gold is None:
        return Verdict("error", f"the gold answer {answer!r} has no number")
    given = last_number(completion)
    if given is None:
        return Verdict("unparsed", "")
    return Verdict("correct" if Decimal(given) == Decimal(gold) else "wrong", given)


def last_number(text: str) -> str | None:
    """The last number of `text` without its commas, or None."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None
