"""The section `ingest`."""

from typing import Any, Literal

from tasks.common.params import ParamsError, at_least, settings

NAMES = ("train", "validation", "test")


@settings
class Sizes:
    """The section `ingest.splits`: the number of prompts in each split. Splits are disjoint."""

    train: int | None = 1024  # null: all remaining rows
    validation: int | None = 128  # null: all of the sources that name this split; 0: none
    test: int | None = 256  # null: all of the sources that name this split; 0: none


@settings
class Contamination:
    """The section `ingest.contamination`: training prompts that are also in validation or test are
    dropped."""

    overlap: float | None = 0.7  # share of the shorter prompt's n-grams; null: only equal prompts
    ngram: int = 3  # consecutive words, numbers and signs
    same_numbers: bool = True  # near only with the same numbers and operators in the same order

    def __post_init__(self) -> None:
        at_least(1, ingest__contamination__ngram=self.ngram)
        if self.overlap is not None and not 0 < self.overlap <= 1:
            raise ParamsError(
                f"ingest.contamination.overlap is {self.overlap}; it must be above 0 and at most "
                "1, or null"
            )


@settings
class Shot:
    """A solved example in front of a prompt, as two turns of a chat."""

    prompt: str  # of the user
    completion: str  # of the assistant


@settings
class Source:
    """One entry of `ingest.sources`."""

    preset: str  # name of a file in tasks/ingest/sources
    settings: dict[str, Any]  # settings of that file
    prompt_template: str | None = None  # contains {prompt} once: "Question: {prompt}\\nAnswer:"
    system: str | None = None  # system message; replaces that of a chat
    shots: list[Shot] | None = None  # solved examples in front of every prompt
    raw: bool = False  # plain text, without the policy's chat template
    verifier: Any = None  # replaces the preset's: a name, or a choice by column
    weight: float | None = None  # share of every split, relative to the other weights
    max_rows: int | None = None  # maximum number of rows of this source
    split: Literal["train", "validation", "test"] | None = None  # split for all of its rows
    where: dict[str, Any] | None = None  # use only rows with these column values
    question: Any = None  # field with only the question, or the texts around it

    @property
    def template(self) -> str | None:
        """The template, with {prompt}, for plain text; None to use the policy's chat template."""
        return "{prompt}" if self.raw else self.prompt_template


@settings
class Ingest:
    """The section `ingest`."""

    sources: list[Source]  # sources of prompts with answers
    seed: int = 0  # of the splits
    splits: Sizes = Sizes()  # rows per split
    max_prompt_characters: int | None = 20000  # longer prompts are rejected; null: no limit
    contamination: Contamination = Contamination()  # which training prompts are dropped

    def __post_init__(self) -> None:
        if not self.sources:
            raise ParamsError("ingest.sources is empty: name at least one source")
        for name in NAMES:
            self.check_split(name, [n for n, one in enumerate(self.sources) if one.split == name])

    def check_split(self, name: str, named: list[int]) -> None:
        """Raise ParamsError for an invalid size of a split; `named` are the indices of the sources
        that name it."""
        size, least = getattr(self.splits, name), int(name == "train")
        if size is not None and size < least:
            raise ParamsError(f"ingest.splits.{name} is {size}; it must be at least {least}")
        if size == 0 and named:
            raise ParamsError(
                f"ingest.splits.{name} is 0, and ingest.sources[{named[0]}] names that split: give "
                "it a size or null, or remove `split`"
            )
        if size is None and name != "train" and not named:
            raise ParamsError(
                f"ingest.splits.{name} is null, which takes all rows of the sources that name it, "
                f"and none does: give a number, or a source `split: {name}`"
            )
