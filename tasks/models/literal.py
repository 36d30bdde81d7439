"""Text of users that spells tokens of the policy's own, such as `<|im_end|>`. Encoded as those
tokens it would end its turn and begin another, the system's for example. So it is encoded as text.

Where such a token begins, a mark follows its first character. A chat template renders the marked
text like any other. What it renders is encoded between the marks, each part by itself, so that no
tokenizer sees the token whole. Text without such tokens is encoded as it always was.

Protected are the special tokens, and other added tokens with which the chat template begins or ends
turns (some policies do not call theirs special). Other added tokens, such as `<think>`, stay."""

import re
import weakref
from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedTokenizerBase

# of planes for private use, from which a mark is taken that no text has
MARKS = range(0xF0000, 0x10FFFE)
Render = Callable[[], str]

patterns: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, re.Pattern[str]]] = (
    weakref.WeakKeyDictionary()
)


def mark_for(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, turns: Render) -> str | None:
    """A character for `marked` that is in none of `texts`; None where none of them spells a
    protected token. `turns()` is a short conversation as the chat template renders
    it."""
    found = patterns.setdefault(tokenizer, {})
    if "added" not in found:
        found["added"] = pattern_of(added_tokens(tokenizer))
    if not any(map(found["added"].search, texts)):
        return None
    if "protected" not in found:
        found["protected"] = pattern_of(protected(tokenizer, turns()))
    if not any(map(found["protected"].search, texts)):
        return None
    return next(char for char in map(chr, MARKS) if not any(char in text for text in texts))


def marked(text: str, tokenizer: PreTrainedTokenizerBase, mark: str) -> str:
    """The text with `mark` after the first character of every protected token."""
    return patterns[tokenizer]["protected"].sub(lambda found: found[0] + mark, text)


def encode_marked(
    text: str, tokenizer: PreTrainedTokenizerBase, mark: str | None, *, add_special_tokens: bool
) -> list[int]:
    """The token ids of a text with marks, or of one without, for which `mark` is None."""
    first, *rest = [text] if mark is None else text.split(mark)
    token_ids = list(tokenizer(first, add_special_tokens=add_special_tokens).input_ids)
    for part in rest:
        token_ids += tokenizer(part, add_special_tokens=False).input_ids
    return token_ids


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """All added tokens, and whether each is a special one."""
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    return {**added, **dict.fromkeys(tokenizer.all_special_tokens, True)}


def protected(tokenizer: PreTrainedTokenizerBase, turns: str) -> list[str]:
    """The special tokens, and other added ones in a short conversation as it is rendered."""
    return [text for text, special in added_tokens(tokenizer).items() if special or text in turns]


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of a token, wherever one begins. A token of one character cannot
    be taken apart. By first characters, or a search would try thousands of tokens everywhere."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        if len(token) > 1:
            rests.setdefault(token[0], []).append(re.escape(token[1:]))
    firsts = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    return re.compile("|".join(firsts) or "(?!)")
