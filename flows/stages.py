"""The stages of one flow run: what DVC says about each, and bringing one up to date."""

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from flows import commands, lock, reasons, roots, selection
from flows.roots import Root
from tasks.common import disk, params
from tasks.common.code import installed_version
from tasks.common.files import ArtifactError, digest_file, read_json
from tasks.common.sealed import write_sealed

CODE = "code"  # the stage that digests the code: all others depend on what it writes
NO_ROOM = re.compile(
    rf"^ERROR: .*\[Errno ({'|'.join(map(str, disk.REASONS))})\]"
)  # dvc's own words
LABELS = {"Cached": "up to date", "Ran": "ran", "Restored": "restored from the run cache"}


class StageFailed(RuntimeError):
    """A stage's command, or dvc itself, ended with a non-zero status."""


@dataclass
class Stages:
    """What one look at a data root found, and what has happened since. Stages go by their names in
    its own pipeline."""

    dvc: commands.Dvc
    root: Root
    needs: Mapping[str, set[str]]
    ordered: list[str]
    left_out: list[str]
    changed: dict[str, list[Any]]
    forced: set[str]
    outcomes: dict[str, str] = field(default_factory=dict)
    code_reason: str = ""

    @classmethod
    def examine(
        cls, dvc: commands.Dvc, root: Root, recipes: list[str], seeds: list[str], force: list[str]
    ) -> "Stages":
        """Ask DVC for the graph, digest the code anew where it changed, and then ask DVC, once, for
        everything that changed."""
        needs = roots.own_needs(root, dvc.graph())
        forced = forced_of(root, needs, force)
        code_reason = digest_code(dvc, root, CODE in forced)
        changed = changes_of(dvc, root, root.pipeline)
        ordered, left_out = selection.select(needs, changed, recipes, seeds)
        stages = cls(dvc, root, needs, ordered, left_out, changed, forced - {CODE})
        if code_reason:
            stages.code_reason = code_reason
            stages.say(CODE, LABELS["Ran"], code_reason)
        return stages

    @property
    def stale(self) -> set[str]:
        """The chosen stages for which DVC found something to do, or that are forced."""
        return (set(self.changed) | self.forced) & set(self.ordered)

    @property
    def idle(self) -> bool:
        return not self.stale

    def bring_up_to_date(self, stage: str, dvc: commands.Dvc) -> tuple[str, str]:
        """(Cached, Ran or Restored; the reason), by a dvc process that has nothing else to do.
        Raises StageFailed when the stage did not succeed."""
        if stage == CODE and self.code_reason:
            self.outcomes[stage] = "Ran"
            self.note(stage, self.code_reason)
            return "Ran", self.code_reason
        self.outcomes[stage] = "Failed"
        changes = self.look_again(stage, dvc)
        if changes or stage in self.forced:
            reason, started = self.reason(stage, changes), time.time()
            self.say(stage, "starts", reason)
            self.outcomes[stage] = self.repro(stage, dvc)
            note = self.root.layout.sampling_note(stage)
            if said := reasons.sampled(note, started):
                reason += f"; {said}"
            self.note(stage, reason)
        else:
            reason = "nothing changed"
            self.outcomes[stage] = "Cached"
        if not self.idle:
            self.say(stage, LABELS[self.outcomes[stage]])
        return self.outcomes[stage], reason

    def note(self, stage: str, why: str) -> None:
        """Keep when and why a stage ran, for the report."""
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        note = {"when": when, "outcome": LABELS[self.outcomes[stage]], "why": why}
        with suppress(OSError):  # for people: nothing fails without it
            write_sealed(self.root.layout.run_note(stage), note)

    def repro(self, stage: str, dvc: commands.Dvc) -> str:
        """Have DVC run the stage, or restore it: Ran or Restored."""
        address = self.root.address(stage)
        code, started = dvc.repro(address, stage in self.forced)
        if code:
            raise StageFailed(failure(address, code, started, dvc.output.lines.tail))
        return "Ran" if started else "Restored"

    def look_again(self, stage: str, dvc: commands.Dvc) -> list[Any]:
        """What changed for `stage`. DVC is asked anew when something upstream ran: it may have come
        out equal. The code is digested before the first look."""
        outcomes = self.outcomes.copy()  # other threads add theirs
        ran = {name for name, outcome in outcomes.items() if outcome != "Cached"} - {CODE}
        if selection.upstream(self.needs, self.needs[stage]) & ran:
            return changes_of(dvc, self.root, self.root.address(stage)).get(stage, [])
        return self.changed.get(stage, [])

    def reason(self, stage: str, changes: list[Any]) -> str:
        phrases = explain(self.root, stage, changes) if changes else []
        return "; ".join((["asked for by --force"] if stage in self.forced else []) + phrases)

    def say(self, stage: str, what: str, why: str = "") -> None:
        """One line on the terminal, now."""
        place = f"[{self.ordered.index(stage) + 1}/{len(self.ordered)}]"
        said = f"{place} {self.root.titled(stage)}: {what}" + (f" ({why})" if why else "")
        print(f"{said}\n", end="", flush=True)  # in one piece, from whichever thread


