"""Prompts that are chat messages: checked here, kept as they are, and rendered by the policy's own
template later.

The `prompt` of such a row is the question in plain text: all messages except the system's.
Duplicates are found by it, so the same question with another system message, or with none, is a
duplicate. Left out: tools, images."""

from typing import Any

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant")


def messages_of(value: list[Any]) -> list[dict[str, str]] | str:
    """Return the messages with `role` and `content` only, or a text that says why they are not a
    prompt."""
    messages: list[dict[str, str]] = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"message {number} has no role of {', '.join(ROLES)}"
        if message.get("tool_calls"):
            return f"message {number} calls tools"
        content = text_of(message.get("content"))
        if content is None:
            return f"message {number} is not text"
        messages.append({"role": message["role"], "content": content})
    if not messages or messages[-1]["role"] != "user":
        return "the last message is not the user's"
    return messages


def text_of(content: Any) -> str | None:
    """Return the text of a message, joined if it is given in parts; None if a part is not text."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def asked(messages: list[dict[str, str]]) -> str:
    """Return the question: the text of all messages except the system's."""
    return "\n\n".join(message["content"] for message in messages if message["role"] not in SYSTEM)


def flattened(messages: list[dict[str, str]]) -> str:
    """Return the text of all messages."""
    return "\n\n".join(message["content"] for message in messages)
