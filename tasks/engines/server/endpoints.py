"""A client of one OpenAI-compatible server, over HTTP or a Unix socket: it lists models, and
requests completions of token ids.

The client requires vLLM's additions to the protocol: prompts and completions as token ids, a seed
per completion, and log-probabilities under the sampling distribution. Without them it raises an
error that names the missing part. The user's key is in OPENAI_API_KEY; no message contains it."""

import asyncio
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from tasks.common.files import ArtifactError
from tasks.engines.engine import Unavailable
from tasks.engines.settings import Sampling

CONNECT_SECONDS = 10.0
QUICK_SECONDS = 30.0  # for requests that cost a server nothing
HEALTH_SECONDS = 2.0
MAX_MESSAGE = 500  # characters of a server's own message in an error
# temporary failures: another server, or the same one later, may answer
RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Endpoint:
    """The address of a server. With `socket`, the host in `url` is unused. `key` was made for a
    server started here; a server with neither `key` nor `socket` gets the user's key. `name`
    distinguishes a restarted server from a previous one at the same address."""

    url: str
    socket: Path | None = None
    name: str = ""
    key: str | None = field(default=None, repr=False)

    @property
    def root(self) -> str:
        """The base URL of those routes of vLLM that are not part of OpenAI's API."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class Completion:
    """One completion as a server returned it. `fingerprint` is the server's kind and version,
    OpenAI's `system_fingerprint`. `versions`, if the server reports them, are the weights that
    sampled each span of tokens: (name of the weights, start, exclusive end)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    fingerprint: str = "unknown"
    versions: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class CompletionRequest:
    """A request to the model named `model` for one completion, which ends at any token of
    `stop_ids`. A request with a `name` may be stopped; the finish reason is then "abort"."""

    model: str
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    stop_ids: Sequence[int]
    with_logprobs: bool = True
    name: str = ""

    def parameters(self) -> dict[str, Any]:
        """Return every setting for which a server may have its own default."""
        return {
            "max_tokens": self.sampling.max_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": self.seed,
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": True,
        }