def forced_of(root: Root, needs: Mapping[str, set[str]], force: list[str]) -> set[str]:
    """The stages of the root that are to run although nothing changed. A later round has none for
    what it takes from the first; the first has refused what is nowhere."""
    if root.number > 1:
        return set(force) & set(needs)
    return selection.choose(needs, force, "stage") if force else set()


def changes_of(dvc: commands.Dvc, root: Root, target: str) -> dict[str, list[Any]]:
    """What dvc finds changed of a target in the root, by the stages' own names."""
    changed = dvc.status(target)
    return {name: changed[address] for address, name in root.own(changed).items()}


def digest_code(dvc: commands.Dvc, root: Root, forced: bool) -> str:
    """Run the stage `code` where it is stale, and say why; nothing where it is up to date.

    DVC sees another file or another requirement. What it cannot see is a library that was installed
    without a change of the requirements: the digest files name the versions, so that is asked
    here."""
    address = root.address(CODE)
    changes = changes_of(dvc, root, address).get(CODE, [])
    moved = [] if changes else moved_versions(root)
    reasons_to_run = [
        *(["asked for by --force"] if forced else []),
        *(explain(root, CODE, changes) if changes else []),
        *moved,
    ]
    if not reasons_to_run:
        return ""
    options = ["--single-item", *(["--force"] if forced or moved else [])]
    answer = dvc.ask_and_read("--wait-for-lock", "repro", *options, address)
    if answer["code"]:
        lines = [*str(answer["output"]).splitlines(), *dvc.output.lines.tail]
        raise commands.CommandError(failure(address, answer["code"], True, lines))
    return "; ".join(reasons_to_run)


def moved_versions(root: Root) -> list[str]:
    """`torch 2.13.0 -> 2.14.0` for every installed library that the digest files name otherwise."""
    recorded: dict[str, str | None] = {}
    for path in root.layout.code_folder.rglob("*.json"):
        try:
            recorded |= read_json(path)["versions"]
        except (ArtifactError, KeyError):
            continue
    found = {name: installed_version(name) for name in sorted(recorded)}
    return [
        f"{name} {recorded[name]} -> {version}"
        for name, version in found.items()
        if version and version != recorded[name]
    ]


def explain(root: Root, stage: str, changes: list[Any]) -> list[str]:
    """Why a stage of the root is out of date. What it reads of earlier rounds is in their locks."""
    with commands.whole_lock():
        entries = lock.read(root.lock)
        made = [entry for other in root.earlier for entry in lock.read(other.lock).values()]
    return reasons.explain(stage, changes, entries, commands.ROOT, root.folder, made)


def failure(stage: str, code: int, started: bool, lines: Iterable[str]) -> str:
    """What failed, how to go on, and the last lines that were written."""
    said = list(lines)
    what = "its command failed" if started else "dvc did not get as far as its command"
    if remedies := commands.held("\n".join(said)):
        what = f"dvc did not get as far as its command; {remedies[0]}"
    elif started and any(NO_ROOM.search(line) for line in said):
        what = (
            "its command succeeded, and dvc could not keep what it made: see that the disk of "
            "dvc's cache (`dvc cache dir`) has room and can be written"
        )
    last = "\n".join(said) or "(nothing was written)"
    return (
        f"{what}; exit status {code}. To go on: python -m flows.pipeline; this stage alone: "
        f"dvc repro -s {stage}\n\nIts last lines:\n{last}"
    )


def code_version(root: Root, stage: str) -> str | None:
    """A digest of the code that `stage` can run; None for the stage `code` itself."""
    name, recipe, _ = params.coordinates(stage)
    path = root.layout.code(name, recipe)
    return digest_file(path) if path.exists() else None
