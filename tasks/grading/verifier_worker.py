"""The worker processes of a pool (tasks/common/processes/pool.py), in which verifiers run.

The configuration contains the verifiers and the limits; the handshake returns the versions of the
verifiers. A request is an answer, [verifier, completion, gold, prompt]. If the completion is null,
the worker checks the gold.

Errors of any kind are caught here: a verifier that raises yields the outcome `error`, which never
counts as a wrong answer. An answer that exceeds the memory limit or the time limit is a
`timeout`."""

from collections.abc import Mapping
from typing import Any

from tasks.common.params import ParamsError
from tasks.common.processes import pool_worker
from tasks.grading.loading import Verifier, load
from tasks.grading.verdict import Verdict

ROUNDING = 1e-6  # of the sum of a composite's scores
MAX_ANSWER = 1000  # characters kept of an extracted answer


def judge(
    verifiers: Mapping[str, Verifier], name: str, completion: str | None, answer: str, prompt: str
) -> Verdict:
    """Return the verdict of the verifier `name`. Without a completion, judge the gold or, if
    `prompt` is a second gold, return `correct` if the two are equivalent, else `wrong`."""
    try:
        verifier = verifiers[name]
        if completion is None and prompt:
            return Verdict("correct" if verifier.same(prompt, answer) else "wrong", "")
        if completion is None:
            return verifier.check(answer)
        verdict = verifier.verify(completion, answer, prompt)
        for score in (*(score for _, score in verdict.parts), verdict.score):
            if not 0.0 <= score <= 1.0 + ROUNDING:  # also false for nan
                return Verdict("error", f"a verifier's score is {score}: it must be from 0 to 1")
        return verdict
    except MemoryError:
        limit = f"{pool_worker.memory_gb():.3g} GB"
        return Verdict(
            "timeout", f"over the memory limit of {limit} (verify.memory_gb, or `ulimit -v`)"
        )
    except Exception as error:
        return Verdict("error", f"{type(error).__name__}: {error}")


def reply_of(verdict: Verdict) -> list[Any]:
    """Return the verdict in JSON types. Lone surrogates in the answer are replaced, because a table
    cannot store them."""
    answer = verdict.answer[:MAX_ANSWER].encode("utf-8", "replace").decode()
    return [verdict.outcome, answer, verdict.partial, verdict.parts]


def prepare(configuration: Any) -> tuple[dict[str, Any], pool_worker.Answer]:
    """Load the verifiers, or raise Unusable. Return the handshake's reply and a request handler."""
    try:
        verifiers = {
            name: load(name, configuration["configured"]) for name in configuration["names"]
        }
    except (ParamsError, ImportError, SyntaxError, AttributeError) as error:
        raise pool_worker.Unusable(
            f"the verifiers cannot be used: {type(error).__name__}: {error}"
        ) from error
    versions = {name: verifier.version for name, verifier in verifiers.items()}
    return {"versions": versions}, lambda request: reply_of(judge(verifiers, *request))


if __name__ == "__main__":
    pool_worker.run(prepare)
