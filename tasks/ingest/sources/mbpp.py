"""MBPP (Austin et al., arXiv 2108.07732), in the full and the sanitized form: a task in words, with
assertions, for the verifier `code`.

The prompt is `text` (or `prompt`) and the first `shown_tests` assertions, since only these show the
function's name. The gold is all of `test_list`, with `challenge_test_list` if
`challenge_tests` is set; `test_setup_code` or `test_imports` run before them. `code`, a solution,
is not used. Written from the published columns; not checked on real rows."""

from dataclasses import dataclass
from typing import Any

from tasks.common.params import at_least
from tasks.grading.programs.golds import gold_of_mbpp
from tasks.ingest.candidates import MISSING, Candidate, field
from tasks.ingest.files.formats import Record


@dataclass(frozen=True)
class Settings:
    """The `path` of the file, the number of assertions shown in the prompt, and whether the gold
    includes `challenge_test_list`."""

    path: str
    shown_tests: int
    challenge_tests: bool

    def __post_init__(self) -> None:
        at_least(0, shown_tests=self.shown_tests)


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return the candidate for one task. Raise ValueError for assertions that are not Python."""
    row = record.fields
    tests = field(row, "test_list")
    text = field(row, "text" if "text" in row else "prompt")
    if tests is MISSING or not tests or not isinstance(text, str):
        return Candidate(text, MISSING if tests is MISSING else "", "code", None)
    challenge = (row.get("challenge_test_list") or []) if settings.challenge_tests else []
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    answer = gold_of_mbpp([*tests, *challenge], setup)
    prompt = prompt_of(text, tests[: settings.shown_tests])
    return Candidate(prompt, answer, "code", None)


def prompt_of(text: str, tests: list[Any]) -> str:
    """Return the task with the assertions to show."""
    if not tests:
        return text
    shown = "\n".join(str(test).strip() for test in tests)
    return f"{text.rstrip()}\nThe code must pass these tests:\n```python\n{shown}\n```\n"
