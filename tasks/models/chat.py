"""The rendering of a policy's chat template, in a process that can be killed.

A template comes with the policy and is a program: it can loop, or allocate all memory. It runs in
jinja's sandbox, in the process of a pool (tasks/common/processes/pool.py), under the limits below.

The rollout store's key contains a digest of the rendered prompt, so rendering must not change from
day to day: a template that prints today's date always gets the same date."""

import datetime
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from tasks.common.files import ArtifactError
from tasks.common.processes import pool_worker
from tasks.common.processes.pool import Died, Pool, TimedOut

DATE = datetime.date(2024, 7, 26)  # the default of Llama 3's templates
SECONDS = 5.0  # limit on the CPU time of one conversation
CLOCK_FACTOR = 20.0
MEMORY_GB = 2
MAX_AT_ONCE = 1024  # conversations per request
MAX_CHARACTERS = 10_000_000  # maximum length of a rendered conversation

Conversation = tuple[Sequence[Mapping[str, Any]], bool]
"""Messages, and whether to add the beginning of the policy's turn."""


class TemplateFailed(ArtifactError):
    """Raised if the template fails to render conversation `number`; the message has the reason."""

    number = 0


class Template:
    """The chat template `text` with the tokenizer's special tokens. Its process starts at the first
    use."""

    def __init__(self, text: str, special_tokens: Mapping[str, Any]) -> None:
        configuration = {
            "template": text,
            "special_tokens": dict(special_tokens),
            "memory": MEMORY_GB << 30,
        }
        self.pool = Pool("tasks.models.chat", configuration, 1, SECONDS, CLOCK_FACTOR)
        weakref.finalize(self, self.pool.close)

    def render(self, conversations: Sequence[Conversation]) -> Iterator[str | TemplateFailed]:
        """Yield the text of every conversation, or the template's failure. Conversations are
        rendered lazily in chunks of increasing size, starting with one: a caller that stops at the
        first failure waits for few renderings."""
        start, size = 0, 1
        while start < len(conversations):
            chunk = [list(one) for one in conversations[start : start + size]]
            yield from map(in_words, self.pool.map(chunk))
            start, size = start + size, min(2 * size, MAX_AT_ONCE)


def in_words(reply: Any) -> str | TemplateFailed:
    """Return the rendered text in a reply of the process, or a description of the failure."""
    if isinstance(reply, TimedOut):
        return TemplateFailed(f"the policy's chat template ran for more than {SECONDS:g} s on it")
    if isinstance(reply, Died):
        return TemplateFailed(f"the policy's chat template ended its process: {reply}")
    text, failure = reply
    return str(text) if failure is None else TemplateFailed(f"the policy's chat template {failure}")


def prepare(configuration: Any) -> tuple[dict[str, Any], pool_worker.Answer]:
    """Return the handshake's reply, and the function that answers requests. The workers compile the
    template, because they run under limits."""
    template, tokens = configuration["template"], configuration["special_tokens"]
    return {}, lambda request: answer(template, tokens, *request)


def answer(
    template: str, tokens: Mapping[str, Any], messages: Any, add_generation_prompt: bool
) -> list[str | None]:
    """Render a conversation. Return [text, None], or [None, the reason for the failure]."""
    try:
        texts: Any = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **{**tokens, "strftime_now": DATE.strftime},
        )[0]
    except TemplateSyntaxError as error:
        return [None, f"is not a valid template: {error.message} (line {error.lineno})"]
    except TemplateError as error:
        return [None, f"refuses it: {error}"]
    except MemoryError:
        return [None, f"needs more than {pool_worker.memory_gb():.3g} GB of memory for it"]
    except Exception as error:  # any exception here is the template's fault
        return [None, f"fails on it: {type(error).__name__}: {error}"]
    text = str(texts[0])
    if len(text) > MAX_CHARACTERS:
        return [None, f"makes {len(text):,} characters of it; the limit is {MAX_CHARACTERS:,}"]
    return [text, None]


if __name__ == "__main__":
    pool_worker.run(prepare)
