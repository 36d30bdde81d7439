"""The process in which verifiers run: JSON lines in, JSON lines out. Its parent kills it when an answer takes too long.

Only here are errors caught broadly: a verifier that raises has produced the outcome `error`, which never counts as a
wrong answer.
"""

import importlib
import json
import signal
import sys

from tasks.common.process import die_with_parent
from tasks.sampling.verdict import Verdict

MAX_ANSWER = 1000  # characters of an extracted answer that are kept


def verify(verifier: str, completion: str, answer: str) -> Verdict:
    """The verdict of `verifiers/<verifier>.py`."""
    try:
        module = importlib.import_module(f"tasks.sampling.verifiers.{verifier}")
        return module.verify(completion, answer)  # type: ignore[no-any-return]
    except Exception as error:
        return Verdict("error", f"{type(error).__name__}: {error}"[:500])


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent finishes its step
    for line in sys.stdin:
        verdict = verify(*json.loads(line))
        print(json.dumps([verdict.outcome, verdict.answer[:MAX_ANSWER]]), flush=True)


if __name__ == "__main__":
    main()
