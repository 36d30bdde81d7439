"""One OpenAI-compatible server, spoken to over HTTP or a Unix socket: its models, and completions
by token ids.

vLLM's additions to the protocol are needed: prompts and completions as token ids, seeds of samples,
log-probabilities of the distribution drawn from. What another server leaves out is an error that
says what is missing. The key comes from OPENAI_API_KEY, and no message holds it."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from tasks.common.files import ArtifactError
from tasks.engines.engine import Sampling
from tasks.engines.server.dispatch import Unavailable

CONNECT_SECONDS = 10.0
MAX_MESSAGE = 500  # characters of a server's own words in an error
PATIENCE = {408, 409, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Endpoint:
    """Where a server is. With `socket` the URL only names it."""

    url: str
    socket: Path | None = None


@dataclass(frozen=True)
class Completion:
    """One sample as a server returned it; `cached_tokens` of the prompt were not computed again."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    cached_tokens: int


def parse_url(url: str) -> str:
    """The base URL of a server's API, `http://host:8000/v1`. Raises ArtifactError for what cannot
    be one."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ArtifactError(
            "an entry of engine.urls holds credentials or a query: the key goes into OPENAI_API_KEY"
        )
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ArtifactError(
            f"engine.urls has {url!r}, which is not a URL like http://127.0.0.1:8000/v1"
        )
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1"))


class Connection:
    """An open line to an endpoint; use as an asynchronous context manager."""

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self.endpoint, self.key = endpoint, os.environ.get("OPENAI_API_KEY", "")
        connector = (
            aiohttp.UnixConnector(str(endpoint.socket), limit=0) if endpoint.socket else None
        )
        # a replica is ours and has no key, so ours must not be sent to it
        headers = (
            {"Authorization": f"Bearer {self.key}"} if self.key and endpoint.socket is None else {}
        )
        self.session = aiohttp.ClientSession(
            connector=connector or aiohttp.TCPConnector(limit=0),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
        )

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def request(self, method: str, url: str, body: Any = None) -> Any:
        """The JSON answer. Raises Unavailable for what may pass, ArtifactError with the server's
        words for the rest."""
        words = await self.text(url, method, body)
        try:
            return json.loads(words) if words else None
        except ValueError as error:
            raise ArtifactError(
                f"{url} answers with what is not JSON: is it an OpenAI-compatible API?"
            ) from error

    async def text(self, url: str, method: str = "GET", body: Any = None) -> str:
        """The answer as it is; raises as `request` does."""
        try:
            async with self.session.request(
                method, url, json=body, allow_redirects=False
            ) as response:
                words = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = (
                "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
            )
            raise Unavailable(f"{self.endpoint.url} is not there ({reason})") from error
        if response.status == 200:
            return words
        said = f"{url} answers {response.status}: {self.without_key(words)[:MAX_MESSAGE]}"
        if response.status in PATIENCE:
            raise Unavailable(said)
        if response.status in (401, 403):
            raise ArtifactError(
                f"{said} (the key is taken from the environment variable OPENAI_API_KEY)"
            )
        raise ArtifactError(said)

    def without_key(self, words: str) -> str:
        return words.replace(self.key, "***") if self.key else words

    async def models(self) -> list[dict[str, Any]]:
        """What the server serves: `id`, and with vLLM `max_model_len`."""
        answer = await self.request("GET", f"{self.endpoint.url}/models")
        if not isinstance(answer, dict) or not answer.get("data"):
            raise ArtifactError(
                f"{self.endpoint.url}/models lists no model: is it an OpenAI-compatible API?"
            )
        return list(answer["data"])

    async def complete(
        self,
        model: str,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        stop_ids: Sequence[int],
        with_logprobs: bool = True,
    ) -> tuple[Completion, str]:
        """One sample of `prompt`, and the server's fingerprint (its kind and version). Everything
        that a server may have a default of its own for is said."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "stop_token_ids": list(stop_ids),
            "ignore_eos": True,
            "return_token_ids": True,
            **({"logprobs": 0, "return_tokens_as_token_ids": True} if with_logprobs else {}),
        }
        answer = await self.request("POST", f"{self.endpoint.url}/completions", body)
        return self.read(answer, list(prompt), with_logprobs), str(
            answer.get("system_fingerprint") or "unknown"
        )

    def read(self, answer: Any, prompt: list[int], with_logprobs: bool) -> Completion:
        """The sample in an answer. Raises ArtifactError when it is not what was asked for."""
        try:
            (choice,) = answer["choices"]
            token_ids, logprobs = (
                choice.get("token_ids"),
                (choice.get("logprobs") or {}).get("token_logprobs", []),
            )
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{self.endpoint.url}: an answer is not a completion: {str(answer)[:200]}"
            ) from error
        if token_ids is None or (with_logprobs and len(token_ids) != len(logprobs)):
            raise ArtifactError(
                f"{self.endpoint.url} returns no token ids with their log-probabilities "
                "(return_token_ids, logprobs): "
                "the engine server needs vLLM's, or another server that has them"
            )
        if choice.get("prompt_token_ids") not in (None, prompt):
            raise ArtifactError(
                f"{self.endpoint.url} read other prompt tokens than it was sent: does it truncate?"
            )
        if choice["finish_reason"] not in ("stop", "length"):
            raise Unavailable(
                f"{self.endpoint.url} ended a completion with {choice['finish_reason']!r}"
            )
        return Completion(
            token_ids, logprobs, choice["finish_reason"], int(details.get("cached_tokens") or 0)
        )
