r"""`part`: apply another verifier to the part of the completion that the group of a regular
expression captures.

`pattern: '(?s).*</think>(.*)'` selects the text after the reasoning, `'####\s*(.*)'` requires
GSM8K's marker, `'(?s)<answer>(.*?)</answer>'` requires tags. `which` selects the `first` or `last`
match. Without a match, `otherwise` decides: `unparsed`, or `whole` to judge the whole text."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from tasks.common.params import ParamsError
from tasks.grading.verdict import Verdict


def uses(settings: Mapping[str, Any]) -> list[str]:
    """Return a list with the name of the verifier that judges the part. Raise ParamsError for a bad
    `pattern`."""
    try:
        groups = re.compile(settings.get("pattern", "")).groups
    except (re.error, TypeError) as error:
        raise ParamsError(
            f"`pattern` {settings['pattern']!r} is not a regular expression: {error}"
        ) from error
    if groups != 1:
        raise ParamsError(
            f"`pattern` {settings.get('pattern')!r} must have one group, the part to be judged: it "
            f"has {groups}"
        )
    return [str(settings.get("verifier"))]


def verify(
    completion: str,
    answer: str,
    prompt: str = "",
    *,
    verifier: str,
    pattern: str,
    which: Literal["first", "last"],
    otherwise: Literal["unparsed", "whole"],
    verifiers: dict[str, Any],
) -> Verdict:
    """Return the verdict of `verifier` on the part; see `otherwise` for completions without one."""
    matches = re.findall(pattern, completion)
    if matches:
        completion = matches[0 if which == "first" else -1]
    elif otherwise == "unparsed":
        return Verdict("unparsed", "")
    verdict: Verdict = verifiers[verifier].verify(completion, answer, prompt)
    return verdict
