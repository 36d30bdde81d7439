"""Verdicts of a language model behind a server, for the verifier `judge`.

Requests run in parallel through the `openai` client, which retries failed requests. They are
asyncio tasks, not threads, so that an interrupt cancels a request that gets no response. Every
verdict but `error` is stored in a database file as soon as it arrives, so a stage that runs again
judges only the answers without a stored verdict. Each row has a checksum: a damaged row counts as
missing, and a damaged file is an error."""

import asyncio
import json
import logging
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

from tasks.common.files import ArtifactError, digest, make_private_file
from tasks.common.params import ParamsError, above_zero, at_least, parse
from tasks.common.redaction import has_credentials
from tasks.grading.verdict import Verdict
from tasks.grading.verifiers.judge import Settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25  # between two calls of `on_done`, which may cancel the requests
ATTEMPTS = 6  # of a request, with about 15 seconds between the first and the last
PASSING = (408, 409, 429)  # statuses after which the client retries, besides 500 and above
AGAIN = "Verdicts so far are stored: correct this, and run again"
PLACES = re.compile(r"\{(completion|gold)\}")
MAX_REASON = 300  # characters of a reply that are shown in a message
CREATE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, value TEXT)"

Judged = tuple[Verdict, int]  # a verdict and its cost in tokens


