"""The processes in which verifiers run, of a pool (tasks/common/pool.py).

The configuration holds the verifiers and the limits, and the handshake's reply the verifiers'
versions. Requests are answers, [verifier, completion, gold, prompt]. Where the completion is null,
the gold is checked, or with a prompt, whether a formula of the prompt equals it.

Only here are errors caught broadly: a verifier that raises has produced the outcome `error`, which
never counts as a wrong answer. An answer that needs more memory than the limit is a `timeout`, like
one that needs more time."""

import time
from collections.abc import Mapping
from typing import Any

from tasks.common import pool_worker
from tasks.common.params import ParamsError
from tasks.grading.loading import Verifier, load
from tasks.grading.verdict import Verdict

MAX_ANSWER = 1000  # characters of an extracted answer that are kept


def judge(
    verifiers: Mapping[str, Verifier], name: str, completion: str | None, answer: str, prompt: str
) -> Verdict:
    """Return the verdict of the verifier `name`; without a completion, its verdict on the gold, or
    `wrong` with the formula of the prompt that equals the gold."""
    try:
        verifier = verifiers[name]
        if completion is not None:
            return verifier.verify(completion, answer, prompt)
        if not prompt:
            return verifier.check(answer)
        formula = verifier.copy(answer, prompt)
        return Verdict("correct", "") if formula is None else Verdict("wrong", formula)
    except MemoryError:
        limit = f"{pool_worker.memory_gb():.3g} GB"
        return Verdict(
            "timeout", f"over the memory limit of {limit} (verify.memory_gb, or `ulimit -v`)"
        )
    except Exception as error:
        return Verdict("error", f"{type(error).__name__}: {error}")


def reply_of(verdict: Verdict, seconds: float) -> list[Any]:
    """Return the verdict and its CPU time in JSON's types. Lone surrogates in the answer are
    replaced, because a table cannot hold them."""
    answer = verdict.answer[:MAX_ANSWER].encode("utf-8", "replace").decode()
    return [verdict.outcome, answer, verdict.partial, verdict.parts, seconds]


def prepare(configuration: Any) -> tuple[dict[str, Any], pool_worker.Answer]:
    """Load the verifiers."""
    try:
        verifiers = {
            name: load(name, configuration["configured"]) for name in configuration["names"]
        }
    except (ParamsError, ImportError, SyntaxError, AttributeError) as error:
        raise pool_worker.Unusable(
            f"the verifiers cannot be used: {type(error).__name__}: {error}"
        ) from error
    versions = {name: verifier.version for name, verifier in verifiers.items()}

    def reply(request: Any) -> list[Any]:
        since = time.process_time()
        verdict = judge(verifiers, *request)
        return reply_of(verdict, time.process_time() - since)

    return {"versions": versions}, reply


if __name__ == "__main__":
    pool_worker.run(prepare)
