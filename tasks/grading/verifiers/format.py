"""`format`: the completion consists of the tags in the setting `tags`, each once and in this order,
such as `<think>...</think><answer>...</answer>`.

White space may separate them; other text is allowed only after the last tag, and only if
`text_after` is set. The gold is ignored. The answer is the content of the last tag."""

import re

from tasks.grading.verdict import Verdict

canonical_completion = None  # the gold is ignored


def verify(completion: str, answer: str, *, tags: list[str], text_after: bool) -> Verdict:
    """Return `correct` or `wrong`."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(completion.count(mark) != 1 for mark in marks):
        return Verdict("wrong", "")
    blocks = r"\s*+".join(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>" for tag in tags)
    after = ".*" if text_after else r"\s*+"
    found = re.compile(rf"\s*+{blocks}{after}", re.DOTALL).fullmatch(completion)
    if found is None:
        return Verdict("wrong", "")
    return Verdict("correct", found.group(len(tags)).strip())
