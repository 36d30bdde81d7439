"""Text to token ids and back: prompts for the policy, completions for verifiers.

The policy's own chat template renders chat messages. A plain question becomes a user's message if
the policy has such a template and the question's source has no template. Otherwise it is encoded as
plain text. User text that spells special tokens is encoded as text (`literal`)."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError
from tasks.models.chat import Conversation, Template, TemplateFailed
from tasks.models.literal import encode_marked, mark_for, marked
from tasks.models.policy import Policy

# a conversation with the end of a turn of each role, and the beginning of the next turn
SHORT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3"},
]
INSTRUCTING = ("system", "developer")  # roles
WITH_SYSTEM = [{"role": "system", "content": "0"}, *SHORT]  # some templates reject it


def template_of(tokenizer: PreTrainedTokenizerBase) -> Template:
    """Return the chat template of a tokenizer. Raise TemplateFailed if it has none."""
    if tokenizer.chat_template is None:
        raise TemplateFailed(
            "it is chat messages, and the policy has no chat template: set raw: true in its "
            "entry in `ingest.sources`, and no system, to make it plain text, or use a policy with "
            "a template"
        )
    try:
        text = tokenizer.get_chat_template()
    except ValueError as error:
        raise TemplateFailed(f"the policy's chat template cannot be chosen: {error}") from error
    return shared_template(text, json.dumps(tokenizer.special_tokens_map, default=str))


@lru_cache(maxsize=4)
def shared_template(text: str, special_tokens: str) -> Template:
    """Return a template that tokenizers share, because starting its process takes seconds."""
    return Template(text, json.loads(special_tokens))


def encode_chats(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Return the token ids of conversations, rendered by the policy's chat template. Raise
    TemplateFailed with the index of the first conversation that fails."""
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
    """Return `literal.mark_for` of these texts, with the policy's chat template, if it has one."""

    def turns() -> str:
        if tokenizer.chat_template is None:
            return ""
        texts = template_of(tokenizer).render([(SHORT, False), (WITH_SYSTEM, False)])
        return "".join(text for text in texts if isinstance(text, str))

    return mark_for(texts, tokenizer, turns)