class Connection:
    """A session with one endpoint; an async context manager. Requests time out after `seconds`."""

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self.endpoint = endpoint
        # a server that was started here does not get the user's key
        is_ours = endpoint.socket is not None or endpoint.key is not None
        self.key = (endpoint.key or "") if is_ours else os.environ.get("OPENAI_API_KEY", "")
        connector = (
            aiohttp.UnixConnector(str(endpoint.socket), limit=0) if endpoint.socket else None
        )
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.seconds = seconds
        self.session = aiohttp.ClientSession(
            connector=connector or aiohttp.TCPConnector(limit=0), headers=headers
        )

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def request(
        self, method: str, url: str, body: Any = None, seconds: float = math.inf
    ) -> Any:
        """Return the JSON response, None if empty. Raise Unavailable for temporary failures, such
        as no response in `seconds`, and ArtifactError for other failures and invalid JSON."""
        text = await self.text(url, method, body, seconds)
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise ArtifactError(
                f"{url} does not answer in JSON: check that it is an OpenAI-compatible API"
            ) from error

    async def text(
        self, url: str, method: str = "GET", body: Any = None, seconds: float = math.inf
    ) -> str:
        """Return the response as text, or raise the errors of `request`."""
        limit = aiohttp.ClientTimeout(min(seconds, self.seconds), sock_connect=CONNECT_SECONDS)
        try:
            async with self.session.request(
                method, url, json=body, allow_redirects=False, timeout=limit
            ) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = (
                "no response in time" if isinstance(error, TimeoutError) else type(error).__name__
            )
            raise Unavailable(f"{self.endpoint.url} is not reachable ({reason})") from error
        if response.status == 200:
            return text
        shown = text.replace(self.key, "***") if self.key else text
        message = f"{url} responded with {response.status}: {shown[:MAX_MESSAGE]}"
        if response.status in RETRYABLE:
            raise Unavailable(message)
        if response.status in (401, 403):
            raise ArtifactError(
                f"{message} (the key comes from the environment variable OPENAI_API_KEY)"
            )
        raise ArtifactError(message)

    async def models(self) -> list[dict[str, Any]]:
        """Return the server's models: dicts with `id` and, from vLLM, also `max_model_len`."""
        url = f"{self.endpoint.url}/models"
        answer = await self.request("GET", url, seconds=QUICK_SECONDS)
        if not isinstance(answer, dict) or not answer.get("data"):
            raise ArtifactError(
                f"{self.endpoint.url}/models lists no model: check that it is an OpenAI-compatible "
                "API"
            )
        return list(answer["data"])

    async def is_alive(self) -> bool:
        """Return whether the server responds to `models`. ArtifactErrors are not caught."""
        try:
            await self.models()
        except Unavailable:
            return False
        return True

    async def complete(self, request: CompletionRequest) -> Completion:
        """Return a completion, requested through the OpenAI-compatible API."""
        logprobs = {"logprobs": 0, "return_tokens_as_token_ids": True}
        body = {
            "model": request.model,
            "prompt": list(request.prompt),
            **request.parameters(),
            "return_token_ids": True,
            **(logprobs if request.with_logprobs else {}),
        }
        answer = await self.request("POST", f"{self.endpoint.url}/completions", body)
        return self.parse(answer, request)

    async def generate(self, request: CompletionRequest) -> Completion:
        """Return a completion, requested through vLLM's own API for tokens, in which a server
        reports the weights that sampled each token."""
        settings = request.parameters()
        settings |= {"detokenize": False, "logprobs": 0 if request.with_logprobs else None}
        body = {
            "model": request.model,
            "token_ids": list(request.prompt),
            "sampling_params": settings,
            **({"request_id": request.name} if request.name else {}),
        }
        answer = await self.request("POST", f"{self.endpoint.root}/inference/v1/generate", body)
        try:
            (choice,) = answer["choices"]
            content = (choice.get("logprobs") or {}).get("content") or []
            choice["logprobs"] = {"token_logprobs": [each["logprob"] for each in content]}
            spans = tuple(
                (s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{self.endpoint.url} did not return a completion with the "
                f"versions of its weights: {str(answer)[:200]}"
            ) from error
        completion = self.parse(answer, request)
        ends = [0, *(end for _, _, end in spans)]
        if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != len(completion.token_ids):
            raise ArtifactError(
                f"{self.endpoint.url} does not report the version of the weights for every token: "
                f"{spans} of {len(completion.token_ids)}"
            )
        return replace(completion, versions=spans)

    async def stop(self, names: Sequence[str]) -> None:
        """Stop the completions of `generate` with these names: they return their tokens so far. A
        completion that the server has not begun yet is not stopped."""
        ids = [f"generate-tokens-{name}" for name in names]
        url = f"{self.endpoint.root}/abort_requests"
        await self.request("POST", url, {"request_ids": ids}, QUICK_SECONDS)

    def parse(self, answer: Any, request: CompletionRequest) -> Completion:
        """Return the completion in a response. Raise ArtifactError if it does not match the
        request, and Unavailable for an unexpected finish reason."""
        try:
            (choice,) = answer["choices"]
            token_ids = choice.get("token_ids")
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs", [])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{self.endpoint.url} did not return a completion: {str(answer)[:200]}"
            ) from error
        if token_ids is None or (request.with_logprobs and len(token_ids) != len(logprobs)):
            raise ArtifactError(
                f"{self.endpoint.url} returns no token ids with their log-probabilities "
                "(return_token_ids, logprobs): use vLLM, or another server that supports them"
            )
        if choice.get("prompt_token_ids") not in (None, list(request.prompt)):
            raise ArtifactError(
                f"{self.endpoint.url} did not use the prompt tokens of the request: turn off its "
                "truncation of prompts"
            )
        if choice["finish_reason"] not in ("stop", "length", *(("abort",) if request.name else ())):
            raise Unavailable(
                f"{self.endpoint.url} ended a completion with {choice['finish_reason']!r}"
            )
        return Completion(
            token_ids,
            logprobs,
            choice["finish_reason"],
            str(answer.get("system_fingerprint") or "unknown"),
        )


def is_healthy(endpoint: Endpoint) -> bool:
    """Return whether a server reports that it is healthy. It may accept connections earlier."""

    async def ask() -> None:
        async with Connection(endpoint, HEALTH_SECONDS) as connection:
            await connection.text(f"{endpoint.root}/health")

    try:
        asyncio.run(ask())
    except (Unavailable, ArtifactError):
        return False
    return True
