"""The verifiers of a data root as an HTTP service: the application behind `winnow grade`."""

import asyncio
import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
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

UNGRADED = ("error", "timeout")


class BadRequest(ValueError):
    """Raised for a request that cannot be graded as it is; the message says what to change."""


class Service:
    """Grades completions of a root's prompts. Requests that wait are graded together."""

    def __init__(self, verify: Verify, layout: Layout) -> None:
        # a service does not end because of a prompt that cannot be graded
        self.grader = BackgroundGrader(replace(verify, max_failure_rate=1.0), judged=layout.judged)
        self.prompts, self.verifiers = dict[str, str](), set[str]()
        for split in SPLITS:
            names = ["prompt_id", "prompt", "verifier"]
            table = PROMPTS.read_columns(layout.prompts(split), names)
            self.prompts |= dict(table.select(names[:2]).iter_rows())
            self.verifiers |= {*table["verifier"]}

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
        return Answer(verifier, completion, gold, False, self.prompts[prompt])

    async def grade(self, pairs: list[tuple[Any, Any]]) -> list[Verdict]:
        """Return the verdicts on pairs (completion, label)."""
        answers = [self.answer(*pair) for pair in pairs]
        return await asyncio.wrap_future(self.grader.submit(answers))


def reward_of(verdict: Verdict) -> float | None:
    """Return a verdict's reward; None if the completion could not be graded."""
    return None if verdict.outcome in UNGRADED else verdict.reward


def required(verdicts: list[Verdict]) -> list[float]:
    """Return the rewards. Raise BadRequest if a completion could not be graded."""
    for verdict in verdicts:
        if verdict.outcome in UNGRADED:
            raise BadRequest(f"not graded ({verdict.outcome}): {verdict.answer}")
    return [verdict.reward for verdict in verdicts]


async def grade(service: Service, body: Any) -> Any:
    verdicts = await service.grade([(one["completion"], one["label"]) for one in body])
    return [
        {"reward": reward_of(one), "outcome": one.outcome, "answer": one.answer} for one in verdicts
    ]


async def slime(service: Service, body: Any) -> Any:
    return required(await service.grade([(body["response"], body["label"])]))[0]


async def openrlhf(service: Service, body: Any) -> Any:
    texts = [
        query.removeprefix(prompt)
        for query, prompt in zip(body["query"], body["prompts"], strict=True)
    ]
    rewards = required(await service.grade([*zip(texts, body["labels"], strict=True)]))
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


def application(service: Service, token: str | None) -> Starlette:
    """Return the application; with `token` it refuses requests without it."""

    def endpoint(handle: Any) -> Any:
        async def respond(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            given = given or request.query_params.get("token", "")
            if token and not secrets.compare_digest(given, token):
                return PlainTextResponse("send the token that `winnow grade` printed", 401)
            try:
                return JSONResponse(await handle(service, await request.json()))
            except BadRequest as error:
                return PlainTextResponse(str(error), 422)
            except (KeyError, TypeError, ValueError) as error:
                return PlainTextResponse(f"not the JSON that this path takes: {error!r}", 422)

        return respond

    routes = [
        Route(f"/{handle.__name__}", endpoint(handle), methods=["POST"])
        for handle in (grade, slime, openrlhf)
    ]
    return Starlette(routes=routes)


@contextmanager
def opened(values: Mapping[str, Any], layout: Layout) -> Iterator[Service]:
    """Yield a service for a root, and stop its grader afterwards."""
    service = Service(params.section(values, "verify", Verify), layout)
    with service.grader:
        yield service


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
