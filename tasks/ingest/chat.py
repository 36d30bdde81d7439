"""Prompts that are chat messages: checked here, kept as they are, and rendered by the policy's own
template later.

`prompt` of such a row is what is asked, in plain text (all messages but the system's): duplicates
are found by it, so the same question with another system message, or without any, is the same
question. Left out: tools, images."""

from typing import Any

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant")


def messages_of(value: list[Any]) -> list[dict[str, str]] | str:
    """The messages, each with `role` and `content` alone; or, in words, why they are no prompt."""
    messages = []
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
    """The text of a message, also one given in parts; None when a part is something else."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def asked(messages: list[dict[str, str]]) -> str:
    """What is asked, without the system's words."""
    return "\n\n".join(message["content"] for message in messages if message["role"] not in SYSTEM)


def flattened(messages: list[dict[str, str]]) -> str:
    """Everything that is said, as plain text."""
    return "\n\n".join(message["content"] for message in messages)
