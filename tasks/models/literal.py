"""User text that spells tokens of the policy, such as `<|im_end|>`. Encoded as those tokens, it
would end its turn and begin another, for example the system's. So it is encoded as plain text.

A mark is inserted after the first character of such a token. A chat template renders the marked
text like any other text. The rendered text is split at the marks, and the parts are encoded
separately, so that no tokenizer gets the whole token. Text without such tokens is encoded as usual.

Special tokens are protected, and so are other added tokens that begin or end turns in the chat
template (some policies do not mark these as special). Tokens such as `<think>` stay tokens."""

import re
import weakref
from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedTokenizerBase

# code points for private use: the mark is one of these characters that no text contains
MARKS = range(0xF0000, 0x10FFFE)
Render = Callable[[], str]

patterns: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, re.Pattern[str]]] = (
    weakref.WeakKeyDictionary()
)


def mark_for(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, turns: Render) -> str | None:
    """Return a character for `marked` that none of `texts` contains, or None if no text spells a
    protected token. `turns()` returns a short conversation, rendered by the chat template."""
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
    """Return `text` with `mark` after the first character of every `protected` token."""
    return patterns[tokenizer]["protected"].sub(lambda found: found[0] + mark, text)


def encode_marked(
    text: str, tokenizer: PreTrainedTokenizerBase, mark: str | None, *, add_special_tokens: bool
) -> list[int]:
    """Return the token ids of a text with marks, or of a text without marks if `mark` is None."""
    first, *rest = [text] if mark is None else text.split(mark)
    token_ids = list(tokenizer(first, add_special_tokens=add_special_tokens).input_ids)
    for part in rest:
        token_ids += tokenizer(part, add_special_tokens=False).input_ids
    return token_ids


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Return all added tokens, and whether each is special."""
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    return {**added, **dict.fromkeys(tokenizer.all_special_tokens, True)}


def protected(tokenizer: PreTrainedTokenizerBase, turns: str) -> list[str]:
    """Return the special tokens, and other added tokens in the rendered conversation `turns`."""
    return [text for text, special in added_tokens(tokenizer).items() if special or text in turns]


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the first character of each token in a text. It omits tokens of
    one character, which cannot be split. It groups tokens by their first character, because a
    search would otherwise try thousands of tokens at every position."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        if len(token) > 1:
            rests.setdefault(token[0], []).append(re.escape(token[1:]))
    firsts = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    return re.compile("|".join(firsts) or "(?!)")
