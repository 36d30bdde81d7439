"""A client of one OpenAI-compatible server, over HTTP or a Unix socket: its models, and completions
by token ids.

vLLM's additions to the protocol are needed: prompts and completions as token ids, a seed per
completion, log-probabilities of the distribution sampled from. A server without them is refused
with an error that says what is missing. The key comes from OPENAI_API_KEY, and no message contains
it."""

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
QUICK_SECONDS = 30.0  # for what costs a server nothing
MAX_MESSAGE = 500  # characters of a server's own message in an error
# statuses that may pass: another server, or the same one later, may answer
RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Endpoint:
    """The address of a server. With `socket`, the URL is only its name. `key` is that of a server
    started here, of a run; other servers get the user's. `name` tells a server that was started
    again from the one before, which may have had the same address."""

    url: str
    socket: Path | None = None
    name: str = ""
    key: str | None = field(default=None, repr=False)

    @property
    def root(self) -> str:
        """The URL under which vLLM has the routes that are not OpenAI's."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class Completion:
    """One completion as a server returned it; `cached_tokens` of the prompt came from its cache.
    `versions` says which weights wrote which tokens, where the server says so: their name, and
    where its tokens begin and end."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    cached_tokens: int
    versions: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Wanted:
    """A completion that is asked for, of the model of this name; it ends at `stop_ids`. One with a
    `name` may be stopped, and then ends with the finish reason "abort"."""

    model: str
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    stop_ids: Sequence[int]
    with_logprobs: bool = True
    name: str = ""

    def parameters(self) -> dict[str, Any]:
        """Every setting of it that a server may have its own default for."""
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
    """An open connection to an endpoint; use as an asynchronous context manager."""

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
        """Return the JSON response. Raises Unavailable for failures that may pass, such as no
        answer in `seconds`, ArtifactError with the server's message for the rest."""
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
        """Return the response as text; raises as `request` does."""
        limit = aiohttp.ClientTimeout(min(seconds, self.seconds), sock_connect=CONNECT_SECONDS)
        try:
            async with self.session.request(
                method, url, json=body, allow_redirects=False, timeout=limit
            ) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = (
                "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
            )
            raise Unavailable(f"{self.endpoint.url} is not there ({reason})") from error
        if response.status == 200:
            return text
        message = f"{url} answers {response.status}: {self.without_key(text)[:MAX_MESSAGE]}"
        if response.status in RETRYABLE:
            raise Unavailable(message)
        if response.status in (401, 403):
            raise ArtifactError(
                f"{message} (the key is taken from the environment variable OPENAI_API_KEY)"
            )
        raise ArtifactError(message)

    def without_key(self, text: str) -> str:
        """Return `text` with the key blotted out."""
        return text.replace(self.key, "***") if self.key else text

    async def models(self) -> list[dict[str, Any]]:
        """Return the models that are served: `id`, and with vLLM `max_model_len`."""
        url = f"{self.endpoint.url}/models"
        answer = await self.request("GET", url, seconds=QUICK_SECONDS)
        if not isinstance(answer, dict) or not answer.get("data"):
            raise ArtifactError(
                f"{self.endpoint.url}/models lists no model: check that it is an OpenAI-compatible "
                "API"
            )
        return list(answer["data"])

    async def is_alive(self) -> bool:
        """Whether the server answers on a route that costs it nothing."""
        try:
            await self.models()
        except Unavailable:
            return False
        return True

    async def complete(self, wanted: Wanted) -> tuple[Completion, str]:
        """Return a completion, and the server's fingerprint (its kind and version), by OpenAI's
        protocol."""
        logprobs = {"logprobs": 0, "return_tokens_as_token_ids": True}
        body = {
            "model": wanted.model,
            "prompt": list(wanted.prompt),
            **wanted.parameters(),
            "return_token_ids": True,
            **(logprobs if wanted.with_logprobs else {}),
        }
        answer = await self.request("POST", f"{self.endpoint.url}/completions", body)
        completion = self.parse(answer, wanted)
        return completion, str(answer.get("system_fingerprint") or "unknown")

    async def generate(self, wanted: Wanted) -> Completion:
        """Return a completion by vLLM's own protocol for tokens, in which a server says what
        weights wrote each of them."""
        settings = wanted.parameters()
        settings |= {"detokenize": False, "logprobs": 0 if wanted.with_logprobs else None}
        body = {
            "model": wanted.model,
            "token_ids": list(wanted.prompt),
            "sampling_params": settings,
            **({"request_id": wanted.name} if wanted.name else {}),
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
                f"{self.endpoint.url} answers with something that is not a completion with the "
                f"versions of its weights: {str(answer)[:200]}"
            ) from error
        completion = self.parse(answer, wanted)
        ends = [0, *(end for _, _, end in spans)]
        if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != len(completion.token_ids):
            raise ArtifactError(
                f"{self.endpoint.url} does not say of every token which weights wrote it: "
                f"{spans} of {len(completion.token_ids)}"
            )
        return replace(completion, versions=spans)

    async def stop(self, names: Sequence[str]) -> None:
        """End completions that were asked for by `generate` with these names: they return what was
        written of them. One that the server has not begun is not found, and goes on."""
        ids = [f"generate-tokens-{name}" for name in names]
        url = f"{self.endpoint.root}/abort_requests"
        await self.request("POST", url, {"request_ids": ids}, QUICK_SECONDS)

    def parse(self, answer: Any, wanted: Wanted) -> Completion:
        """Return the completion in a response. Raises ArtifactError when it is not what was asked
        for."""
        try:
            (choice,) = answer["choices"]
            token_ids = choice.get("token_ids")
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs", [])
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{self.endpoint.url} answers with something that is not a completion: "
                f"{str(answer)[:200]}"
            ) from error
        if token_ids is None or (wanted.with_logprobs and len(token_ids) != len(logprobs)):
            raise ArtifactError(
                f"{self.endpoint.url} returns no token ids with their log-probabilities "
                "(return_token_ids, logprobs): use vLLM, or another server that supports them"
            )
        if choice.get("prompt_token_ids") not in (None, list(wanted.prompt)):
            raise ArtifactError(
                f"{self.endpoint.url} did not use the prompt tokens that it was sent: turn off its "
                "truncation of prompts"
            )
        if choice["finish_reason"] not in ("stop", "length", *(("abort",) if wanted.name else ())):
            raise Unavailable(
                f"{self.endpoint.url} ended a completion with {choice['finish_reason']!r}"
            )
        return Completion(
            token_ids, logprobs, choice["finish_reason"], int(details.get("cached_tokens") or 0)
        )
