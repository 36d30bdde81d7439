"""The verifiers of a data root as an HTTP service: the application behind `winnow grade`."""

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tasks.common import params
from tasks.common.artifacts import PROMPTS, SPLITS
from tasks.common.layout import Layout
from tasks.common.processes.own_pages import only_own
from tasks.common.processes.ports import free_port
from tasks.grading.background import BackgroundGrader
from tasks.grading.grader import Answer
from tasks.grading.settings import Verify
from tasks.grading.verdict import Verdict
from tasks.models.policy import load_tokenizer, read_policy

logger = logging.getLogger(__name__)

UNGRADED = ("error", "timeout")
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


class BadRequest(ValueError):
    """Raised for a request that cannot be graded as it is; the message says what to change."""


class Service:
    """Grades completions of a root's prompts. Requests that wait are graded together."""

    def __init__(self, verify: Verify, layout: Layout, splits: Sequence[str] = SPLITS) -> None:
        # a service does not end because of a prompt that cannot be graded
        self.verify, self.judged = replace(verify, max_failure_rate=1.0), layout.judged
        self.grader = self.new_grader()
        policy = read_policy(layout)
        tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
        self.special = tuple(filter(None, tokenizer.all_special_tokens))
        self.prompts, self.verifiers = dict[str, str](), set[str]()
        for split in splits:
            names = ["prompt_id", "prompt", "verifier"]
            table = PROMPTS.read_columns(layout.prompts(split), names)
            self.prompts |= dict(table.select(names[:2]).iter_rows())
            self.verifiers |= {*table["verifier"]}

    def new_grader(self) -> BackgroundGrader:
        return BackgroundGrader(self.verify, judged=self.judged)

    def answer(self, completion: Any, label: Any) -> Answer:
        """Return what to grade. Raise BadRequest for a label that `winnow export` did not write."""
        try:
            truth = json.loads(label)
            prompt, verifier, gold = (truth[key] for key in ("prompt_id", "verifier", "answer"))
        except (TypeError, ValueError, KeyError) as error:
            raise BadRequest(
                f"the label {str(label)[:80]!r} is not one that `winnow export` writes without "
                "--plain: JSON with prompt_id, verifier and answer"
            ) from error
        if not isinstance(prompt, str) or prompt not in self.prompts:
            raise BadRequest(f"prompt {prompt} is not in this data root: start it with --data")
        if (
            not isinstance(verifier, str) or verifier not in self.verifiers
        ):  # it would end the grader, for all requests
            raise BadRequest(f"verifier {verifier!r} is of no prompt of this data root")
        if not (isinstance(completion, str) and isinstance(gold, str)):
            raise BadRequest("completion and answer must be text")
        while completion.endswith(self.special):  # AReaL and OpenRLHF send the end token
            completion = completion.removesuffix(next(filter(completion.endswith, self.special)))
        return Answer(verifier, completion, gold, False, self.prompts[prompt])

    async def grade(self, answers: list[Answer]) -> list[Verdict]:
        """Return the verdicts. After an error of the grader use a new one, with new processes."""
        grader = self.grader
        try:
            # a request that is cancelled must not end the grader
            return await asyncio.shield(asyncio.wrap_future(grader.submit(answers)))
        except Exception:
            if self.grader is grader:
                self.grader = self.new_grader()
                await asyncio.to_thread(grader.close)
            raise


def reward_of(verdict: Verdict) -> float | None:
    """Return a verdict's reward; None if the completion could not be graded."""
    return None if verdict.outcome in UNGRADED else verdict.reward


def required(verdicts: list[Verdict]) -> list[float]:
    """Return the rewards. Raise BadRequest if a completion could not be graded."""
    for verdict in verdicts:
        if verdict.outcome in UNGRADED:
            raise BadRequest(f"not graded ({verdict.outcome}): {verdict.answer}")
    return [verdict.reward for verdict in verdicts]


def pairs_of_grade(body: Any) -> list[tuple[Any, Any]]:
    return [(one["completion"], one["label"]) for one in body]


def reply_of_grade(verdicts: list[Verdict]) -> Any:
    return [
        {"reward": reward_of(one), "outcome": one.outcome, "answer": one.answer} for one in verdicts
    ]


def pairs_of_slime(body: Any) -> list[tuple[Any, Any]]:
    return [(body["response"], body["label"])]


def reply_of_slime(verdicts: list[Verdict]) -> Any:
    return required(verdicts)[0]


def pairs_of_openrlhf(body: Any) -> list[tuple[Any, Any]]:
    texts = []
    for query, prompt in zip(body["query"], body["prompts"], strict=True):
        if not query.startswith(prompt):  # the verifier would grade the prompt, too
            raise BadRequest(
                f"the query does not begin with its prompt {prompt[:80]!r}: raise --data.max_len "
                "if prompts are cut, or use a tokenizer that decodes what it encoded"
            )
        texts.append(query.removeprefix(prompt))
    return [*zip(texts, body["labels"], strict=True)]


def reply_of_openrlhf(verdicts: list[Verdict]) -> Any:
    rewards = required(verdicts)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


PATHS = {
    "/grade": (pairs_of_grade, reply_of_grade),
    "/slime": (pairs_of_slime, reply_of_slime),
    "/openrlhf": (pairs_of_openrlhf, reply_of_openrlhf),
}


def application(service: Service, token: str | None) -> Starlette:
    """Return the application; with `token` it refuses requests without it."""

    async def respond(request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = given or request.query_params.get("token", "")
        if token and not secrets.compare_digest(given.encode(), token.encode()):
            return PlainTextResponse("send the token that `winnow grade` printed", 401)
        pairs, reply = PATHS[request.url.path]
        try:
            answers = [service.answer(*pair) for pair in pairs(await request.json())]
        except BadRequest as error:
            return PlainTextResponse(str(error), 422)
        except MALFORMED as error:
            return PlainTextResponse(f"not the JSON that this path takes: {error!r}", 422)
        try:
            found = reply(await service.grade(answers))
        except BadRequest as error:
            return PlainTextResponse(str(error), 422)
        except Exception as error:
            logger.exception("a request could not be graded")
            return PlainTextResponse(f"grading failed, and starts again: {error!r}", 500)
        return Response(json.dumps(found), media_type="application/json")

    return Starlette(routes=[Route(path, respond, methods=["POST"]) for path in PATHS])


@contextmanager
def opened(
    values: Mapping[str, Any], layout: Layout, splits: Sequence[str] = SPLITS
) -> Iterator[Service]:
    """Yield a service for a root, and stop its grader afterwards."""
    service = Service(params.section(values, "verify", Verify), layout, splits)
    try:
        yield service
    except BaseException:
        service.grader.is_cancelled = True  # do not grade what still waits
        raise
    finally:
        service.grader.close()


@contextmanager
def running(service: Service) -> Iterator[str]:
    """Serve in a thread, and yield the address."""
    port = free_port()
    app = only_own(application(service, None))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def serve(service: Service, host: str, port: int, token: str | None) -> None:
    """Serve until interrupted."""
    app = only_own(application(service, token), host)
    uvicorn.run(app, host=host, port=port, log_level="warning")
