"""Chat-message prompts: validated here, and rendered later with the policy's chat template.

The `prompt` of such a row is the text of all messages except system messages. Unless the source has
the bare question, duplicates are found by this text, so the same question with another system
message, or none, is a duplicate. Messages may use `from` and `value` instead of `role` and
`content`. An empty last assistant turn, a placeholder for the answer, is dropped. Not supported:
tools, images."""

from typing import Any

from tasks.ingest.fields import Unusable
from tasks.ingest.settings import Source

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant")
SPEAKERS = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
"""The role of each speaker that has another name in the field `from`."""


def messages_of(value: list[Any]) -> list[dict[str, str]]:
    """Return roles and contents. Raise Unusable if any is invalid, or the last not by `user`."""
    messages: list[dict[str, str]] = []
    value = [renamed(message) for message in value]
    if len(value) > 1 and is_waiting(value[-1]):
        value = value[:-1]
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise Unusable(f"message {number} has no role of {', '.join(ROLES)}")
        if message.get("tool_calls"):
            raise Unusable(f"message {number} calls tools")
        content = text_of(message.get("content"))
        if content is None:
            raise Unusable(f"message {number} is not text")
        messages.append({"role": message["role"], "content": content})
    if not messages or messages[-1]["role"] != "user":
        raise Unusable("the last message is not the user's")
    return messages


def renamed(message: Any) -> Any:
    """Return a message with `from` and `value` renamed to `role` and `content`, if present."""
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    speaker = message["from"]
    role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    return {**message, "role": role, "content": message.get("value")}


def is_waiting(message: Any) -> bool:
    """Return whether a message is an empty assistant turn, which is a placeholder."""
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and not message.get("content")
        and not message.get("tool_calls")
    )


def text_of(content: Any) -> str | None:
    """Return the text of a message, with its parts joined; None if a part is not text."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def question(messages: list[dict[str, str]]) -> str:
    """Return the question: the text of all messages except system messages."""
    return "\n\n".join(message["content"] for message in messages if message["role"] not in SYSTEM)


def led(messages: list[dict[str, str]], source: Source) -> list[dict[str, str]]:
    """Return the messages behind the source's system message, if any, and its shots."""
    system = [one for one in messages if one["role"] in SYSTEM]
    if source.system is not None:
        system = [{"role": "system", "content": source.system}]
    shots = [
        {"role": role, "content": content}
        for shot in source.shots or ()
        for role, content in (("user", shot.prompt), ("assistant", shot.completion))
    ]
    return [*system, *shots, *(one for one in messages if one["role"] not in SYSTEM)]


def flattened(messages: list[dict[str, str]]) -> str:
    """Return the text of all messages."""
    return "\n\n".join(message["content"] for message in messages)