def with_mark(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, mark: str | None
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with `mark` inserted into the protected tokens in their text."""
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
    """Return the token ids of `text`, which is `template` with a question in place of `{prompt}`.
    Special tokens in the template are encoded as tokens, those in the question as text."""
    before, _, after = (template or "{prompt}").partition("{prompt}")
    if not (text.startswith(before) and text.endswith(after)):
        before = after = ""
    question = text[len(before) : len(text) - len(after)]
    mark = mark_of([question], tokenizer)
    if mark is not None:
        text = before + marked(question, tokenizer, mark) + after
    return encode_marked(text, tokenizer, mark, add_special_tokens=add_special_tokens)


def render_reply(
    text: str, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], *, is_chat: bool
) -> list[int]:
    """Return the token ids that follow a finished turn of the policy: the reply `text`, and the
    beginning of the next turn. Plain text is encoded unchanged. In a chat, the tokens are taken
    from a short separate conversation, in which a user's message follows an assistant's, because
    some templates change earlier turns when these are rendered again. `stop_ids` are the tokens
    that end a turn.

    Raise ArtifactError if the template rewrites the turn before a reply, or does not end it."""
    if not is_chat:
        return encode_plain(text, tokenizer, add_special_tokens=False)
    question = [{"role": "user", "content": "1"}]
    turn = [*question, {"role": "assistant", "content": "2"}]
    reply = [*turn, {"role": "user", "content": text}]
    opened, finished, whole = encode_chats(
        [(question, True), (turn, False), (reply, True)], tokenizer
    )
    # tokens of the template after the stop token of the policy's turn belong to the reply
    pairs = enumerate(zip(opened, finished, strict=False))
    begin = next((place for place, (a, b) in pairs if a != b), min(len(opened), len(finished)))
    stops = [n for n in range(begin, len(finished)) if finished[n] in stop_ids]
    if not stops:
        raise ArtifactError(
            "the policy's chat template ends an assistant's turn without a token that ends a "
            "completion (eos_token_id of the tokenizer and of generation_config.json): turns "
            "cannot be separated"
        )
    end = stops[0] + 1
    if whole[:end] != finished[:end]:
        raise ArtifactError(
            "the policy's chat template changes a finished turn when a reply follows it, so the "
            "conversation that is sampled would not be the one that is trained on: use another "
            "template for several turns"
        )
    return whole[end:]


def messages_of(
    row: Sequence[Any], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, str]] | None:
    """Return the chat messages of a row of the table PROMPTS (prompt, messages, template), or None
    for plain text."""
    prompt, messages, template = row
    if messages is not None:
        return list(json.loads(messages))
    is_plain = template is not None or tokenizer.chat_template is None
    return None if is_plain else [{"role": "user", "content": prompt}]


def drops_first(turns: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template renders a conversation without its first message."""
    other = [{**turns[0], "content": f"{turns[0]['content']} 1"}, *turns[1:]]
    one, two = encode_chats([(turns, True), (other, True)], tokenizer)
    return one == two


def encode_prompts(
    prompts: pl.DataFrame, tokenizer: PreTrainedTokenizerBase, policy: Policy, room: int
) -> list[list[int]]:
    """Return the token ids of every prompt, with chat messages rendered by the policy's template.
    Raise ArtifactError with the id of the first prompt that fails to render, has no tokens or has a
    token without an embedding, or of the shortest prompt that leaves no room for `room` tokens."""
    rows = prompts.select("prompt", "messages", "template").rows()
    turns = [messages_of(row, tokenizer) for row in rows]
    chats = [row for row, one in enumerate(turns) if one is not None]
    try:
        conversations = [(turns[row] or [], True) for row in chats]
        rendered = iter(encode_chats(conversations, tokenizer) if chats else [])
    except TemplateFailed as error:
        row = chats[error.number]
        is_plain = prompts["messages"][row] is None
        advice = "; raw: true of its entry in `ingest.sources` omits the template"
        raise ArtifactError(
            f"prompt {prompts['prompt_id'][row]}: {error}{advice if is_plain else ''}"
        ) from error
    led = [(row, one) for row, one in enumerate(turns) if one and one[0]["role"] in INSTRUCTING]
    if led and drops_first(led[0][1], tokenizer):
        raise ArtifactError(
            f"prompt {prompts['prompt_id'][led[0][0]]}: the policy's chat template drops its "
            f"{led[0][1][0]['role']} message: remove it (`system` in `ingest.sources`, or in "
            "the rows), or add its text to the question"
        )
    encoded = [
        encode_plain(text, tokenizer, template) if one is None else next(rendered)
        for one, (text, _, template) in zip(turns, rows, strict=True)
    ]
    if [] in encoded:
        raise ArtifactError(
            f"prompt {prompts['prompt_id'][encoded.index([])]} encodes to no token: check its text "
            "and the policy's tokenizer and chat template"
        )
    for prompt, last in zip(prompts["prompt_id"], map(max, encoded), strict=True):
        if last >= policy.vocab_size:
            raise ArtifactError(
                f"prompt {prompt} has the token {tokenizer.convert_ids_to_tokens(last)!r}, and the "
                f"policy embeds only {policy.vocab_size} tokens: resize its embedding, or remove "
                "the token from its tokenizer or chat template"
            )
    bad = [row for row, ids in enumerate(encoded) if len(ids) + room > policy.max_length]
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


def decode(
    token_ids: Sequence[Sequence[int]],
    finish_reasons: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Return the text of each completion, without its stop token and other special tokens."""
    bodies = [
        list(ids[:-1] if reason == "stop" else ids)
        for ids, reason in zip(token_ids, finish_reasons, strict=True)
    ]
    return list(tokenizer.batch_decode(bodies, skip_special_tokens=True))
