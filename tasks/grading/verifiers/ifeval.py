"""`ifeval`: the response follows its instructions, by the rules of IFEval (Zhou et al., arXiv
2311.07911).

The gold is the JSON text {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, as
published; null arguments are ignored. `correct` is the paper's prompt-level accuracy: all
instructions are followed. The score is the share of followed instructions. `loose` is the paper's
second criterion: an instruction is followed if any of eight variants of the response follows it.
The variants omit any combination of the first line, the last line and the stars. The rules and
their approximations are in `tasks/grading/instructions/rules.py`."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tasks.grading.instructions.rules import INSTRUCTIONS
from tasks.grading.verdict import Verdict

canonical_completion = None  # a gold contains rules for a response, not a response
EXAMPLE = "ifeval: {method: ifeval, loose: false}  # true: without lines that frame the answer"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a prompt: its published id and its arguments."""

    name: str
    arguments: dict[str, Any]

    def follows(self, text: str) -> bool:
        """Return whether a text follows the instruction; an empty text follows none."""
        return bool(text.strip()) and INSTRUCTIONS[self.name](text, **self.arguments)


def verify(completion: str, answer: str, *, loose: bool) -> Verdict:
    """Return `correct` if all instructions are followed, else `wrong` with the broken ones;
    `unparsed` without text. An unknown instruction or argument in the gold is an `error`."""
    instructions = read_gold(answer)
    if not completion.strip():
        return Verdict("unparsed", "")
    texts = list(variants(completion)) if loose else [completion]
    broken = [one.name for one in instructions if not any(map(one.follows, texts))]
    share = 1 - len(broken) / len(instructions)
    return Verdict("wrong" if broken else "correct", ", ".join(broken), share)


@lru_cache(maxsize=1024)
def read_gold(answer: str) -> tuple[Instruction, ...]:
    """Return the instructions of a gold. Raise ValueError for an invalid gold."""
    gold = json.loads(answer)
    names, arguments = gold["instruction_id_list"], gold["kwargs"]
    if not names or len(names) != len(arguments):
        raise ValueError(f"the gold has {len(names)} instructions and {len(arguments)} arguments")
    found = tuple(
        Instruction(name, {key: value for key, value in (given or {}).items() if value is not None})
        for name, given in zip(names, arguments, strict=True)
    )
    for one in found:
        check(one)
    return found


def check(one: Instruction) -> None:
    """Raise ValueError for an unknown instruction or for arguments that do not belong to it."""
    if one.name not in INSTRUCTIONS:
        raise ValueError(f"the instruction {one.name!r} is unknown")
    parameters = inspect.signature(INSTRUCTIONS[one.name]).parameters.values()
    wanted = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if wanted != set(one.arguments):
        raise ValueError(
            f"{one.name} takes the arguments {', '.join(sorted(wanted)) or 'none'}; "
            f"the gold gives {', '.join(sorted(one.arguments)) or 'none'}"
        )
    try:
        one.follows("text")
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{one.name}: {one.arguments}: {error}") from error


def variants(text: str) -> Iterator[str]:
    """Yield the response in full, without its first line, without its last line and without both,
    each with and without stars."""
    lines = text.split("\n")
    for kept in (lines, lines[1:], lines[:-1], lines[1:-1]):
        part = "\n".join(kept)
        yield part
        yield part.replace("*", "")
