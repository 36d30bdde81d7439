"""Text to token ids and back: prompts for the policy, completions for verifiers.

Plain text is encoded as it is; chat messages are rendered by the policy's own chat template. What
users' text spells of the policy's special tokens stays text (`literal`)."""

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError
from tasks.models.chat import Conversation, Template, TemplateFailed
from tasks.models.literal import encode_marked, mark_for, marked
from tasks.models.policy import Policy

# a conversation with the end of a turn of each side, and the beginning of the next
SHORT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3"},
]
templates: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, Template] = (
    weakref.WeakKeyDictionary()
)


def template_of(tokenizer: PreTrainedTokenizerBase) -> Template:
    """The chat template of a tokenizer. Raises TemplateFailed when it has none."""
    if tokenizer.chat_template is None:
        raise TemplateFailed(
            "it is chat messages, and the policy has no chat template: set prompt_template of its "
            'entry in `ingest.sources` (such as "{prompt}") to make it plain text, or use a policy '
            "with a template"
        )
    if tokenizer not in templates:
        try:
            text = tokenizer.get_chat_template()
        except ValueError as error:
            raise TemplateFailed(f"the policy's chat template cannot be chosen: {error}") from error
        templates[tokenizer] = Template(text, tokenizer.special_tokens_map)
    return templates[tokenizer]


def encode_chats(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Return the token ids of conversations, rendered by the policy's chat template. Raises
    TemplateFailed with the number of the first that cannot be rendered."""
    encoded, template = [], template_of(tokenizer)
    marks = [mark_of([one["content"] for one in turns], tokenizer) for turns, _ in conversations]
    pairs = zip(conversations, marks, strict=True)
    safe = [(with_mark(turns, tokenizer, mark), begins) for (turns, begins), mark in pairs]
    for number, text in enumerate(template.render(safe)):
        if isinstance(text, TemplateFailed):
            text.number = number
            raise text
        encoded.append(encode_marked(text, tokenizer, marks[number], add_special_tokens=False))
    return encoded


def mark_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """As `literal.mark_for`, for the policy's own chat template, if it has one."""

    def turns() -> str:
        if tokenizer.chat_template is None:
            return ""
        (text,) = template_of(tokenizer).render([(SHORT, False)])
        return text if isinstance(text, str) else ""

    return mark_for(texts, tokenizer, turns)


def with_mark(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, mark: str | None
) -> Sequence[Mapping[str, Any]]:
    """The messages with `mark` where their text spells special tokens."""
    if mark is None:
        return messages
    return [{**one, "content": marked(one["content"], tokenizer, mark)} for one in messages]


def encode_plain(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Return the token ids of plain text. `template` is what was put around it and may have special
    tokens of its own."""
    before, _, after = (template or "{prompt}").partition("{prompt}")
    if not (text.startswith(before) and text.endswith(after)):
        before = after = ""
    asked = text[len(before) : len(text) - len(after)]
    mark = mark_of([asked], tokenizer)
    if mark is not None:
        text = before + marked(asked, tokenizer, mark) + after
    return encode_marked(text, tokenizer, mark, add_special_tokens=add_special_tokens)


def render_reply(
    text: str, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], *, is_chat: bool
) -> list[int]:
    """Return the token ids that follow a finished turn of the policy: the reply `text`, and what
    begins the next turn. Plain text as it is; in a chat as the template has a user's message after
    an assistant's, which is read off a conversation of its own: some templates change earlier turns
    when they render again. `stop_ids` are the tokens that end a turn.

    Raises ArtifactError for a template that rewrites the turn before a reply, or ends none."""
    if not is_chat:
        return encode_plain(text, tokenizer, add_special_tokens=False)
    question = [{"role": "user", "content": "1"}]
    turn = [*question, {"role": "assistant", "content": "2"}]
    reply = [*turn, {"role": "user", "content": text}]
    asked, finished, whole = encode_chats(
        [(question, True), (turn, False), (reply, True)], tokenizer
    )
    # what the template writes after the stop token of the policy's turn belongs to the reply
    pairs = enumerate(zip(asked, finished, strict=False))
    begin = next((place for place, (a, b) in pairs if a != b), min(len(asked), len(finished)))
    stops = [n for n in range(begin, len(finished)) if finished[n] in stop_ids]
    if not stops:
        raise ArtifactError(
            "the policy's chat template ends an assistant's turn with no token that ends a "
            "completion (eos_token_id of the tokenizer and of generation_config.json): turns "
            "cannot be told apart"
        )
    end = stops[0] + 1
    if whole[:end] != finished[:end]:
        raise ArtifactError(
            "the policy's chat template changes a finished turn when a reply follows it, so the "
            "conversation that is sampled would not be the one that is trained on: use another "
            "template for several turns"
        )
    return whole[end:]


def encode_prompts(
    prompts: pl.DataFrame, tokenizer: PreTrainedTokenizerBase, policy: Policy, room: int
) -> list[list[int]]:
    """Return the token ids of every prompt, chat messages rendered by the policy's template. Raises
    ArtifactError naming the first prompt that cannot be rendered, or the shortest that leaves no
    room for `room` more tokens."""
    chat = prompts.filter(pl.col("messages").is_not_null())
    rendered = iter(encode_messages(chat, tokenizer))
    encoded = [
        encode_plain(text, tokenizer, template) if messages is None else next(rendered)
        for text, messages, template in prompts.select("prompt", "messages", "template").iter_rows()
    ]
    bad = [row for row, ids in enumerate(encoded) if not ids or len(ids) + room > policy.max_length]
    if bad:
        row = min(bad, key=lambda row: len(encoded[row]))
        raise ArtifactError(
            f"prompt {prompts['prompt_id'][row]} has {len(encoded[row])} tokens, and with "
            f"sampling.max_tokens {room} that does not fit the policy's context of "
            f"{policy.max_length} ({len(bad)} of {len(encoded)} prompts do not fit): set "
            f"ingest.max_prompt_characters below its {len(prompts['prompt'][row])}, or lower "
            "sampling.max_tokens"
        )
    return encoded


def encode_messages(prompts: pl.DataFrame, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of prompts that are all chat messages, as `encode_prompts`."""
    if prompts.is_empty():
        return []
    try:
        encoded = encode_chats([(json.loads(one), True) for one in prompts["messages"]], tokenizer)
    except TemplateFailed as error:
        raise ArtifactError(f"prompt {prompts['prompt_id'][error.number]}: {error}") from error
    finally:
        if tokenizer in templates:
            templates[tokenizer].close()  # the next prompts are asked for much later
    return encoded


def decode(
    token_ids: Sequence[Sequence[int]],
    finish_reasons: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Return the text of each completion, without the token that ended it and without other special
    tokens."""
    bodies = [
        list(ids[:-1] if reason == "stop" else ids)
        for ids, reason in zip(token_ids, finish_reasons, strict=True)
    ]
    return list(tokenizer.batch_decode(bodies, skip_special_tokens=True))
