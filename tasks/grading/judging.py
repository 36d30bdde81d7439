"""Verdicts of a language model behind a server, for the verifier `judge`.

Requests run beside each other in threads; one that fails is tried again, later each time. Every
verdict is kept in a database file as soon as it is known, so a killed stage asks nothing twice, and
an unchanged one asks nothing at all."""

import json
import logging
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tasks.common.files import ArtifactError, digest, make_private_file
from tasks.common.params import ParamsError, parse
from tasks.common.redaction import has_credentials
from tasks.grading.verdict import JudgeUsage, Verdict
from tasks.grading.verifiers.judge import Settings

logger = logging.getLogger(__name__)

CREATE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, value TEXT)"
ATTEMPTS = 6
FIRST_PAUSE = 0.5  # seconds before another attempt, doubled each time
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
PLACES = re.compile(r"\{(completion|gold)\}")
MAX_REASON = 300  # characters of a reply that are shown


Judged = tuple[Verdict, int]  # with the tokens that it took


class VerdictStore:
    """Verdicts by key, in a database file that several processes may use."""

    def __init__(self, path: Path) -> None:
        make_private_file(path)
        self.path = path
        with self.connect() as database, database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, value TEXT)"
            )

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one use. Raises ArtifactError where the file is no database."""
        try:
            with closing(sqlite3.connect(self.path, timeout=60.0)) as database:
                yield database
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # locked, or the disk is full
                raise
            raise ArtifactError(
                f"{self.path}, which keeps the verdicts of judges, is damaged ({error}): delete "
                "it, and run the same command again: they are asked for again"
            ) from error

    def get(self, keys: Sequence[str]) -> dict[str, Judged]:
        """Return the verdicts that are known, with their tokens."""
        known: dict[str, Judged] = {}
        with self.connect() as database:
            for key in keys:
                row = database.execute("SELECT value FROM verdicts WHERE key = ?", [key]).fetchone()
                if row:
                    known |= self.kept(key, row[0])
        return known

    def kept(self, key: str, value: str) -> dict[str, Judged]:
        """Return the verdict in a row under its key; nothing where it is not what was written."""
        try:
            *verdict, tokens, checksum = json.loads(value)
            if checksum == digest([key, *verdict, tokens]):
                return {key: (Verdict(*verdict), tokens)}
        except (ValueError, TypeError):
            pass
        logger.warning(
            "a verdict in %s is damaged, or of an earlier version: it is asked for again", self.path
        )
        return {}

    def put(self, key: str, verdict: Verdict, tokens: int) -> None:
        """Keep a verdict."""
        said = [verdict.outcome, verdict.answer, verdict.partial, tokens]
        value = json.dumps([*said, digest([key, *said])])
        with self.connect() as database, database:
            database.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", [key, value])


class Judge:
    """One configured judge. Raises ParamsError for settings that make no sense."""

    def __init__(self, name: str, configured: Mapping[str, Any], store: VerdictStore) -> None:
        where = f"verify.verifiers.{name}"
        values = {key: value for key, value in configured.items() if key != "method"}
        self.settings = parse(values, Settings, where)
        self.store = store
        self.usage = JudgeUsage()
        check(self.settings, where)
        self.headers = {}
        if self.settings.key_variable:
            key = os.environ.get(self.settings.key_variable)
            if not key:
                raise ParamsError(
                    f"{where}.key_variable: the environment variable {self.settings.key_variable} "
                    "is not set; put the API key there"
                )
            self.headers["Authorization"] = f"Bearer {key}"

    def identity(self) -> list[Any]:
        """Return the settings that verdicts depend on: not the address, nor the limits."""
        s = self.settings
        return [s.model, s.template, s.right, s.wrong, s.votes, s.temperature, s.max_tokens]

    def grade(
        self, answers: Sequence[tuple[str, str]], on_done: Callable[[int], object]
    ) -> list[Verdict]:
        """Return the verdict on every (completion, gold). Raises ArtifactError when the server
        refuses or cannot be reached."""
        keys = [digest([*self.identity(), *answer]) for answer in answers]
        known = self.store.get(list(dict.fromkeys(keys)))
        self.count(0, sum(tokens for _, tokens in known.values()), len(known))
        on_done(sum(key in known for key in keys))
        asked = {key: answer for key, answer in zip(keys, answers, strict=True) if key not in known}
        seconds = self.settings.seconds
        with (
            httpx.Client(headers=self.headers, timeout=seconds) as client,
            ThreadPoolExecutor(self.settings.concurrency) as pool,
        ):
            futures = {pool.submit(self.ask, client, *answer): key for key, answer in asked.items()}
            try:
                for future in as_completed(futures):
                    key = futures[future]
                    known[key] = verdict, tokens = future.result()
                    self.count(1, tokens, 0)
                    if verdict.outcome != "error":
                        self.store.put(key, verdict, tokens)
                    on_done(keys.count(key))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [known[key][0] for key in keys]

    def count(self, requests: int, tokens: int, reused: int) -> None:
        """Count verdicts and what they cost."""
        flops = 2.0 * self.settings.parameters * 1e9 * tokens
        self.usage += JudgeUsage(requests, tokens, reused, flops)

    def ask(self, client: httpx.Client, completion: str, gold: str) -> Judged:
        """Return the majority of the votes on one answer, and the tokens."""
        s = self.settings
        texts = {"completion": completion, "gold": gold}
        question = PLACES.sub(lambda found: texts[found[1]], s.template)
        reply = self.post(
            client,
            {
                "model": s.model,
                "messages": [{"role": "user", "content": question}],
                "n": s.votes,
                "temperature": s.temperature,
                "max_tokens": s.max_tokens,
            },
        )
        try:
            texts_of = [choice["message"]["content"] or "" for choice in reply["choices"]]
            tokens = int((reply.get("usage") or {}).get("total_tokens") or 0)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{s.url} sent no chat completion: {str(reply)[:200]}") from error
        votes = [vote for vote in map(self.vote, texts_of) if vote is not None]
        if not votes:
            reason = f"the judge did not vote: {texts_of[0][-MAX_REASON:]!r}"
            return Verdict("error", reason), tokens
        share = sum(votes) / len(votes)
        outcome = "correct" if share > 0.5 else "wrong"
        return Verdict(outcome, texts_of[0][-MAX_REASON:], share), tokens

    def vote(self, reply: str) -> bool | None:
        """Return the vote in a reply: the last of the two words; None without either."""
        words = re.compile(
            rf"(?<!\w)(?:(?P<right>{re.escape(self.settings.right)})|"
            rf"{re.escape(self.settings.wrong)})(?!\w)"
        )
        last = None
        for last in words.finditer(reply):  # noqa: B007
            pass
        return None if last is None else last["right"] is not None

    def post(self, client: httpx.Client, body: dict[str, Any]) -> Any:
        """Return the server's reply; a failure that may pass is tried again."""
        url = f"{self.settings.url.rstrip('/')}/chat/completions"
        for attempt in range(ATTEMPTS):
            try:
                response = client.post(url, json=body)
                if response.status_code not in RETRIED:
                    break
                failure = f"status {response.status_code}: {response.text[:200]}"
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
            if attempt + 1 == ATTEMPTS:
                raise ArtifactError(
                    f"the judge at {url} failed {ATTEMPTS} times, last with {failure}. Verdicts so "
                    "far are kept: start the server, and run again"
                )
            time.sleep(FIRST_PAUSE * 2**attempt)
        if response.status_code != httpx.codes.OK:
            raise ArtifactError(
                f"the judge at {url} refused: status {response.status_code}: {response.text[:200]}"
            )
        return response.json()


def check(settings: Settings, where: str) -> None:
    """Raise ParamsError for values out of range, and for a secret where it would be recorded."""
    if has_credentials(settings.url) or urlsplit(settings.url).query:
        raise ParamsError(
            f"{where}.url contains credentials or a query: name the environment variable with the "
            "API key in key_variable instead"
        )
    if not {"completion", "gold"} <= set(PLACES.findall(settings.template)):
        raise ParamsError(f"{where}.template must contain {{completion}} and {{gold}}")
    if not settings.right or not settings.wrong or settings.right == settings.wrong:
        raise ParamsError(f"{where}.right and {where}.wrong must be two different words")
    for name in ("votes", "max_tokens", "concurrency"):
        if getattr(settings, name) < 1:
            raise ParamsError(f"{where}.{name} is {getattr(settings, name)}; it must be at least 1")
    for name in ("seconds", "parameters"):
        value = getattr(settings, name)
        if not 0 < value < math.inf:
            raise ParamsError(f"{where}.{name} is {value}; it must be above 0")