class VerdictStore:
    """Verdicts by key, in a database file that several processes may share."""

    def __init__(self, path: Path) -> None:
        make_private_file(path)
        self.path = path
        with self.connect() as database, database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute(CREATE)

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for the block. Raise ArtifactError if the file is not a database."""
        try:
            with closing(sqlite3.connect(self.path, timeout=60.0)) as database:
                yield database
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # locked, or the disk is full
                raise
            raise ArtifactError(
                f"{self.path}, the file with the verdicts of judges, is damaged ({error}): delete "
                "it, and run the same command again; the answers are judged again"
            ) from error

    def get(self, keys: Sequence[str]) -> dict[str, Judged]:
        """Return the stored verdicts and token counts by key, without missing or damaged ones."""
        found: dict[str, Judged] = {}
        with self.connect() as database:
            for key in keys:
                row = database.execute("SELECT value FROM verdicts WHERE key = ?", [key]).fetchone()
                judged = row and self.checked(key, row[0])
                if judged:
                    found[key] = judged
        return found

    def checked(self, key: str, value: str) -> Judged | None:
        """Return the verdict and tokens in a row; None, with a warning, if the checksum differs."""
        try:
            *verdict, tokens, checksum = json.loads(value)
            if checksum == digest([key, *verdict, tokens]):
                return Verdict(*verdict), tokens
        except (ValueError, TypeError):
            pass
        logger.warning(
            "a verdict in %s is damaged or of an earlier version: its answer is judged again",
            self.path,
        )
        return None

    def put(self, key: str, verdict: Verdict, tokens: int) -> None:
        """Store a verdict and its cost in tokens, in place of an earlier one with this key."""
        fields = [verdict.outcome, verdict.answer, verdict.partial, tokens]
        value = json.dumps([*fields, digest([key, *fields])])
        with self.connect() as database, database:
            database.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", [key, value])


class Judge:
    """One configured judge. The constructor raises ParamsError for invalid settings."""

    def __init__(self, name: str, configured: Mapping[str, Any], store: VerdictStore) -> None:
        where = f"verify.verifiers.{name}"
        values = {key: value for key, value in configured.items() if key != "method"}
        self.settings = parse(values, Settings, where)
        self.store = store
        self.flops = 0.0  # of new and of reused verdicts, once per answer
        check(self.settings, where)
        variable = self.settings.key_variable
        self.key = os.environ.get(variable) if variable else None
        if variable and not self.key:
            raise ParamsError(
                f"{where}.key_variable: the environment variable {variable} is not set; put the "
                "API key there"
            )
        # no environment variable is sent except the one named by `key_variable`
        names = ["OpenAI-Organization", "OpenAI-Project", *([] if self.key else ["Authorization"])]
        self.headers: Any = {name: openai.Omit() for name in names}

    def identity(self) -> list[Any]:
        """Return the settings that can change a verdict, such as the model, but not the URL."""
        s = self.settings
        return [s.model, s.template, s.right, s.wrong, s.votes, s.temperature, s.max_tokens]

    def grade(
        self, answers: Sequence[tuple[str, str]], on_done: Callable[[int], object]
    ) -> list[Verdict]:
        """Return the verdict on each (completion, gold), stored or new. Raise ArtifactError if the
        server is unreachable, rejects a request or sends no chat completion."""
        keys = [digest([*self.identity(), *answer]) for answer in answers]
        counts = Counter(keys)
        known = self.store.get(list(counts))
        on_done(sum(key in known for key in keys))
        missing = {
            key: answer for key, answer in zip(keys, answers, strict=True) if key not in known
        }

        def add(key: str, verdict: Verdict, tokens: int) -> None:
            known[key] = verdict, tokens
            if verdict.outcome != "error":
                self.store.put(key, verdict, tokens)
            on_done(counts[key])

        asyncio.run(self.judge_all(missing, add, lambda: on_done(0)))
        tokens = sum(known[key][1] for key in keys)
        self.flops += 2.0 * self.settings.parameters * 1e9 * tokens
        return [known[key][0] for key in keys]

    async def judge_all(
        self,
        answers: Mapping[str, tuple[str, str]],
        add: Callable[[str, Verdict, int], object],
        on_wait: Callable[[], object],
    ) -> None:
        """Judge the answers (completion, gold), `concurrency` at a time, and call `add` with the
        key, verdict and tokens of each. Call `on_wait` several times a second. An error in a
        request, in `add` or in `on_wait` cancels all requests."""
        s = self.settings
        waiting = iter(answers.items())

        async def work() -> None:
            for key, answer in waiting:
                add(key, *await self.judge(client, *answer))

        async with openai.AsyncOpenAI(
            base_url=s.url,
            api_key=self.key or "none",
            timeout=s.seconds,
            max_retries=ATTEMPTS - 1,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
        ) as client:
            workers = [asyncio.create_task(work()) for _ in range(min(s.concurrency, len(answers)))]
            running = set(workers)
            try:
                while running:
                    done, running = await asyncio.wait(
                        running, timeout=POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                    )
                    for worker in done:
                        worker.result()
                    on_wait()
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def judge(self, client: openai.AsyncOpenAI, completion: str, gold: str) -> Judged:
        """Return the majority verdict on one answer, and its tokens; without votes, an `error`."""
        s = self.settings
        texts = {"completion": completion, "gold": gold}
        question = PLACES.sub(lambda found: texts[found[1]], s.template)
        try:
            reply = await client.chat.completions.create(
                model=s.model,
                messages=[{"role": "user", "content": question}],
                n=s.votes,
                temperature=s.temperature,
                max_tokens=s.max_tokens,
                extra_headers=self.headers,
            )
        except ValueError as error:  # a body that is not JSON
            raise ArtifactError(f"{s.url} sent no chat completion: {error}") from error
        except openai.APIStatusError as error:
            passing = error.status_code in PASSING or error.status_code >= 500
            what = f"failed {ATTEMPTS} times, last with" if passing else "refused:"
            raise ArtifactError(
                f"the judge at {s.url} {what} status {error.status_code}: "
                f"{error.response.text[:200]}. {AGAIN}"
            ) from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise ArtifactError(
                f"the judge at {s.url} failed {ATTEMPTS} times, last with {type(cause).__name__}: "
                f"{cause}. {AGAIN}"
            ) from error
        try:
            replies = [choice.message.content or "" for choice in reply.choices]
            tokens = int(reply.usage.total_tokens or 0) if reply.usage else 0
            first = replies[0]
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ArtifactError(f"{s.url} sent no chat completion: {str(reply)[:200]}") from error
        votes = [vote for vote in map(self.vote, replies) if vote is not None]
        if not votes:
            return Verdict("error", f"the judge did not vote: {first[-MAX_REASON:]!r}"), tokens
        share = sum(votes) / len(votes)
        outcome = "correct" if share > 0.5 else "wrong"
        return Verdict(outcome, first[-MAX_REASON:], share), tokens

    def vote(self, reply: str) -> bool | None:
        """Return whether the last vote in a reply is the word `right`; None without a vote."""
        right, wrong = map(re.escape, (self.settings.right, self.settings.wrong))
        words = list(re.finditer(rf"(?<!\w)(?:(?P<right>{right})|{wrong})(?!\w)", reply))
        return words[-1]["right"] is not None if words else None


def check(settings: Settings, where: str) -> None:
    """Raise ParamsError for values out of range, and for a secret in a setting that is recorded."""
    if has_credentials(settings.url) or urlsplit(settings.url).query:
        raise ParamsError(
            f"{where}.url contains credentials or a query: name the environment variable with the "
            "API key in key_variable instead"
        )
    if not {"completion", "gold"} <= set(PLACES.findall(settings.template)):
        raise ParamsError(f"{where}.template must contain {{completion}} and {{gold}}")
    if not settings.right or not settings.wrong or settings.right == settings.wrong:
        raise ParamsError(f"{where}.right and {where}.wrong must be two different words")
    counts = ("votes", "max_tokens", "concurrency")
    at_least(1, **{f"{where}.{name}": getattr(settings, name) for name in counts})
    sizes = ("seconds", "parameters")
    above_zero(**{f"{where}.{name}": getattr(settings, name) for name in sizes})
