"""The numbers of rollouts that a stage reused and sampled, and why it sampled, such as "policy
digest changed: 3f2a.. -> 91c0..".

Each stage writes a note under the data root about its request to the store (policy, sampling
parameters, number of samples, location). The next run compares its own request with the note, and
explains other gaps by the store's content. The note is not an output of the stage, because it
differs between equal runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common.artifacts import Layout
from tasks.common.checksums import read_note, write_checked
from tasks.common.config.changes import differences


@dataclass(frozen=True)
class Usage:
    """The actual work of one call. It differs between equal runs, so no artifact contains it."""

    reused_rollouts: int
    sampled_rollouts: int
    sampled_tokens: int
    seconds: float
    why: str
    engine: Mapping[str, float] = field(default_factory=dict)  # metrics of the engine itself

    @property
    def summary(self) -> str:
        """One line for the log and the tracker."""
        sampled = f"{self.sampled_rollouts:,} sampled"
        if self.sampled_rollouts:
            sampled += f" ({self.sampled_tokens:,} tokens): {self.why}"
        return f"{self.reused_rollouts:,} rollouts reused, {sampled}"

    def metrics(self) -> dict[str, float]:
        """Return the figures for the tracker."""
        names = ("reused_rollouts", "sampled_rollouts", "sampled_tokens")
        return {
            **{name: float(getattr(self, name)) for name in names},
            "sampling_seconds": self.seconds,
            **self.engine,
        }

    def __add__(self, other: "Usage") -> "Usage":
        """Return the sum. Keep reasons only of usages with samples; `other`'s metrics win."""
        return Usage(
            self.reused_rollouts + other.reused_rollouts,
            self.sampled_rollouts + other.sampled_rollouts,
            self.sampled_tokens + other.sampled_tokens,
            self.seconds + other.seconds,
            "; ".join(dict.fromkeys(use.why for use in (self, other) if use.sampled_rollouts)),
            {**self.engine, **other.engine},
        )


def cell_name(stage: str, recipe: str | None, seed: int | None) -> str:
    """Return the stage's name in DVC, such as `profile` or `evaluate@sgpo-0`."""
    return stage if recipe is None else f"{stage}@{recipe}-{seed}"


def last_note(layout: Layout, cell: str, kind: str) -> Mapping[str, Any] | None:
    """Return the stage's last request of this `kind` (`sampled` or `greedy`), or None."""
    note = read_note(layout.sampling_note(cell)).get(kind)
    return None if note is None else dict(note["asked"])


def write_note(
    layout: Layout, cell: str, kind: str, request: Mapping[str, Any], summary: str
) -> None:
    """Write a note of the request and its result. `kind` is `sampled` or `greedy`."""
    path: Path = layout.sampling_note(cell)
    write_checked(path, {**read_note(path), kind: {"asked": dict(request), "said": summary}})


def explain(
    last: Mapping[str, Any] | None,
    request: Mapping[str, Any],
    held: pl.DataFrame,
    missing: pl.DataFrame,
    damaged: int,
) -> str:
    """Return the reason for sampling `missing`, in words: the changes since `last`, and the gaps in
    the store. `held` are the requested prompts with samples in the store."""
    if last is None and held.is_empty():
        phrases = [
            "first time in this data root, nothing in the store for policy "
            f"{short(request['policy'])}"
        ]
    else:
        phrases = changes(last or request, request)
    # a new policy or new sampling parameters explain all gaps
    if not any(phrase.startswith(("first", "policy", "sampling")) for phrase in phrases):
        phrases += gaps(request["num_samples"], (last or request)["num_samples"], held, missing)
    if damaged:
        phrases.append(f"{counted(damaged, 'damaged shard')} set aside")
    return "; ".join(phrases)


def changes(last: Mapping[str, Any], request: Mapping[str, Any]) -> list[str]:
    """Return the differences between this request and the last one, in words."""
    phrases: list[str] = []
    if last["policy"] != request["policy"]:
        phrases.append(
            f"policy digest changed: {short(last['policy'])} -> {short(request['policy'])}"
        )
    phrases += differences("sampling", last["sampling"], request["sampling"])
    for name, label in (("num_samples", "num_samples"), ("location", "store.location")):
        phrases += differences(label, last[name], request[name])
    return phrases


def gaps(
    num_samples: int, last_samples: int, held: pl.DataFrame, missing: pl.DataFrame
) -> list[str]:
    """Return phrases that count the prompts new to the store, and those with too few samples."""
    prompts = missing.select("prompt_digest").unique()
    known = prompts.join(held, on="prompt_digest", how="semi")
    partly = len(known)
    new = len(prompts) - partly
    phrases = [f"{counted(new, 'prompt')} new to the store"] * bool(new)
    if partly and num_samples <= last_samples:
        phrases.append(
            f"{counted(partly, 'prompt')} with fewer than {num_samples} samples in the store"
        )
    return phrases


def counted(number: int, what: str) -> str:
    """Return "1 prompt" or "2 prompts"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def short(digest: str) -> str:
    """Return the beginning of a digest."""
    return f"{digest[:4]}.."
