"""The process in which verifiers run: JSON lines in, JSON lines out. Its parent kills it when an
answer takes too long.

The first line names the verifiers and the limits, and is answered by the verifiers' versions. Then
each line is a list of answers, [verifier, completion, gold], or with null for the completion a gold
to be checked. Verdicts go back as soon as they have taken a moment: the parent's clock runs from
one line to the next.

Only here are errors caught broadly: a verifier that raises has produced the outcome `error`, which
never counts as a wrong answer. An answer that needs more memory than the limit is a `timeout`: it
went beyond its means."""

import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from tasks.common.params import ParamsError
from tasks.common.process import die_with_parent
from tasks.grading.loading import Verifier, load
from tasks.grading.verdict import Verdict

MAX_ANSWER = 1000  # characters of an extracted answer that are kept
HOLD_SECONDS = 0.002  # verdicts are held back to be sent together
MAX_FILE_BYTES = 64 << 20  # of any file that a verifier writes


def judge(
    verifiers: Mapping[str, Verifier], name: str, completion: str | None, answer: str
) -> Verdict:
    """The verdict of the verifier `name`; without a completion, on the gold itself."""
    try:
        verifier = verifiers[name]
        return verifier.check(answer) if completion is None else verifier.verify(completion, answer)
    except MemoryError:
        return Verdict("timeout", "over the limit of memory")
    except Exception as error:
        return Verdict("error", f"{type(error).__name__}: {error}")


def limit(memory: int) -> None:
    """No more than `memory` bytes, no core dumps, no endless files; big integers in text are read
    as they are."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    sys.set_int_max_str_digits(0)  # the limit of time does what this one is for


def take_stdout() -> int:
    """A descriptor for replies; what verifiers and libraries print goes nowhere, it would be taken
    for a reply."""
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    logging.disable()
    return replies


def send(replies: int, value: Any) -> None:
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def reply_of(verdict: Verdict) -> list[Any]:
    """The verdict in JSON's types. The answer is made encodable: a lone surrogate cannot stand in a
    table."""
    answer = verdict.answer[:MAX_ANSWER].encode("utf-8", "replace").decode()
    return [verdict.outcome, answer, verdict.partial, verdict.parts]


def answer_line(verifiers: Mapping[str, Verifier], requests: list[Any], replies: int) -> None:
    """Judge a list of answers, and send the verdicts in one line or in several."""
    held, since = [], time.monotonic()
    for request in requests:
        held.append(reply_of(judge(verifiers, *request)))
        if time.monotonic() - since > HOLD_SECONDS:
            send(replies, held)
            held, since = [], time.monotonic()
    if held:
        send(replies, held)


def main() -> None:
    die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent finishes its step
    replies, lines = take_stdout(), sys.stdin.buffer
    request = json.loads(lines.readline())
    try:
        verifiers = {name: load(name, request["configured"]) for name in request["names"]}
    except (ParamsError, ImportError, SyntaxError, AttributeError) as error:
        send(replies, {"failure": f"{type(error).__name__}: {error}"})
        return
    send(replies, {"versions": {name: verifier.version for name, verifier in verifiers.items()}})
    limit(request["memory"])
    for line in lines:
        answer_line(verifiers, json.loads(line), replies)


if __name__ == "__main__":
    main()
